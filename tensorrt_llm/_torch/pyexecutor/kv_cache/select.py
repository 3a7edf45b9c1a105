# SPDX-License-Identifier: Apache-2.0
"""Which manager serves a model under a configuration: a table of rules, of which the first that matches
decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Literal, Protocol

from tensorrt_llm import envs
from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import (
    MambaHybridCacheManagerV2,
    MixedMambaHybridCacheManager,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import ModelTraits

SparseAttention = Literal["none", "skip_softmax", "qsa", "other"]


class CacheTransceiverConfigLike(Protocol):
    """How caches travel between servers of prompts and of generation."""

    @property
    def transceiver_runtime(self) -> str | None: ...
    @property
    def backend(self) -> str | None: ...


class Manager(Enum):
    """The managers of TensorRT-LLM, by class name; those of the C++ bindings are named to be refused."""

    V2 = "KVCacheManagerV2"
    HYBRID_V2 = "MambaHybridCacheManagerV2"
    MIXED = "MixedMambaHybridCacheManager"
    CPP_HYBRID = "CppMambaHybridCacheManager"
    CPP = "KVCacheManager"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionFacts:
    """What the choice depends on, resolved: "auto" and the environment are gone."""

    is_hybrid: bool = True
    is_kda: bool = True
    use_v2: bool = True
    is_disagg: bool = False
    transceiver_runtime: str | None = None
    transceiver_backend: str | None = None
    block_reuse: bool = False
    pool_rebalance: bool = False
    snapshot_offsets: tuple[int, ...] = ()
    sparse_attention: SparseAttention = "none"
    use_py_mamba: bool = False
    preference: Literal["MIXED", "CPP"] | None = None

    @property
    def is_python_transceiver(self) -> bool:
        return self.transceiver_runtime == "PYTHON"

    @property
    def is_nixl(self) -> bool:
        return self.transceiver_backend == "NIXL"

    @property
    def has_snapshot_offsets(self) -> bool:
        return bool(self.snapshot_offsets)


@dataclass(frozen=True, slots=True)
class Rule:
    """Where every named fact has its value, `outcome` is the manager, or the reason for a ValueError, in
    which {names} stand for facts.
    """

    when: Mapping[str, object]
    outcome: Manager | str

    def matches(self, facts: SelectionFacts) -> bool:
        return all(getattr(facts, name) == value for name, value in self.when.items())


def _rule(outcome: Manager | str, **when: object) -> Rule:
    return Rule(MappingProxyType(when), outcome)


_V2 = "kv_cache_config.use_kv_cache_manager_v2"

RULES: tuple[Rule, ...] = (
    _rule(Manager.V2, is_hybrid=False, use_v2=True),
    _rule(Manager.CPP, is_hybrid=False),
    _rule(
        f"the model's sparse attention is 'qsa', which {_V2}=False does not serve: set {_V2}=True",
        sparse_attention="qsa",
        use_v2=False,
    ),
    _rule(
        "the model's sparse attention is {sparse_attention!r}, for which there is no hybrid cache: switch "
        "sparse attention off",
        sparse_attention="other",
    ),
    _rule(
        f"kv_cache_config.mamba_state_config has snapshot offsets {{snapshot_offsets}}, which {_V2}=False "
        f"cannot keep: set {_V2}=True, or leave the offsets out",
        has_snapshot_offsets=True,
        use_v2=False,
    ),
    _rule(Manager.CPP_HYBRID, is_kda=True, use_v2=False, is_disagg=False, block_reuse=True),
    _rule(Manager.MIXED, is_kda=True, use_v2=False, is_disagg=False),
    *(
        _rule(reason, is_disagg=True, **{user: True, missing: False})
        for user in ("is_kda", "use_v2")
        for missing, reason in (
            (
                "is_python_transceiver",
                "cache_transceiver_config.transceiver_runtime is {transceiver_runtime!r}, which cannot carry "
                "recurrent states between servers: set transceiver_runtime='PYTHON' with backend='NIXL'",
            ),
            (
                "is_nixl",
                "cache_transceiver_config.backend is {transceiver_backend!r}, which cannot carry recurrent "
                "states between servers: set backend='NIXL' with transceiver_runtime='PYTHON'",
            ),
        )
    ),
    _rule(
        "kv_cache_config.enable_block_reuse=True does not work with transceiver_runtime='PYTHON' and "
        f"{_V2}=False: set {_V2}=True or enable_block_reuse=False",
        is_disagg=True,
        use_v2=False,
        block_reuse=True,
        is_python_transceiver=True,
    ),
    _rule(Manager.CPP_HYBRID, is_disagg=True, use_v2=False, block_reuse=True),
    _rule(Manager.MIXED, is_disagg=True, use_v2=False, is_python_transceiver=True, is_nixl=True),
    _rule(Manager.CPP_HYBRID, is_disagg=True, use_v2=False),
    _rule(
        f"the environment's TRTLLM_USE_PY_MAMBA=1 contradicts {_V2}=True: unset it, or set {_V2}=False",
        is_disagg=False,
        use_py_mamba=True,
        use_v2=True,
    ),
    _rule(
        "the environment's TRTLLM_USE_PY_MAMBA=1 does not work with kv_cache_config.enable_block_reuse=True: "
        "unset it, or set enable_block_reuse=False",
        is_disagg=False,
        use_py_mamba=True,
        block_reuse=True,
    ),
    _rule(Manager.MIXED, is_disagg=False, use_py_mamba=True),
    *(
        _rule(
            f"the environment's TLLM_MAMBA_MANAGER_PREFERENCE={preference} contradicts {_V2}=True: unset it, "
            f"or set {_V2}=False",
            preference=preference,
            use_v2=True,
        )
        for preference in ("MIXED", "CPP")
    ),
    _rule(
        "the environment's TLLM_MAMBA_MANAGER_PREFERENCE=MIXED does not work with "
        "kv_cache_config.enable_block_reuse=True: unset it, or set enable_block_reuse=False",
        preference="MIXED",
        block_reuse=True,
    ),
    _rule(Manager.MIXED, preference="MIXED"),
    _rule(Manager.CPP_HYBRID, use_v2=False),
    _rule(
        "kv_cache_config.enable_kv_pool_rebalance=True does not work with enable_block_reuse=True, whose "
        "snapshots it would move: set one of them to False",
        block_reuse=True,
        pool_rebalance=True,
    ),
    _rule(
        "the model's sparse attention is 'qsa', which is not part of this package: switch sparse attention "
        "off",
        sparse_attention="qsa",
    ),
    _rule(Manager.HYBRID_V2),
)


def select_manager(facts: SelectionFacts) -> Manager:
    """The manager for these facts. Raises ValueError, naming what contradicts what, where there is none."""
    outcome = next(rule.outcome for rule in RULES if rule.matches(facts))
    if isinstance(outcome, Manager):
        return outcome
    raise ValueError(outcome.format(**{field.name: getattr(facts, field.name) for field in fields(facts)}))


_CLASS_OF: dict[Manager, type[KVCacheManagerV2]] = {
    Manager.V2: KVCacheManagerV2,
    Manager.HYBRID_V2: MambaHybridCacheManagerV2,
    Manager.MIXED: MixedMambaHybridCacheManager,
}


def use_kv_cache_manager_v2(config: KvCacheConfigLike) -> bool:
    """Whether the V2 managers are chosen: "auto" is yes, which every model of this package prefers."""
    return config.use_kv_cache_manager_v2 is not False


def get_kv_cache_manager_cls(
    model_config: ModelTraits,
    kv_cache_config: KvCacheConfigLike,
    is_disagg: bool = False,
    cache_transceiver_config: CacheTransceiverConfigLike | None = None,
) -> type[KVCacheManagerV2]:
    """The manager class for a model under this configuration and environment.

    Raises ValueError where they contradict each other or need TensorRT-LLM's C++ bindings.
    """
    transceiver = cache_transceiver_config
    state = kv_cache_config.mamba_state_config
    manager = select_manager(
        SelectionFacts(
            is_hybrid=len(model_config.kda_layers) > 0,
            is_kda=model_config.kda is not None,
            use_v2=use_kv_cache_manager_v2(kv_cache_config),
            is_disagg=is_disagg,
            transceiver_runtime=None if transceiver is None else transceiver.transceiver_runtime,
            transceiver_backend=None if transceiver is None else transceiver.backend,
            block_reuse=kv_cache_config.enable_block_reuse,
            pool_rebalance=kv_cache_config.enable_kv_pool_rebalance,
            snapshot_offsets=(
                *state.additional_snapshot_offsets_from_start,
                *state.additional_snapshot_offsets_from_end,
            ),
            use_py_mamba=envs.use_py_mamba(),
            preference=envs.mamba_manager_preference(),
        )
    )
    if manager not in _CLASS_OF:
        raise ValueError(
            f"{_V2}=False leads to {manager.value} here, which needs TensorRT-LLM's C++ bindings: set "
            f"{_V2}=True"
        )
    return _CLASS_OF[manager]
