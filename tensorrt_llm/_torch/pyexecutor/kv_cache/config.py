# SPDX-License-Identifier: Apache-2.0
"""What the managers read of the user's configuration, of a model and of a drafter: protocols, and a plain
value of each.

`llmapi`'s pydantic classes carry the same field names and satisfy these protocols; nothing here imports them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import torch

ReusePolicy = Literal["all_reusable", "per_request", "per_conversation"]


class CacheType(Enum):
    """What an attention page holds: keys and values, one latent per token (MLA), or an encoder's keys and
    values.
    """

    SELF = "self"
    SELFKONLY = "selfkonly"
    CROSS = "cross"

    @property
    def kv_factor(self) -> int:
        """Buffers per layer: 1 where keys and values share one latent."""
        return 1 if self is CacheType.SELFKONLY else 2


class MambaStateConfigLike(Protocol):
    """When to keep snapshots of the recurrent state (tokens; a periodic interval of 0 is never)."""

    @property
    def periodic_snapshot_interval(self) -> int: ...
    @property
    def additional_snapshot_offsets_from_start(self) -> Sequence[int]: ...
    @property
    def additional_snapshot_offsets_from_end(self) -> Sequence[int]: ...
    @property
    def enable_branch_snapshot(self) -> bool: ...


class BlockReuseConfigLike(Protocol):
    """Which snapshots of a finished request stay reusable.

    Turns of a conversation are not tracked: `max_num_turns` is 1, and what is older goes by age.
    """

    @property
    def policy(self) -> ReusePolicy: ...
    @property
    def max_num_turns(self) -> int: ...


class KvCacheConfigLike(Protocol):
    """The fields of TensorRT-LLM's `KvCacheConfig` that the cache reads."""

    @property
    def enable_block_reuse(self) -> bool: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def max_attention_window(self) -> Sequence[int] | None: ...
    @property
    def free_gpu_memory_fraction(self) -> float | None: ...
    @property
    def max_gpu_total_bytes(self) -> int: ...
    @property
    def host_cache_size(self) -> int | None: ...
    @property
    def disk_cache_size(self) -> int | None: ...
    @property
    def disk_cache_path(self) -> str | None: ...
    @property
    def enable_partial_reuse(self) -> bool: ...
    @property
    def max_util_for_resume(self) -> float: ...
    @property
    def enable_kv_pool_rebalance(self) -> bool: ...
    @property
    def pool_ratio(self) -> Sequence[float] | None: ...
    @property
    def avg_seq_len(self) -> int | None: ...
    @property
    def use_kv_cache_manager_v2(self) -> bool | Literal["auto"]: ...
    @property
    def mamba_state_config(self) -> MambaStateConfigLike: ...
    @property
    def block_reuse_config(self) -> BlockReuseConfigLike: ...


class SpecConfigLike(Protocol):
    """What a speculative configuration tells the cache.

    A verify round runs `tokens_per_gen_step` tokens at most.
    """

    @property
    def decoding_type(self) -> str: ...
    @property
    def max_draft_len(self) -> int | None: ...
    @property
    def tokens_per_gen_step(self) -> int: ...
    @property
    def draft_len_schedule(self) -> dict[int, int] | None: ...
    @property
    def acceptance_rate_window_size(self) -> int | None: ...
    @property
    def acceptance_rate_threshold(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaStateSettings:
    """Plain value of `MambaStateConfigLike`: by default no snapshot but those a reuse policy asks for."""

    periodic_snapshot_interval: int = 0
    additional_snapshot_offsets_from_start: tuple[int, ...] = ()
    additional_snapshot_offsets_from_end: tuple[int, ...] = ()
    enable_branch_snapshot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReuseSettings:
    """Plain value of `BlockReuseConfigLike`."""

    policy: ReusePolicy = "all_reusable"
    max_num_turns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSettings:
    """Plain value of `KvCacheConfigLike` with the defaults of TensorRT-LLM's `KvCacheConfig`."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: tuple[int, ...] | None = None
    free_gpu_memory_fraction: float | None = 0.9
    max_gpu_total_bytes: int = 0
    host_cache_size: int | None = None
    disk_cache_size: int | None = None
    disk_cache_path: str | None = None
    enable_partial_reuse: bool = True
    max_util_for_resume: float = 0.95
    enable_kv_pool_rebalance: bool = False
    pool_ratio: tuple[float, ...] | None = None
    avg_seq_len: int | None = None
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    mamba_state_config: MambaStateSettings = field(default_factory=MambaStateSettings)
    block_reuse_config: BlockReuseSettings = field(default_factory=BlockReuseSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecSettings:
    """Plain value of `SpecConfigLike`: a chain of `max_draft_len` drafts behind one golden token."""

    decoding_type: str = "NGram"
    max_draft_len: int = 1
    draft_len_schedule: dict[int, int] | None = None
    acceptance_rate_window_size: int | None = None
    acceptance_rate_threshold: float | None = None

    @property
    def tokens_per_gen_step(self) -> int:
        return self.max_draft_len + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """How one layer's attention cache is shaped on this rank: heads, head width and element type."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_token(self, kv_factor: int) -> int:
        return kv_factor * self.bytes_per_token_and_role

    @property
    def bytes_per_token_and_role(self) -> int:
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize


def refuse_unsupported(arguments: Mapping[str, object]) -> None:
    """ValueError for the first of these arguments that is neither None nor False."""
    for name, value in arguments.items():
        if value not in (None, False):
            raise ValueError(f"{name} is {value!r}; this package does not support it: leave it out")


def refuse_conversation_turns(config: KvCacheConfigLike) -> None:
    """ValueError where more than one turn of a conversation is to be kept: which request is a turn of which
    conversation is not known here.
    """
    turns = config.block_reuse_config.max_num_turns
    if turns != 1:
        raise ValueError(
            f"kv_cache_config.block_reuse_config.max_num_turns is {turns}, but turns of a conversation are "
            "not tracked, and snapshots that nobody uses go by age: leave it at 1"
        )


def check_dtype(name: str, value: object) -> None:
    """ValueError unless the argument is a floating element type of torch."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ValueError(f"{name} is {value!r}; give a floating torch.dtype, such as torch.bfloat16")
