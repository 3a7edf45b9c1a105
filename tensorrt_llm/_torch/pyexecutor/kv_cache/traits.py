# SPDX-License-Identifier: Apache-2.0
"""What the cache knows of a model: declared traits, never its name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


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
