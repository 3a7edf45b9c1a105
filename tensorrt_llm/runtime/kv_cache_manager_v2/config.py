# SPDX-License-Identifier: Apache-2.0
"""Configuration values. Frozen: copy them with `dataclasses.replace`. Every mistake raises `MisuseError`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ._math import float32
from ._types import CacheTier, LayerId
from .errors import MisuseError

MAX_CAPACITY_TOKENS = 2**31 - 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise MisuseError(message)


def _require_positive(name: str, value: int) -> None:
    _require(isinstance(value, int) and value > 0, f"{name} is {value!r}; give a positive whole number")


@dataclass(frozen=True, slots=True)
class GpuCacheTierConfig:
    """The hot tier. `quota`: bytes for all pools together, rounded up to grains."""

    quota: int

    def __post_init__(self) -> None:
        _require_positive("GpuCacheTierConfig.quota", self.quota)

    @property
    def tier(self) -> CacheTier:
        return CacheTier.GPU_MEM


@dataclass(frozen=True, slots=True)
class HostCacheTierConfig:
    """A cold tier in host memory. `quota`: bytes."""

    quota: int

    def __post_init__(self) -> None:
        _require_positive("HostCacheTierConfig.quota", self.quota)

    @property
    def tier(self) -> CacheTier:
        return CacheTier.HOST_MEM


@dataclass(frozen=True, slots=True)
class DiskCacheTierConfig:
    """A cold tier in files. `quota`: bytes; `path`: an existing directory, used only for unnamed files."""

    quota: int
    path: str

    def __post_init__(self) -> None:
        _require_positive("DiskCacheTierConfig.quota", self.quota)
        _require(bool(self.path), "DiskCacheTierConfig.path is empty; name an existing directory")

    @property
    def tier(self) -> CacheTier:
        return CacheTier.DISK


CacheTierConfig = GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig


@dataclass(frozen=True, slots=True)
class BufferConfig:
    """One buffer of a layer. `size`: bytes per block (attention) or per sequence (SSM).

    `tokens_per_block_override`: the kernel sees pages of this many tokens instead of `tokens_per_block`,
    which it must divide; a block then is tokens_per_block / override consecutive pages. Attention only.
    """

    role: str
    size: int
    tokens_per_block_override: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.role), "BufferConfig.role is empty; name the buffer, such as 'key'")
        _require_positive(f"BufferConfig.size of {self.role!r}", self.size)
        if self.tokens_per_block_override is not None:
            _require_positive(f"tokens_per_block_override of {self.role!r}", self.tokens_per_block_override)


def _checked_buffers(layer_id: LayerId, buffers: Sequence[BufferConfig]) -> tuple[BufferConfig, ...]:
    _require(len(buffers) > 0, f"layer {layer_id} has no buffers; give at least one BufferConfig")
    roles = [buffer.role for buffer in buffers]
    _require(
        len(set(roles)) == len(roles), f"layer {layer_id} repeats a role in {roles}; roles must be unique"
    )
    return tuple(buffers)


@dataclass(frozen=True, slots=True)
class AttentionLayerConfig:
    """An attention layer. `sliding_window_size`: tokens a query sees, itself included; None = all.

    `num_sink_tokens`: tokens at the start that a windowed layer keeps for ever.
    """

    layer_id: LayerId
    buffers: Sequence[BufferConfig]
    sliding_window_size: int | None = None
    num_sink_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", _checked_buffers(self.layer_id, self.buffers))
        window, sink = self.sliding_window_size, self.num_sink_tokens
        if window is not None:
            _require_positive(f"sliding_window_size of layer {self.layer_id}", window)
        if sink is not None:
            _require(sink >= 0, f"num_sink_tokens of layer {self.layer_id} is {sink}; give 0 or more")
            _require(
                window is not None or sink == 0,
                f"layer {self.layer_id} has {sink} sink tokens but no window; set sliding_window_size",
            )


@dataclass(frozen=True, slots=True)
class SsmLayerConfig:
    """A recurrent layer: its buffers hold the whole state of one sequence, whatever its length."""

    layer_id: LayerId
    buffers: Sequence[BufferConfig]

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", _checked_buffers(self.layer_id, self.buffers))
        for buffer in self.buffers:
            _require(
                buffer.tokens_per_block_override is None,
                f"layer {self.layer_id} buffer {buffer.role!r} sets tokens_per_block_override; leave it out, "
                "recurrent states have no tokens per block",
            )


LayerConfig = AttentionLayerConfig | SsmLayerConfig


@dataclass(frozen=True, slots=True)
class KVCacheDesc:
    """A request's demand: room for `capacity` tokens, `history_length` of them computed before this step.

    Zero capacity reserves one SSM slot and no attention page.
    """

    capacity: int
    history_length: int

    def __post_init__(self) -> None:
        _require(
            isinstance(self.capacity, int)
            and isinstance(self.history_length, int)
            and 0 <= self.history_length <= self.capacity <= MAX_CAPACITY_TOKENS,
            f"KVCacheDesc(capacity={self.capacity}, history_length={self.history_length}) breaks "
            f"0 <= history_length <= capacity <= {MAX_CAPACITY_TOKENS} in whole tokens",
        )


@dataclass(frozen=True, slots=True)
class BatchDesc:
    """Requests that are resident together; their first `system_prompt_length` tokens are common."""

    kv_caches: Sequence[KVCacheDesc]
    system_prompt_length: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_caches", tuple(self.kv_caches))
        length = self.system_prompt_length
        _require(length >= 0, f"system_prompt_length is {length}; give 0 or more")


@dataclass(frozen=True, slots=True)
class SwaScratchReuseConfig:
    """Blocks that a step makes stale before it ends share slots between the layers of a windowed group.

    A step is the tokens from history to capacity. `max_rewind_len`: tokens at its end that may be taken
    back after it, such as rejected drafts. Needs page indices per layer (`PageIndexMode.PER_LAYER`).
    """

    max_rewind_len: int = 0

    def __post_init__(self) -> None:
        length = self.max_rewind_len
        _require(
            isinstance(length, int) and length >= 0,
            f"max_rewind_len is {length!r}; give 0 or more whole tokens",
        )


@dataclass(frozen=True, slots=True)
class KVCacheManagerConfig:
    """Everything `KVCacheManager` needs.

    tokens_per_block: tokens of one attention block.
    cache_tiers: level 0 must be the GPU tier; the others follow from near to far.
    max_util_for_resume: a cache resumes only while this share of a growing pool group, or less, is in use
        by others; also divides the slots of `constraints`. Rounded to float32 in the manager's
        `init_config`.
    enable_partial_reuse: reuse also the matching first tokens of a block that matches in part.
    reuse_match_backoff: tokens given up at the end of every match.
    constraints: batches that must always fit. typical_step: the batch that sets the initial ratio.
    initial_pool_ratio: one positive weight per layer group (or pool group), summing to 1.
    commit_min_snapshot: one commit keeps only what reuse at the new committed length needs. Must be True
        with SSM.
    swa_scratch_reuse: let blocks of long steps share slots in windowed groups; None gives each its own.
    text_only: all token ids are text, below 2**20, and take 20 bits each in the reuse tree; False takes 32
        bits for any id below 2**32.
    rebalance_*: when `need_adjustment` turns True and how fast the averages behind it follow.
    """

    tokens_per_block: int
    cache_tiers: Sequence[CacheTierConfig]
    layers: Sequence[LayerConfig]
    max_util_for_resume: float = 0.97
    enable_partial_reuse: bool = True
    reuse_match_backoff: int = 0
    constraints: Sequence[BatchDesc] = ()
    typical_step: BatchDesc | None = None
    initial_pool_ratio: Sequence[float] | None = None
    swa_scratch_reuse: SwaScratchReuseConfig | None = None
    commit_min_snapshot: bool = False
    enable_stats: bool = True
    text_only: bool = False
    rebalance_min_sampled_kv_caches: int = 2000
    rebalance_cooldown_secs: float = 120
    rebalance_target_ratio_update_interval: int = 100
    rebalance_ratio_threshold: float = 1.25
    rebalance_moving_average_decay: float = 0.9999

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_tiers", tuple(self.cache_tiers))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "constraints", tuple(self.constraints))
        _require_positive("tokens_per_block", self.tokens_per_block)
        _check_tiers(self.cache_tiers)
        _check_layers(self.layers, self.tokens_per_block)
        util = self.max_util_for_resume
        _require(
            0 < float32(util) <= 1, f"max_util_for_resume is {util}; give a share in (0, 1], such as 0.97"
        )
        _require(
            self.reuse_match_backoff >= 0,
            f"reuse_match_backoff is {self.reuse_match_backoff}; give 0 or more",
        )
        has_ssm = any(isinstance(layer, SsmLayerConfig) for layer in self.layers)
        _require(
            self.commit_min_snapshot or not has_ssm,
            "SSM layers need commit_min_snapshot=True: a recurrent state exists at one token count only",
        )
        if self.initial_pool_ratio is not None:
            object.__setattr__(self, "initial_pool_ratio", tuple(self.initial_pool_ratio))
            _check_ratio(self.initial_pool_ratio)
        _check_rebalance(self)


def _check_tiers(tiers: Sequence[CacheTierConfig]) -> None:
    _require(len(tiers) > 0, "cache_tiers is empty; start it with a GpuCacheTierConfig")
    kinds = [tier.tier for tier in tiers]
    _require(
        kinds[0] is CacheTier.GPU_MEM,
        f"cache_tiers starts with {kinds[0].name}; the first tier must be GPU_MEM",
    )
    _require(
        kinds.count(CacheTier.GPU_MEM) == 1, "cache_tiers names GPU_MEM twice; only the first tier can be it"
    )
    _require(kinds == sorted(kinds), f"cache_tiers {[kind.name for kind in kinds]} must go from near to far")


def _check_layers(layers: Sequence[LayerConfig], tokens_per_block: int) -> None:
    _require(len(layers) > 0, "layers is empty; give at least one layer")
    ids = [layer.layer_id for layer in layers]
    _require(len(set(ids)) == len(ids), f"layer ids {ids} repeat; they must be unique")
    for layer in layers:
        for buffer in layer.buffers:
            override = buffer.tokens_per_block_override
            if override is None:
                continue
            expansion, rest = divmod(tokens_per_block, override)
            _require(
                rest == 0 and buffer.size % expansion == 0,
                f"layer {layer.layer_id} buffer {buffer.role!r}: tokens_per_block_override {override} must "
                f"divide tokens_per_block {tokens_per_block}, and its {buffer.size} bytes must split evenly",
            )


def _check_ratio(ratio: Sequence[float]) -> None:
    _require(
        all(math.isfinite(weight) and weight > 0 for weight in ratio) and abs(sum(ratio) - 1) <= 1e-6,
        f"initial_pool_ratio {list(ratio)} must be positive weights that sum to 1 within 1e-6",
    )


def _check_rebalance(config: KVCacheManagerConfig) -> None:
    _require_positive("rebalance_min_sampled_kv_caches", config.rebalance_min_sampled_kv_caches)
    _require_positive("rebalance_target_ratio_update_interval", config.rebalance_target_ratio_update_interval)
    cooldown = config.rebalance_cooldown_secs
    _require(cooldown >= 0, f"rebalance_cooldown_secs is {cooldown}; give 0 or more seconds")
    threshold = config.rebalance_ratio_threshold
    _require(threshold >= 1, f"rebalance_ratio_threshold is {threshold}; give a factor of 1 or more")
    decay = config.rebalance_moving_average_decay
    _require(0 <= decay < 1, f"rebalance_moving_average_decay is {decay}; give a factor in [0, 1)")
