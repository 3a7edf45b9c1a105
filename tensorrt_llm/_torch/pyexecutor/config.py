# SPDX-License-Identifier: Apache-2.0
"""What an executor is built from, and the choices that are made once before anything is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy
from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheSettings
from tensorrt_llm._torch.speculative.interface import SpeculationSpec

VerifySchemeName = Literal["records", "replay", "intermediate"]
VerifySchemeChoice = Literal["auto", "records", "replay", "intermediate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Everything `create_py_executor` needs.

    `model` is a packaged model's name or a checkpoint folder; `device` "auto" is CUDA where there is a GPU.
    `max_batch_size` requests run at once; a step runs at most `max_num_tokens` tokens; a request has at
    most `max_seq_len` tokens with its output (None: the model's limit). `kv_cache_config` goes to the cache
    manager (None: its defaults); `enable_block_reuse` None means that the user left the choice to the
    model. `random_seed` None draws one; it seeds requests that bring no seed. `max_stats_len` iterations
    are kept for `get_stats`; `enable_iter_perf_stats` False keeps none.
    """

    model: str
    model_kwargs: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    max_batch_size: int = 8
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    enable_chunked_prefill: bool = False
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    kv_cache_config: KvCacheSettings = field(default_factory=KvCacheSettings)
    enable_block_reuse: bool | None = None
    speculation: SpeculationSpec | None = None
    random_seed: int | None = None
    enable_iter_perf_stats: bool = True
    max_stats_len: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySchemeRequest:
    """What decides the verify scheme: the two model_kwargs, the user's choices, and what the kernels can do.

    `enable_block_reuse` None: the user did not set it. `op_serves_shape`: an op writes records for the
    model's KDA heads on this device.
    """

    kda_verify_scheme: VerifySchemeChoice = "auto"
    kda_token_states: bool | None = None
    speculating: bool
    enable_block_reuse: bool | None
    op_serves_shape: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedVerifyScheme:
    """The scheme that runs, whether caches are reused between requests, and a line to log if a choice may
    surprise.
    """

    scheme: VerifySchemeName
    enable_block_reuse: bool
    notice: str | None = None

    @property
    def kda_token_states(self) -> bool:
        """Whether the drafts' records are kept."""
        return self.scheme == "records"


def read_verify_scheme_kwargs(
    model_kwargs: Mapping[str, object],
) -> tuple[VerifySchemeChoice, bool | None]:
    """(`kda_verify_scheme`, `kda_token_states`) of model_kwargs. Raises ValueError for a value that is no
    choice.
    """
    scheme = model_kwargs.get("kda_verify_scheme", "auto")
    if scheme not in get_args(VerifySchemeChoice):
        raise ValueError(
            f"model_kwargs: kda_verify_scheme is {scheme!r}; it must be one of "
            f"{', '.join(get_args(VerifySchemeChoice))}"
        )
    records = model_kwargs.get("kda_token_states")
    if records is not None and not isinstance(records, bool):
        raise ValueError(f"model_kwargs: kda_token_states is {records!r}; it must be true, false or left out")
    return cast(VerifySchemeChoice, scheme), records


def resolve_verify_scheme(request: VerifySchemeRequest) -> ResolvedVerifyScheme:
    """Choose how rejected drafts are undone.

    records: asked for by `kda_token_states` True or `kda_verify_scheme` "records", or by "auto" when there is
    speculation, no block reuse, and an op for the shape. Else replay, or intermediate when asked for. Block
    reuse is off unless the user set it. Raises ValueError where the choices contradict each other.
    """
    named, states = request.kda_verify_scheme, request.kda_token_states
    if states is True and named in ("replay", "intermediate"):
        raise ValueError(
            f"model_kwargs: kda_token_states=True contradicts kda_verify_scheme={named!r}; drop one of them"
        )
    if states is False and named == "records":
        raise ValueError(
            "model_kwargs: kda_token_states=False contradicts kda_verify_scheme='records'; drop one of them"
        )
    choice: VerifySchemeChoice = "records" if states is True else named
    if states is False and named == "auto":
        choice = "replay"
    reuse = bool(request.enable_block_reuse)
    if choice == "records":
        return _explicit_records(request, reuse)
    if choice != "auto":
        return ResolvedVerifyScheme(scheme=choice, enable_block_reuse=reuse)
    return _automatic(request, reuse)


def _explicit_records(request: VerifySchemeRequest, reuse: bool) -> ResolvedVerifyScheme:
    # Without speculation nothing is drafted, nothing is kept, and nothing stands in the way.
    if request.speculating and reuse:
        raise ValueError(
            "kv_cache_config.enable_block_reuse=True cannot be combined with draft records "
            "(kda_token_states=True or kda_verify_scheme='records'): set enable_block_reuse=False, or "
            "kda_verify_scheme='replay'"
        )
    if request.speculating and not request.op_serves_shape:
        raise ValueError(
            "model_kwargs: draft records were asked for, but no op on this device serves the model's KDA "
            "heads: set kda_verify_scheme='replay'"
        )
    return ResolvedVerifyScheme(scheme="records", enable_block_reuse=reuse)


def _automatic(request: VerifySchemeRequest, reuse: bool) -> ResolvedVerifyScheme:
    if not request.speculating:
        return ResolvedVerifyScheme(scheme="replay", enable_block_reuse=reuse)
    if reuse:
        notice = (
            "kv_cache_config.enable_block_reuse=True: rejected drafts are undone by replay, not by draft "
            "records, which need block reuse off"
        )
        return ResolvedVerifyScheme(scheme="replay", enable_block_reuse=True, notice=notice)
    if not request.op_serves_shape:
        return ResolvedVerifyScheme(scheme="replay", enable_block_reuse=False)
    return ResolvedVerifyScheme(scheme="records", enable_block_reuse=False)


def with_resolved_scheme(
    model_kwargs: Mapping[str, object], resolved: ResolvedVerifyScheme
) -> dict[str, object]:
    """model_kwargs in which the scheme is named and "auto" is gone."""
    return {
        **model_kwargs,
        "kda_verify_scheme": resolved.scheme,
        "kda_token_states": resolved.kda_token_states,
    }


def limit_to_model(config: ExecutorConfig, model_max_seq_len: int) -> ExecutorConfig:
    """The config with `max_seq_len` filled in. Raises ValueError where limits contradict each other."""
    limit = model_max_seq_len if config.max_seq_len is None else config.max_seq_len
    if not 2 <= limit <= model_max_seq_len:
        raise ValueError(
            f"max_seq_len is {limit}; the model allows 2 to {model_max_seq_len} tokens of prompt and output"
        )
    return replace(config, max_seq_len=limit)
