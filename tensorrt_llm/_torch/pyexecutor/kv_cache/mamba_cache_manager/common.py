# SPDX-License-Identifier: Apache-2.0
"""What every manager of recurrent states offers, and the arithmetic they share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor

from tensorrt_llm._torch.pyexecutor.kv_cache.config import SpecConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.views import State
from tensorrt_llm.mapping import Mapping

HOST_DRAFTERS = frozenset({"NGram", "User_Provided"})
"""Decoding types whose drafts are made and accepted on the host: acceptance is read from the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStateUpdateMetadata:
    """Bookkeeping of the Mamba2 replay, a mechanism of other models than those of this package."""

    prev_num_accepted_tokens: Tensor
    cache_buf_idx: Tensor
    replay_step_width: int
    replay_history_size: int


class AcceptanceMetadata(Protocol):
    """What acceptance reads of a step's attention metadata: its requests in row order, the first of them
    context.
    """

    @property
    def num_contexts(self) -> int: ...
    @property
    def request_ids(self) -> Sequence[int] | None: ...


class BaseMambaCacheManager(ABC):
    """Slots of recurrent state for the requests of a step."""

    @overload
    def get_state_indices(self, request_ids: None = None, is_padding: None = None) -> Tensor: ...
    @overload
    def get_state_indices(
        self, request_ids: Sequence[int], is_padding: Sequence[bool] | None = None
    ) -> list[int]: ...
    @abstractmethod
    def get_state_indices(
        self, request_ids: Sequence[int] | None = None, is_padding: Sequence[bool] | None = None
    ) -> Tensor | list[int]:
        """The slots of these requests in their order, or the device buffer of the step's slots."""

    @abstractmethod
    def get_conv_states(self, layer_idx: int) -> Tensor:
        """[N, channels, W-1] of a global layer."""

    @abstractmethod
    def get_ssm_states(self, layer_idx: int) -> Tensor:
        """[N, H, V, K] of a global layer."""

    @abstractmethod
    def get_mamba_ssm_cache_dtype(self) -> torch.dtype:
        """Element type of the SSM state."""

    @abstractmethod
    def is_speculative(self) -> bool:
        """Whether a step can run more than one token per request."""

    @abstractmethod
    def mamba_layer_cache(self, layer_idx: int) -> State:
        """The view of a global layer's slots."""

    def get_replay_state_update_metadata(self) -> ReplayStateUpdateMetadata | None:
        """None: no model of this package uses the Mamba2 replay."""
        return None

    @property
    def use_kda_replay_update(self) -> bool:
        """Whether verify rounds run on these slots."""
        return False

    @property
    def keeps_kda_token_states(self) -> bool:
        """Whether the drafts' records are kept."""
        return False


def reachable_draft_lengths(spec_config: SpecConfigLike | None, max_batch_size: int) -> set[int]:
    """Draft lengths a step of at most `max_batch_size` requests can run with; empty without speculation.

    A schedule {batch: length} gives the length of its first key that is not below the batch, and none beyond
    its last key. An acceptance gate can turn drafting off, which is length 0.
    """
    if spec_config is None:
        return set()
    schedule = spec_config.draft_len_schedule
    if schedule:
        keys = sorted(schedule)
        lengths = {schedule[key] for i, key in enumerate(keys) if i == 0 or keys[i - 1] < max_batch_size}
        if keys[-1] < max_batch_size:
            lengths.add(0)
    else:
        lengths = {spec_config.tokens_per_gen_step - 1}
    if (spec_config.acceptance_rate_window_size or 0) > 0 and (
        spec_config.acceptance_rate_threshold or 0
    ) > 0:
        lengths.add(0)
    return lengths


def num_padding_dummies(spec_config: SpecConfigLike | None, max_batch_size: int) -> int:
    """Dummy requests that pad captured graphs: one per draft length a graph is captured for."""
    return max(1, len(reachable_draft_lengths(spec_config, max_batch_size)))


def num_reserved_dummy_slots(
    spec_config: SpecConfigLike | None, max_batch_size: int, mapping: Mapping
) -> int:
    """Slots that never belong to a user's request: graph padding, and the filler of attention data
    parallelism.
    """
    return num_padding_dummies(spec_config, max_batch_size) + mapping.enable_attention_dp
