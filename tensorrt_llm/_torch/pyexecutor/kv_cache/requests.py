# SPDX-License-Identifier: Apache-2.0
"""What the managers read of a request and of a scheduled batch, and the request they make themselves: a
dummy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class CacheRequest(Protocol):
    """The part of `LlmRequest` that the cache sees. Nothing of it is written by the managers."""

    py_request_id: int
    py_draft_tokens: list[int]
    py_num_accepted_draft_tokens: int
    context_current_position: int
    context_chunk_size: int

    def get_tokens(self, beam: int = 0) -> Sequence[int]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def is_first_context_chunk(self) -> bool: ...
    @property
    def is_last_context_chunk(self) -> bool: ...
    @property
    def is_dummy(self) -> bool: ...


class CacheBatch(Protocol):
    """One scheduled step: requests that run a prefill chunk, and requests that run a verify round or one
    token.
    """

    @property
    def context_requests(self) -> Sequence[CacheRequest]: ...
    @property
    def generation_requests(self) -> Sequence[CacheRequest]: ...


@dataclass(slots=True, kw_only=True)
class DummyRequest:
    """A request of the executor's own: warm-up, graph padding, attention-DP filler.

    It owns pages and a slot as any other.

    `token_num` tokens are cached; a generation dummy has the last of them still to run, with
    `py_draft_tokens` after it.
    """

    py_request_id: int
    token_num: int
    is_gen: bool
    py_draft_tokens: list[int] = field(default_factory=list)
    py_num_accepted_draft_tokens: int = 0
    py_rewind_len: int = 0
    context_current_position: int = 0
    context_chunk_size: int = 0
    is_attention_dp_dummy: bool = False
    is_cuda_graph_dummy: bool = False
    is_dummy: bool = True

    @property
    def prompt_len(self) -> int:
        return self.token_num

    @property
    def is_first_context_chunk(self) -> bool:
        return not self.is_gen

    @property
    def is_last_context_chunk(self) -> bool:
        return not self.is_gen

    def get_tokens(self, beam: int = 0) -> Sequence[int]:
        """Token 1 over and over: a dummy's tokens only have to exist."""
        return [1] * self.token_num
