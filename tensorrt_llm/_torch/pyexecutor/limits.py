# SPDX-License-Identifier: Apache-2.0
"""What bounds a step, and the pages that a request needs."""

from dataclasses import dataclass

from tensorrt_llm._torch.modules.metadata import PREFILL_ALIGNMENT_TOKENS
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What bounds a step and the requests that run at once.

    `max_pages` are the attention pages that live requests may hold, of `tokens_per_page` tokens each;
    `tokens_per_gen_step` is 1 + K. Raises ValueError where a step could not run one request of each phase.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_pages: int
    tokens_per_page: int
    tokens_per_gen_step: int = 1
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size is {self.max_batch_size}; it must be >= 1")
        least = PREFILL_ALIGNMENT_TOKENS + self.tokens_per_gen_step
        if self.max_num_tokens < least:
            raise ValueError(
                f"max_num_tokens is {self.max_num_tokens}; it must be >= {least}: one prefill chunk of "
                f"{PREFILL_ALIGNMENT_TOKENS} tokens and one verify round of {self.tokens_per_gen_step}"
            )

    def pages_of(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.tokens_per_page)

    def pages_for_life(self, req: LlmRequest) -> int:
        """Pages at the request's longest: all its tokens but the last one, which is never computed."""
        return self.pages_of(req.prompt_len + req.max_new_tokens - 1)

    def pages_for_step(self, req: LlmRequest) -> int:
        """Pages at the end of the request's prompt or of its next round, with all drafts of a full one."""
        num_tokens = req.num_tokens - 1 + self.tokens_per_gen_step
        return self.pages_of(min(num_tokens, req.prompt_len + req.max_new_tokens - 1))

    def check_can_run(self, prompt_len: int, max_tokens: int) -> None:
        """Raise ValueError, naming the limit, for a request that could not run on an idle executor."""
        if prompt_len + 1 > self.max_seq_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; with max_seq_len={self.max_seq_len} for prompt and "
                f"output it may have {self.max_seq_len - 1}"
            )
        if not self.enable_chunked_prefill and prompt_len > self.max_num_tokens:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; without enable_chunked_prefill it may have "
                f"max_num_tokens={self.max_num_tokens}"
            )
        new_tokens = min(max_tokens, self.max_seq_len - prompt_len)
        pages = self.pages_of(prompt_len + new_tokens - 1)
        if pages > self.max_pages:
            raise ValueError(
                f"prompt ({prompt_len} tokens) and max_tokens ({new_tokens}) need {pages} cache pages of "
                f"{self.tokens_per_page} tokens; there are {self.max_pages}: shorten them or give the cache "
                "more memory"
            )
