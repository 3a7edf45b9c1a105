# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model's weights on one rank, counted on the model's own modules in that rank's sizes.

Split over the tensor ranks: attention and KDA heads with everything per head, the width of dense and shared
feed-forwards, the vocabulary. Split over the expert ranks: routed experts, and inside them over the rest of
the tensor ranks. On every rank in full: norms, residual sites, the router, low-rank and latent projections
that no head owns. Pipeline stages hold their own layers; the first also the embedding, the last the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from torch import Tensor

from tensorrt_llm._torch.models.config import KimiTextConfig
from tensorrt_llm._torch.modules.moe import LatentMoE
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.planning.models import GroupQuantization, PlannedModel, skeleton
from tensorrt_llm.runtime.kv_cache_manager_v2._math import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Bytes of one rank's weights: all, those of routed experts, and those that every tensor rank holds."""

    total_bytes: int
    routed_expert_bytes: int
    replicated_bytes: int


def count_weights(model: PlannedModel, mapping: Mapping) -> RankWeights:
    """The weights of `mapping`'s rank. ValueError where something that has to be split does not divide."""
    return _count(model.config, model.quantization, mapping)


@cache
def _count(config: KimiTextConfig, quantization: GroupQuantization | None, mapping: Mapping) -> RankWeights:
    routed, other = _bytes_on(config, quantization, mapping)
    whole = sum(_bytes_on(config, quantization, _without_split(mapping)))
    tp_size, total = mapping.tp_size, routed + other
    # Of s split and r replicated bytes a rank holds s / tp + r, and one rank alone would hold s + r.
    replicated = (tp_size * total - whole) // (tp_size - 1) if tp_size > 1 else 0
    return RankWeights(total_bytes=total, routed_expert_bytes=routed, replicated_bytes=replicated)


def _without_split(mapping: Mapping) -> Mapping:
    return Mapping(world_size=mapping.pp_size, rank=mapping.pp_rank, pp_size=mapping.pp_size)


def _bytes_on(
    config: KimiTextConfig, quantization: GroupQuantization | None, mapping: Mapping
) -> tuple[int, int]:
    """Bytes of routed experts, and all others."""
    tensors = _tensors_of(_of_rank(config, mapping), quantization, mapping.moe_ep_size)
    layers = mapping.pp_layers(config.num_layers)
    here = [tensor for tensor in tensors if _is_on(tensor.name, layers, mapping)]
    routed = sum(tensor.nbytes for tensor in here if tensor.is_routed)
    return routed, sum(tensor.nbytes for tensor in here) - routed


class _Tensor(NamedTuple):
    """A parameter or saved buffer of a rank; `is_routed`: it is of routed experts."""

    name: str
    nbytes: int
    is_routed: bool


@cache
def _tensors_of(
    config: KimiTextConfig, quantization: GroupQuantization | None, ep_size: int
) -> tuple[_Tensor, ...]:
    """The tensors of a configuration in a rank's sizes."""
    model = skeleton(config)
    moes = [name for name, module in model.named_modules() if isinstance(module, LatentMoE)]
    experts = {f"{name}.{part}" for name in moes for part in ("gate_up", "down")}
    # The router scores all experts, the rank's skeleton has only its own.
    routers = {f"{name}.{part}" for name in moes for part in ("router", "selection_bias")}
    return tuple(
        _Tensor(name, _expert_bytes(tensor, quantization), True)
        if name in experts
        else _Tensor(name, tensor.nbytes * (ep_size if name in routers else 1), False)
        for name, tensor in model.state_dict().items()
    )


def _expert_bytes(tensor: Tensor, quantization: GroupQuantization | None) -> int:
    """Bytes of a [experts, rows, columns] tensor."""
    experts, rows, columns = tensor.shape
    return tensor.nbytes if quantization is None else experts * quantization.matrix_bytes(rows, columns)


def _is_on(name: str, layers: Sequence[int], mapping: Mapping) -> bool:
    """Whether a tensor belongs to the rank's pipeline stage, which has these layers."""
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) in layers
    return mapping.is_first_pp_rank() if name == "model.embed_tokens" else mapping.is_last_pp_rank()


def _of_rank(config: KimiTextConfig, mapping: Mapping) -> KimiTextConfig:
    """The configuration in a rank's sizes: what is split is divided, what is replicated stays."""
    tp, kda, mla, moe = mapping.tp_size, config.kda, config.mla, config.moe
    if kda is not None:
        kda = replace(kda, num_heads=_share("linear_attn_config.num_heads", kda.num_heads, "tp", tp))
    if mla is not None:
        mla = replace(mla, num_heads=_share("num_attention_heads", mla.num_heads, "tp", tp))
    if moe is not None:
        ep, inner = mapping.moe_ep_size, mapping.moe_tp_size
        moe = replace(
            moe,
            num_experts=_share("num_experts", moe.num_experts, "ep", ep),
            intermediate_size=_share("moe_intermediate_size", moe.intermediate_size, "tp / ep", inner),
            shared_intermediate_size=_share(
                "the shared experts' width", moe.shared_intermediate_size, "tp", tp
            ),
        )
    dense = _share("intermediate_size", config.dense_intermediate_size, "tp", tp)
    # An embedding may have rows that no token uses, so the vocabulary is padded and need not divide.
    vocab = cdiv(config.vocab_size, tp)
    return replace(config, kda=kda, mla=mla, moe=moe, dense_intermediate_size=dense, vocab_size=vocab)


def _share(name: str, value: int, axis: str, ranks: int) -> int:
    if value % ranks:
        raise ValueError(f"{name} is {value}, which {axis} {ranks} does not divide: choose another split")
    return value // ranks
