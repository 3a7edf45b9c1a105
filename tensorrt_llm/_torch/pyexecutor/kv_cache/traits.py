# SPDX-License-Identifier: Apache-2.0
"""What the cache knows of a model: declared traits, never its name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import LocalLayers, local_layers
from tensorrt_llm.mapping import Mapping


class KdaTraits(Protocol):
    """The KDA layers' sizes before any split over ranks; head_dim is K = V."""

    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def conv_width(self) -> int: ...


class ModelTraits(Protocol):
    """A model's layers by kind (0-based global indices) and what one token or sequence costs in them.

    `latent_dim` values per token are cached in an attention layer; `kda` is None without KDA layers.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def attention_layers(self) -> Sequence[int]: ...
    @property
    def kda_layers(self) -> Sequence[int]: ...
    @property
    def kda(self) -> KdaTraits | None: ...
    @property
    def latent_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


class CachedModel(Protocol):
    """A causal model; `model` is its backbone, which may be anybody's."""

    @property
    def model(self) -> object: ...
    @property
    def traits(self) -> ModelTraits: ...


class EngineWithModel(Protocol):
    """What `_create_kv_cache_manager` reads of a model engine."""

    @property
    def model(self) -> CachedModel: ...


@dataclass(frozen=True, slots=True)
class EngineStandIn:
    """An engine's place while the cache is built before the engine."""

    model: CachedModel


def layer_mask(layers: Sequence[int], num_layers: int) -> list[bool]:
    """One flag per global layer: whether it is among `layers`."""
    named = set(layers)
    return [layer in named for layer in range(num_layers)]


def latent_layers(
    traits: ModelTraits,
    mapping: Mapping,
    dtype: torch.dtype,
    max_attention_window: Sequence[int] | None,
    max_seq_len: int,
) -> LocalLayers:
    """The rank's layers of a model whose attention caches one latent vector a token and layer."""
    return local_layers(
        num_layers=len(traits.attention_layers),
        num_kv_heads=1,
        head_dim=traits.latent_dim,
        dtype=dtype,
        mapping=mapping,
        layer_mask=layer_mask(traits.attention_layers, traits.num_layers),
        recurrent_mask=layer_mask(traits.kda_layers, traits.num_layers),
        num_recurrent_layers=len(traits.kda_layers),
        max_attention_window=max_attention_window,
        max_seq_len=max_seq_len,
    )
