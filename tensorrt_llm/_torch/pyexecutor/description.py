# SPDX-License-Identifier: Apache-2.0
"""What was built: limits for those who check requests, and sizes for the start-up line."""

from dataclasses import dataclass

from tensorrt_llm._torch.pyexecutor.config import VerifySchemeName


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorDescription:
    """An executor in numbers.

    `verify_scheme` is None without speculation, where `max_draft_len` is 0. `pool_bytes` are the pages and
    state slots, `records_bytes` the drafts' records, `other_side_bytes` what else lies beside the slots.
    """

    model: str
    device: str
    dtype: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    vocab_size: int
    max_draft_len: int = 0
    verify_scheme: VerifySchemeName | None = None
    attention_pages: int = 0
    tokens_per_page: int = 0
    ssm_slots: int = 0
    pool_bytes: int = 0
    records_bytes: int = 0
    other_side_bytes: int = 0

    def cache_line(self) -> str:
        """The cache's split and the scheme, for a log."""
        scheme = "no speculation" if self.verify_scheme is None else f"drafts undone by {self.verify_scheme}"
        return (
            f"{self.attention_pages} attention pages of {self.tokens_per_page} tokens, "
            f"{self.ssm_slots} state slots, {_mib(self.pool_bytes)} of pools, "
            f"{_mib(self.records_bytes)} of draft records, {_mib(self.other_side_bytes)} of other side "
            f"buffers, {scheme}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
