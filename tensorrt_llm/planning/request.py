# SPDX-License-Identifier: Apache-2.0
"""What is asked of the planner: ranks, limits and memory, as one checked value."""

from dataclasses import dataclass, replace
from typing import Any

from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheSettings, SpecSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import conv_dtype_of
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.planning.models import PlannedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """A GPU's memory, the share of what a step leaves free that the cache may take, and a step's peak beside
    weights and cache (activations, communication, the CUDA context).
    """

    total_bytes: int
    free_fraction: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked for; sizes count ranks, lengths tokens. The quota comes from `gpu_quota_bytes` or `gpu`,
    and `max_tokens` may lower it. `drafts` 0 is generation without speculation. `kda_conv_dtype` is the
    extended windows' element type by name.

    Raises ValueError, naming the option, for a number that is out of range.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    drafts: int = 7
    max_batch_size: int = 8
    max_seq_len: int = 8192
    tokens_per_block: int = 64
    max_util: float = 0.95
    kda_conv_dtype: str = "float32"
    block_reuse: bool = False
    gpu_quota_bytes: int | None = None
    gpu: GpuMemory | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{option(name)} is {value}; it must be at least {least}")
        _check_fraction("max_util", self.max_util)
        if self.gpu is not None:
            _check_fraction("free_fraction", self.gpu.free_fraction)
        if (self.gpu_quota_bytes is None) == (self.gpu is None):
            raise ValueError(
                "give either the cache's quota, such as --gpu-quota 15.35GiB, or the GPU's memory, such as "
                "--gpu-memory 141GB"
            )

    def cache_plan(self, model: PlannedModel, scheme: str, stage: int) -> CachePlan:
        """The cache of the first tensor rank of a pipeline stage."""
        return CachePlan(
            traits=model.traits,
            mapping=self.mapping(stage),
            kv_cache_config=KvCacheSettings(
                enable_block_reuse=self.block_reuse,
                max_tokens=self.max_tokens,
                free_gpu_memory_fraction=None if self.gpu is None else self.gpu.free_fraction,
                max_gpu_total_bytes=self.gpu_quota_bytes or 0,
                max_util_for_resume=self.max_util,
            ),
            tokens_per_block=self.tokens_per_block,
            max_seq_len=self.max_seq_len,
            max_batch_size=self.max_batch_size,
            spec_config=SpecSettings(max_draft_len=self.drafts) if self.drafts else None,
            kda_verify_scheme=scheme,
            kda_conv_dtype=conv_dtype_of(self.kda_conv_dtype),
        )

    def with_number(self, name: str, value: int) -> "PlanRequest":
        """The request with one of its whole numbers changed. ValueError where that is out of range."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    def mapping(self, stage: int) -> Mapping:
        """The first tensor rank of a pipeline stage."""
        return Mapping(
            world_size=self.tp * self.pp,
            rank=stage * self.tp,
            tp_size=self.tp,
            pp_size=self.pp,
            moe_ep_size=self.ep,
        )


_LEAST = {
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "drafts": 0,
    "max_batch_size": 1,
    "max_seq_len": 1,
    "tokens_per_block": 1,
    "gpu_quota_bytes": 1,
    "max_tokens": 1,
}


def option(name: str) -> str:
    """The command-line option of a request's field."""
    return "--" + name.removesuffix("_bytes").replace("_", "-")


def _check_fraction(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{option(name)} is {value}; it must be above 0 and at most 1")
