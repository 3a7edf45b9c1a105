# SPDX-License-Identifier: Apache-2.0
"""Which manager serves a model under a configuration: a table of rules, of which the first that matches
decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
    is_python_transceiver: bool = False
    is_nixl: bool = False
    block_reuse: bool = False
    pool_rebalance: bool = False
    snapshot_offsets: bool = False
    sparse_attention: SparseAttention = "none"
    use_py_mamba: bool = False
    preference: Literal["MIXED", "CPP"] | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Where every named fact has its value, `outcome` is the manager, or the reason for a ValueError."""

    when: Mapping[str, object]
    outcome: Manager | str

    def matches(self, facts: SelectionFacts) -> bool:
        return all(getattr(facts, name) == value for name, value in self.when.items())


def _rule(outcome: Manager | str, **when: object) -> Rule:
    return Rule(MappingProxyType(when), outcome)


RULES: tuple[Rule, ...] = (
    _rule(Manager.V2, is_hybrid=False, use_v2=True),
    _rule(Manager.CPP, is_hybrid=False),
    _rule(
        "sparse attention 'qsa' needs kv_cache_config.use_kv_cache_manager_v2=True",
        sparse_attention="qsa",
        use_v2=False,
    ),
    _rule("this sparse attention has no hybrid cache: switch it off", sparse_attention="other"),
    _rule(
        "mamba_state_config's snapshot offsets need kv_cache_config.use_kv_cache_manager_v2=True",
        snapshot_offsets=True,
        use_v2=False,
    ),
    _rule(Manager.CPP_HYBRID, is_kda=True, use_v2=False, is_disagg=False, block_reuse=True),
    _rule(Manager.MIXED, is_kda=True, use_v2=False, is_disagg=False),
    *(
        _rule(
            "transfer between servers needs cache_transceiver_config with transceiver_runtime='PYTHON' "
            "and backend='NIXL'",
            is_disagg=True,
            **{user: True, missing: False},
        )
        for user in ("is_kda", "use_v2")
        for missing in ("is_python_transceiver", "is_nixl")
    ),
    _rule(
        "block reuse does not work with the PYTHON transceiver and the first manager: set "
        "kv_cache_config.use_kv_cache_manager_v2=True or enable_block_reuse=False",
        is_disagg=True,
        use_v2=False,
        block_reuse=True,
        is_python_transceiver=True,
    ),
    _rule(Manager.CPP_HYBRID, is_disagg=True, use_v2=False, block_reuse=True),
    _rule(Manager.MIXED, is_disagg=True, use_v2=False, is_python_transceiver=True, is_nixl=True),
    _rule(Manager.CPP_HYBRID, is_disagg=True, use_v2=False),
    _rule(
        "TRTLLM_USE_PY_MAMBA=1 contradicts kv_cache_config.use_kv_cache_manager_v2=True: unset one of them",
        is_disagg=False,
        use_py_mamba=True,
        use_v2=True,
    ),
    _rule(
        "TRTLLM_USE_PY_MAMBA=1 does not work with block reuse: set kv_cache_config.enable_block_reuse=False",
        is_disagg=False,
        use_py_mamba=True,
        block_reuse=True,
    ),
    _rule(Manager.MIXED, is_disagg=False, use_py_mamba=True),
    *(
        _rule(
            f"TLLM_MAMBA_MANAGER_PREFERENCE={preference} contradicts "
            "kv_cache_config.use_kv_cache_manager_v2=True: unset one of them",
            preference=preference,
            use_v2=True,
        )
        for preference in ("MIXED", "CPP")
    ),
    _rule(
        "TLLM_MAMBA_MANAGER_PREFERENCE=MIXED does not work with block reuse: set "
        "kv_cache_config.enable_block_reuse=False",
        preference="MIXED",
        block_reuse=True,
    ),
    _rule(Manager.MIXED, preference="MIXED"),
    _rule(Manager.CPP_HYBRID, use_v2=False),
    _rule(
        "kv_cache_config.enable_kv_pool_rebalance does not work with block reuse of recurrent states: set "
        "one of them to False",
        block_reuse=True,
        pool_rebalance=True,
    ),
    _rule("sparse attention 'qsa' is not part of this package: switch it off", sparse_attention="qsa"),
    _rule(Manager.HYBRID_V2),
)


def select_manager(facts: SelectionFacts) -> Manager:
    """The manager for these facts. Raises ValueError, naming what contradicts what, where there is none."""
    outcome = next(rule.outcome for rule in RULES if rule.matches(facts))
    if isinstance(outcome, Manager):
        return outcome
    raise ValueError(outcome)


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
            is_python_transceiver=transceiver is not None and transceiver.transceiver_runtime == "PYTHON",
            is_nixl=transceiver is not None and transceiver.backend == "NIXL",
            block_reuse=kv_cache_config.enable_block_reuse,
            pool_rebalance=kv_cache_config.enable_kv_pool_rebalance,
            snapshot_offsets=bool(
                state.additional_snapshot_offsets_from_start or state.additional_snapshot_offsets_from_end
            ),
            use_py_mamba=envs.use_py_mamba(),
            preference=envs.mamba_manager_preference(),
        )
    )
    if manager not in _CLASS_OF:
        raise ValueError(
            f"this configuration leads to {manager.value}, which needs TensorRT-LLM's C++ bindings: set "
            "kv_cache_config.use_kv_cache_manager_v2=True"
        )
    return _CLASS_OF[manager]
