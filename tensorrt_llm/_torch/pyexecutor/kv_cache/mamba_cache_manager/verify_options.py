# SPDX-License-Identifier: Apache-2.0
"""From a manager's keywords to the verify scheme in force, with every refusal that needs no sizes. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

import torch

from tensorrt_llm._torch.modules.kda.verify_scheme import (
    RECORDS,
    REPLAY,
    KdaGeometry,
    VerifyScheme,
    get_scheme,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.config import SpecConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import MambaStateSpec

P = ParamSpec("P")
S = TypeVar("S")

COUNT_DTYPE = torch.int32
"""Of the drafts pending in a slot, one number for all layers."""

CONV_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Element types of the extended windows by name."""


def explain_keyword(
    name: str, hint: str
) -> Callable[[Callable[Concatenate[S, P], None]], Callable[Concatenate[S, P], None]]:
    """Decorate a constructor: the unknown keyword `name` is a TypeError with a hint at what replaced it."""

    def decorate(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
        def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if name in kwargs:
                raise TypeError(f"{init.__qualname__} got an unexpected keyword argument {name!r}: {hint}")
            init(self, *args, **kwargs)

        update_wrapper(checked, init)
        return checked

    return decorate


def check_replay_arguments(
    spec: MambaStateSpec,
    kda_replay_num_spec: int | None,
    use_replay_state_update: bool,
    spec_config: SpecConfigLike | None,
    conv_state_layout: str,
) -> None:
    """Raise ValueError for replay arguments that contradict each other or the state's shape."""
    if kda_replay_num_spec is None:
        if use_replay_state_update:
            raise ValueError(
                "use_replay_state_update is the replay of other models; leave it out: KDA uses "
                "kda_replay_num_spec"
            )
        return
    if use_replay_state_update:
        raise ValueError(
            "use_replay_state_update and kda_replay_num_spec are mutually exclusive: drop "
            "use_replay_state_update"
        )
    if spec_config is None:
        raise ValueError(
            f"kda_replay_num_spec is {kda_replay_num_spec}, but verify rounds require speculative "
            "decoding: give a spec_config"
        )
    drafts = spec_config.tokens_per_gen_step - 1
    if kda_replay_num_spec != drafts:
        raise ValueError(
            f"kda_replay_num_spec is {kda_replay_num_spec}, but must match the draft length of "
            f"spec_config, {drafts}"
        )
    if drafts < 1:
        raise ValueError(
            f"kda_replay_num_spec is {kda_replay_num_spec}; a verify round has at least one draft"
        )
    if conv_state_layout != "q_k_v":
        raise ValueError(
            f"conv_state_layout is {conv_state_layout!r}; KDA verify rounds need conv_state_layout='q_k_v'"
        )
    if spec.ssm_dtype is not torch.float32:
        raise ValueError(
            f"mamba_ssm_cache_dtype is {spec.ssm_dtype}; KDA verify rounds keep states in torch.float32"
        )
    if not spec.has_equal_sections or spec.head_dim != spec.d_state:
        raise ValueError(
            f"mamba_head_dim {spec.head_dim} and mamba_d_state {spec.d_state} give sections "
            f"{spec.conv_section_dims}; KDA verify rounds need three equal ones: head_dim = d_state and "
            "n_groups = num_heads"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """The verify scheme in force and the sizes that its buffers follow from."""

    scheme: VerifyScheme
    geometry: KdaGeometry

    @property
    def quota_bytes_per_slot_layer(self) -> int:
        """Bytes beside the pools that the quota pays for: 3 M H K fp32 values with records, else 0.

        What it does not pay for counts in the measured peak.
        """
        buffers = self.scheme.slot_buffers(self.geometry)
        return sum(buffer.bytes_per_slot_layer for buffer in buffers if buffer.paid_by_quota)

    @property
    def bytes_per_slot_layer(self) -> int:
        """All bytes beside the pools."""
        return sum(buffer.bytes_per_slot_layer for buffer in self.scheme.slot_buffers(self.geometry))


def conv_dtype_of(name: object) -> torch.dtype:
    """The element type of the extended windows by its name. ValueError for another name."""
    if not isinstance(name, str) or name not in CONV_DTYPES:
        raise ValueError(f"kda_conv_dtype is {name!r}; it must be {' or '.join(map(repr, CONV_DTYPES))}")
    return CONV_DTYPES[name]


def check_conv_dtype(spec: MambaStateSpec, kda_conv_dtype: torch.dtype) -> None:
    """Raise ValueError for an element type of the extended windows that is unknown or would round."""
    if kda_conv_dtype not in CONV_DTYPES.values():
        choices = " or ".join(map(str, CONV_DTYPES.values()))
        raise ValueError(f"kda_conv_dtype is {kda_conv_dtype!r}; it must be {choices}")
    if kda_conv_dtype is not torch.float32 and spec.conv_dtype is not kda_conv_dtype:
        raise ValueError(
            f"kda_conv_dtype is {kda_conv_dtype}, but the model's projections, and so mamba_cache_dtype, are "
            f"{spec.conv_dtype}, which it would round: set kda_conv_dtype=torch.float32"
        )


def plan_verify(
    spec: MambaStateSpec,
    kda_replay_num_spec: int | None,
    kda_token_states: bool,
    kda_verify_scheme: str | None,
    is_draft: bool,
    kda_conv_dtype: torch.dtype = torch.float32,
) -> VerifyPlan | None:
    """What undoes rejected drafts. None without verify rounds, where the options are inert.

    A draft manager keeps no records. Raises ValueError for an unknown name, for records asked for and
    another scheme named, and for extended windows that would not hold the projections exactly.
    """
    named = None if kda_verify_scheme is None else get_scheme(kda_verify_scheme)
    if kda_token_states and named not in (None, RECORDS):
        raise ValueError(
            f"kda_token_states=True contradicts kda_verify_scheme={kda_verify_scheme!r}: drop one of them"
        )
    if kda_replay_num_spec is None:
        return None
    check_conv_dtype(spec, kda_conv_dtype)
    scheme = named or (RECORDS if kda_token_states else REPLAY)
    geometry = KdaGeometry(
        num_heads=spec.num_heads,
        head_dim=spec.d_state,
        conv_width=spec.conv_columns + 1,
        num_spec=kda_replay_num_spec,
        conv_dtype=kda_conv_dtype,
    )
    return VerifyPlan(scheme=REPLAY if is_draft and scheme is RECORDS else scheme, geometry=geometry)
