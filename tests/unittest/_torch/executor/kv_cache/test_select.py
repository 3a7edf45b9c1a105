# SPDX-License-Identifier: Apache-2.0
"""The choice of the manager: the whole truth table against the same decision written as a ladder."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import get_args

import pytest

from tensorrt_llm._torch.pyexecutor.kv_cache.config import MambaStateSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import (
    MambaHybridCacheManagerV2,
    MixedMambaHybridCacheManager,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.select import (
    RULES,
    Manager,
    SelectionFacts,
    SparseAttention,
    get_kv_cache_manager_cls,
    select_manager,
)
from tests.unittest._torch.executor.kv_cache.helpers import Traits, settings


def all_facts() -> Iterator[SelectionFacts]:
    choices = {
        "sparse_attention": get_args(SparseAttention),
        "preference": (None, "MIXED", "CPP"),
        "transceiver_runtime": (None, "PYTHON"),
        "transceiver_backend": (None, "NIXL"),
        "snapshot_offsets": ((), (64, 1)),
    }
    names = [field.name for field in fields(SelectionFacts)]
    for values in product(*(choices.get(name, (False, True)) for name in names)):
        yield SelectionFacts(**dict(zip(names, values, strict=True)))


def ladder(f: SelectionFacts) -> Manager | None:
    """The decision step by step; None is a refusal."""
    nixl = f.is_python_transceiver and f.is_nixl
    if not f.is_hybrid:
        return Manager.V2 if f.use_v2 else Manager.CPP
    if (f.sparse_attention == "qsa" and not f.use_v2) or f.sparse_attention == "other":
        return None
    if f.snapshot_offsets and not f.use_v2:
        return None
    if f.is_kda and not f.use_v2 and not f.is_disagg:
        return Manager.CPP_HYBRID if f.block_reuse else Manager.MIXED
    if f.is_disagg:
        if (f.is_kda or f.use_v2) and not nixl:
            return None
        if not f.use_v2:
            if f.block_reuse and f.is_python_transceiver:
                return None
            if f.block_reuse:
                return Manager.CPP_HYBRID
            return Manager.MIXED if nixl else Manager.CPP_HYBRID
    elif f.use_py_mamba:
        return None if f.use_v2 or f.block_reuse else Manager.MIXED
    if f.preference is not None:
        if f.use_v2 or (f.preference == "MIXED" and f.block_reuse):
            return None
        return Manager.MIXED if f.preference == "MIXED" else Manager.CPP_HYBRID
    if not f.use_v2:
        return Manager.CPP_HYBRID
    if f.block_reuse and f.pool_rebalance:
        return None
    return None if f.sparse_attention == "qsa" else Manager.HYBRID_V2


def outcome(facts: SelectionFacts) -> Manager | str:
    """The manager, or why there is none."""
    try:
        return select_manager(facts)
    except ValueError as refusal:
        return str(refusal)


def changed(facts: SelectionFacts) -> dict[str, object]:
    """The facts that differ from the defaults."""
    defaults = SelectionFacts()
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def test_whole_truth_table() -> None:
    """`pytest -s` prints it: one line per combination of facts, with the manager or the refusal."""
    for facts in all_facts():
        found = outcome(facts)
        print(f"{found.value if isinstance(found, Manager) else 'refused: ' + found:30} <- {changed(facts)}")
        assert (found if isinstance(found, Manager) else None) is ladder(facts), facts


WHAT_A_REFUSAL_NAMES = {
    "use_v2": "use_kv_cache_manager_v2={}",
    "block_reuse": "enable_block_reuse={}",
    "pool_rebalance": "enable_kv_pool_rebalance={}",
    "sparse_attention": "sparse attention is {!r}",
    "has_snapshot_offsets": "snapshot offsets (64, 1)",
    "is_python_transceiver": "transceiver_runtime",
    "is_nixl": "backend is None",
    "use_py_mamba": "TRTLLM_USE_PY_MAMBA=1",
    "preference": "TLLM_MAMBA_MANAGER_PREFERENCE={}",
}


def test_every_refusal_names_the_thing_its_value_and_the_remedy() -> None:
    """What decided is in the message with its value, and behind the colon stands what to do."""
    refusals = {}
    for facts in all_facts():
        rule = next(rule for rule in RULES if rule.matches(facts))
        if isinstance(rule.outcome, str):
            refusals[id(rule)] = (rule, outcome(facts))
    assert len(refusals) == sum(isinstance(rule.outcome, str) for rule in RULES)
    for rule, message in refusals.values():
        print(message)
        assert isinstance(message, str) and "{" not in message
        what, _, remedy = message.rpartition(": ")
        # Whoever has states to send is refused for the one thing that his transceiver lacks.
        lacking = {name for name in ("is_python_transceiver", "is_nixl") if rule.when.get(name) is False}
        decisive = lacking or rule.when.keys() & WHAT_A_REFUSAL_NAMES.keys()
        assert decisive, message
        for name in decisive:
            assert WHAT_A_REFUSAL_NAMES[name].format(rule.when[name]) in what, (name, message)
        assert remedy.startswith(("set ", "unset ", "switch ")), message


def test_every_rule_decides_something() -> None:
    deciding = {next(i for i, rule in enumerate(RULES) if rule.matches(facts)) for facts in all_facts()}
    assert deciding == set(range(len(RULES)))


@dataclass(frozen=True)
class Transceiver:
    transceiver_runtime: str | None = "PYTHON"
    backend: str | None = "NIXL"


def test_classes() -> None:
    hybrid, attention = Traits(), Traits(kda_layers=(), attention_layers=(0, 1, 2, 3), kda=None)
    assert get_kv_cache_manager_cls(hybrid, settings()) is MambaHybridCacheManagerV2
    assert get_kv_cache_manager_cls(attention, settings()) is KVCacheManagerV2
    first = settings(use_kv_cache_manager_v2=False)
    assert get_kv_cache_manager_cls(hybrid, first) is MixedMambaHybridCacheManager
    assert get_kv_cache_manager_cls(hybrid, settings(), True, Transceiver()) is MambaHybridCacheManagerV2
    assert get_kv_cache_manager_cls(hybrid, first, True, Transceiver()) is MixedMambaHybridCacheManager


@pytest.mark.parametrize("backend", [None, "UCX"])
def test_a_transfer_that_cannot_carry_states_is_refused(backend: str | None) -> None:
    with pytest.raises(ValueError, match="backend='NIXL'"):
        get_kv_cache_manager_cls(Traits(), settings(), True, Transceiver(backend=backend))


@pytest.mark.parametrize("traits", [Traits(), Traits(kda_layers=(), kda=None)])
def test_a_route_to_the_bindings_names_the_v2_setting(traits: Traits) -> None:
    config = settings(use_kv_cache_manager_v2=False, enable_block_reuse=True)
    with pytest.raises(
        ValueError,
        match=r"use_kv_cache_manager_v2=False leads.*C\+\+ bindings: set .*use_kv_cache_manager_v2=True",
    ):
        get_kv_cache_manager_cls(traits, config)


def test_explicit_snapshots_need_v2() -> None:
    rules = MambaStateSettings(additional_snapshot_offsets_from_end=(64,))
    config = settings(mamba_state_config=rules, enable_block_reuse=True)
    assert get_kv_cache_manager_cls(Traits(), config) is MambaHybridCacheManagerV2
    with pytest.raises(ValueError, match="snapshot offsets"):
        get_kv_cache_manager_cls(Traits(), settings(mamba_state_config=rules, use_kv_cache_manager_v2=False))


@pytest.mark.parametrize(
    ("name", "value"), [("TRTLLM_USE_PY_MAMBA", "1"), ("TLLM_MAMBA_MANAGER_PREFERENCE", "MIXED")]
)
def test_the_environment_may_not_contradict_the_configuration(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        get_kv_cache_manager_cls(Traits(), settings())
    first = settings(use_kv_cache_manager_v2=False)
    assert get_kv_cache_manager_cls(Traits(), first) is MixedMambaHybridCacheManager
