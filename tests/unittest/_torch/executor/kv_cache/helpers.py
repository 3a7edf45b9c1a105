# SPDX-License-Identifier: Apache-2.0
"""Small managers, stand-ins for requests and batches, and the sizes of Kimi K3 at TP16."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import CacheType, KvCacheSettings, SpecSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm.mapping import Mapping

GIB = 1 << 30
MIB = 1 << 20

K3_LAYERS = 93
K3_ATTENTION = (*range(3, 92, 4), 92)
"""0-based: every fourth layer, and the last one."""


@dataclass(frozen=True, kw_only=True)
class Kda:
    num_heads: int = 2
    head_dim: int = 8
    conv_width: int = 4


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A model as the cache sees it."""

    num_layers: int = 4
    attention_layers: tuple[int, ...] = (3,)
    kda_layers: tuple[int, ...] = (0, 1, 2)
    kda: Kda | None = field(default_factory=Kda)
    latent_dim: int = 12
    vocab_size: int = 97
    dtype: torch.dtype = torch.float32


K3_TRAITS = Traits(
    num_layers=K3_LAYERS,
    attention_layers=K3_ATTENTION,
    kda_layers=tuple(i for i in range(K3_LAYERS) if i not in K3_ATTENTION),
    kda=Kda(num_heads=96, head_dim=128),
    latent_dim=576,
    vocab_size=163840,
    dtype=torch.bfloat16,
)


def k3_plan(
    *,
    batch: int = 8,
    num_spec: int | None = 7,
    tokens_per_block: int = 64,
    max_seq_len: int = 4096,
    records: bool = True,
    kda_conv_dtype: torch.dtype = torch.float32,
    **config: object,
) -> CachePlan:
    """Kimi K3 on one of 16 tensor ranks, without attention data parallelism."""
    return CachePlan(
        traits=K3_TRAITS,
        mapping=Mapping(world_size=16, rank=0, tp_size=16),
        kv_cache_config=settings(**config),
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        max_batch_size=batch,
        spec_config=None if num_spec is None else SpecSettings(max_draft_len=num_spec),
        kda_token_states=records,
        kda_conv_dtype=kda_conv_dtype,
    )


def settings(**changes: object) -> KvCacheSettings:
    """No reuse, no host tier, 16 MiB, unless changed."""
    return replace(
        KvCacheSettings(enable_block_reuse=False, host_cache_size=0, max_gpu_total_bytes=16 * MIB), **changes
    )


@dataclass(eq=False)
class Request:
    """What the managers read of a request, and what a loop would write into it."""

    py_request_id: int
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    prompt_len: int = 0
    context_current_position: int = 0
    context_chunk_size: int = 0
    py_draft_tokens: list[int] = field(default_factory=list)
    py_num_accepted_draft_tokens: int = 0
    py_rewind_len: int = 0
    is_dummy: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    def get_tokens(self, beam: int = 0) -> list[int]:
        return self.tokens

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == 0

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size >= self.prompt_len


@dataclass
class Batch:
    context_requests: Sequence[Request] = ()
    generation_requests: Sequence[Request] = ()


@dataclass
class Metadata:
    """What acceptance reads of a step."""

    num_contexts: int
    request_ids: Sequence[int]


def make_manager(
    *,
    num_heads: int = 2,
    head_dim: int = 8,
    conv_width: int = 4,
    num_state_layers: int = 3,
    num_attention_layers: int = 1,
    num_spec: int | None = 2,
    with_spec_config: bool = True,
    batch: int = 2,
    tokens_per_block: int = 4,
    max_seq_len: int = 64,
    latent_dim: int = 12,
    mapping: Mapping | None = None,
    config: KvCacheSettings | None = None,
    device: str = "cpu",
    decoding_type: str = "NGram",
    conv_dtype: torch.dtype = torch.float32,
    ssm_dtype: torch.dtype = torch.float32,
    kv_cache_type: CacheType = CacheType.SELFKONLY,
    cls: type[MambaHybridCacheManagerV2] = MambaHybridCacheManagerV2,
    mamba_num_layers: int | None = None,
    mamba_layer_mask: Sequence[bool] | None = None,
    **keywords: object,
) -> MambaHybridCacheManagerV2:
    """A manager of recurrent layers followed by attention layers, fp32 throughout."""
    recurrent = [True] * num_state_layers + [False] * num_attention_layers
    spec = (
        SpecSettings(max_draft_len=num_spec or 2, decoding_type=decoding_type) if with_spec_config else None
    )
    return cls(
        head_dim,
        conv_width,
        num_heads,
        num_heads,
        head_dim,
        mamba_num_layers or num_state_layers,
        mamba_layer_mask or recurrent,
        conv_dtype,
        ssm_dtype,
        config or settings(),
        kv_cache_type,
        **{
            "num_layers": num_attention_layers,
            "num_kv_heads": 1,
            "head_dim": latent_dim,
            "tokens_per_block": tokens_per_block,
            "max_seq_len": max_seq_len,
            "max_batch_size": batch,
            "mapping": mapping or Mapping(),
            "dtype": torch.float32,
            "spec_config": spec,
            "layer_mask": [not r for r in recurrent],
            "conv_state_layout": "q_k_v",
            "kda_replay_num_spec": num_spec,
            "max_num_tokens": 64,
            "device": device,
            **keywords,
        },
    )


def admit(manager: MambaHybridCacheManagerV2, *requests: Request) -> None:
    """Run the whole prompt of each request, as far as the cache is concerned."""
    for req in requests:
        req.context_chunk_size = req.prompt_len
        assert manager.prepare_context(req) and manager.resize_context(req, req.prompt_len)
    batch = Batch(context_requests=requests)
    manager.prepare_resources(batch)
    manager.update_context_resources(batch)
    for req in requests:
        req.context_current_position, req.context_chunk_size = req.prompt_len, 0


def launch(manager: MambaHybridCacheManagerV2, *requests: Request, num_drafts: int = 2) -> Batch:
    """Allocate and prepare one verify round of these requests."""
    for req in requests:
        req.py_draft_tokens = [7] * num_drafts
        assert manager.try_allocate_generation(req)
    batch = Batch(generation_requests=requests)
    manager.prepare_resources(batch)
    return batch


def accept(manager: MambaHybridCacheManagerV2, batch: Batch, *counts: int) -> None:
    """Accept so many drafts of each generation request, on the host."""
    for req, count in zip(batch.generation_requests, counts, strict=True):
        req.py_num_accepted_draft_tokens = count
        req.tokens = [*req.tokens, *req.py_draft_tokens[:count], 9]
    manager.update_resources(batch)


def slot_of(manager: MambaHybridCacheManagerV2, req: Request) -> int:
    return manager.get_state_indices([req.py_request_id])[0]


def side_tensors(manager: MambaHybridCacheManagerV2) -> dict[str, torch.Tensor]:
    """Every side buffer of the manager by name, with [L, N, ...] axes; the counts are [1, N]."""
    names = ("kda_conv_q", "kda_conv_k", "kda_conv_v", "kda_qkg_cache", "kda_v_cache", "kda_beta_cache")
    names += ("kda_state_tok", "intermediate_ssm_states")
    found = {name: getattr(manager, name) for name in names}
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    if manager.prev_num_accepted_tokens is not None:
        tensors["counts"] = manager.prev_num_accepted_tokens.unsqueeze(0)
    return tensors


def randomize(manager: MambaHybridCacheManagerV2, *, counts: bool = False) -> None:
    """Fill the pools' states and every side buffer but the counts with random numbers."""
    for layer in manager.mamba_layer_offsets:
        for view in (manager.get_ssm_states(layer), manager.get_conv_states(layer)):
            view.copy_(torch.randn(view.shape))
    for name, tensor in side_tensors(manager).items():
        if name != "counts":
            tensor.copy_(torch.randn(tensor.shape))
