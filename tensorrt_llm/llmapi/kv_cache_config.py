# SPDX-License-Identifier: Apache-2.0
"""What a user says about the cache: `KvCacheConfig` and its parts."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from tensorrt_llm._torch.pyexecutor.kv_cache.config import (
    BlockReuseSettings,
    KvCacheSettings,
    MambaStateSettings,
    ReusePolicy,
)
from tensorrt_llm.llmapi.strict_model import StrictBaseModel

RATIO_SUM_TOLERANCE = 1e-6
_NOT_OFFERED = """
    attention_dp_events_gather_period_ms copy_on_partial_reuse disk_prefetch_num_reqs dtype
    event_buffer_max_size iteration_stats_interval kv_cache_event_hash_algo kv_events_config
    mamba_ssm_cache_dtype mamba_ssm_philox_rounds mamba_ssm_stochastic_rounding
    mamba_state_cache_interval secondary_offload_min_priority sink_token_length tokens_per_block use_uvm
"""


class MambaStateConfig(StrictBaseModel):
    """When snapshots of the recurrent state are kept for reuse, in tokens; an interval of 0 is never."""

    periodic_snapshot_interval: NonNegativeInt = 0
    additional_snapshot_offsets_from_start: tuple[NonNegativeInt, ...] = ()
    additional_snapshot_offsets_from_end: tuple[NonNegativeInt, ...] = ()
    enable_branch_snapshot: bool = False


class BlockReuseConfig(StrictBaseModel):
    """Which snapshots of a finished request stay reusable; "per_conversation" has no periodic ones."""

    policy: ReusePolicy = "all_reusable"
    max_num_turns: PositiveInt = 1


class KvCacheConfig(StrictBaseModel):
    """Memory and behaviour of attention pages and recurrent states; names and defaults as in TensorRT-LLM.

    `LLM` refuses what its loop makes no use of; the cache managers take all of it.

    enable_block_reuse: keep caches for requests with a common start. Kimi models have it off unless it is set
        here; draft records need it off. A prompt is reused up to its last snapshot, so mamba_state_config
        must ask for some, by an interval of whole pages or by offsets; what answers leave is not reused.
    max_tokens: attention tokens to hold. free_gpu_memory_fraction: share of the free memory to use (of the
        host's memory where the model runs on a CPU). max_gpu_total_bytes: an upper bound, 0 for none. The
        smallest of the three counts.
    host_cache_size, disk_cache_size (bytes), disk_cache_path (an existing folder): tiers below the GPU's.
    max_util_for_resume: share of the pools that a suspended request may find used when it resumes; it also
        sets how many state slots are kept above the live floor.
    pool_ratio: share of memory of each pool group, instead of one derived from avg_seq_len (tokens).
    """

    not_offered: ClassVar[frozenset[str]] = frozenset(_NOT_OFFERED.split())

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    block_reuse_config: BlockReuseConfig = BlockReuseConfig()
    mamba_state_config: MambaStateConfig = MambaStateConfig()
    max_tokens: PositiveInt | None = None
    max_attention_window: tuple[PositiveInt, ...] | None = None
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = 0.9
    max_gpu_total_bytes: NonNegativeInt = 0
    host_cache_size: NonNegativeInt | None = None
    disk_cache_size: NonNegativeInt | None = None
    disk_cache_path: str | None = None
    max_util_for_resume: Annotated[float, Field(gt=0, le=1)] = 0.95
    enable_kv_pool_rebalance: bool = False
    pool_ratio: tuple[PositiveFloat, ...] | None = None
    avg_seq_len: PositiveInt | None = None
    use_kv_cache_manager_v2: Literal["auto", True, False] = "auto"

    @field_validator("pool_ratio")
    @classmethod
    def _check_pool_ratio(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and abs(sum(value) - 1) > RATIO_SUM_TOLERANCE:
            raise ValueError(f"its shares sum to {sum(value)} and must sum to 1")
        return value

    @model_validator(mode="after")
    def _check_disk_tier(self) -> "KvCacheConfig":
        if self.disk_cache_size and self.disk_cache_path is None:
            raise ValueError("disk_cache_size needs disk_cache_path, an existing folder")
        if self.disk_cache_path is not None and not Path(self.disk_cache_path).is_dir():
            raise ValueError(f"disk_cache_path={self.disk_cache_path!r} is not an existing folder")
        return self

    def to_settings(self) -> KvCacheSettings:
        """The plain value that the managers read."""
        plain = {name: getattr(self, name) for name in type(self).model_fields}
        plain["mamba_state_config"] = MambaStateSettings(**dict(self.mamba_state_config))
        plain["block_reuse_config"] = BlockReuseSettings(**dict(self.block_reuse_config))
        return KvCacheSettings(**plain)
