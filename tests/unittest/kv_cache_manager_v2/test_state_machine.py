# SPDX-License-Identifier: Apache-2.0
"""Hypothesis drives the literal model's rules, everything checked after each step."""

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.unittest.kv_cache_manager_v2.drive import run
from tests.unittest.kv_cache_manager_v2.literal_model import VARIANTS, Machine

PICK = st.integers(0, 20)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class CacheCore(RuleBasedStateMachine):
    """Rules with drawn arguments; `fault` makes the n-th allocation or copy of the next rule fail."""

    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.machine: Machine | None = None
        self.fault: int | None = None

    @initialize(variant=st.sampled_from(VARIANTS), tokens=TOKENS)
    def start(self, variant: object, tokens: list[int]) -> None:
        self.machine = Machine(variant)  # type: ignore[arg-type]
        self.machine.create(None, tokens)

    def apply(self, step: Callable[[Machine], None]) -> None:
        machine = self.machine
        assert machine is not None
        if self.fault is None:
            step(machine)
        else:
            machine.with_fault(self.fault, lambda: step(machine))
        self.fault = None

    @rule(fault=st.integers(0, 5))
    def inject(self, fault: int) -> None:
        self.fault = fault

    @rule(tokens=TOKENS, scope=st.sampled_from([None, "other"]))
    def create(self, tokens: list[int], scope: str | None) -> None:
        self.apply(lambda machine: machine.create(scope, tokens))

    @rule(pick=PICK, length=st.integers(0, 60), suffix=st.lists(st.integers(0, 1), max_size=3))
    def fork(self, pick: int, length: int, suffix: list[int]) -> None:
        self.apply(lambda machine: machine.fork(pick, length, suffix))

    @rule(pick=PICK)
    def resume(self, pick: int) -> None:
        self.apply(lambda machine: machine.resume(pick))

    @rule(pick=PICK, num_tokens=st.integers(1, 12), num_drafts=st.integers(0, 4))
    def compute(self, pick: int, num_tokens: int, num_drafts: int) -> None:
        self.apply(lambda machine: machine.compute(pick, num_tokens, num_drafts))

    @rule(pick=PICK, num_tokens=st.integers(1, 12))
    def reserve(self, pick: int, num_tokens: int) -> None:
        self.apply(lambda machine: machine.reserve(pick, num_tokens))

    @rule(pick=PICK, is_end=st.booleans())
    def commit(self, pick: int, is_end: bool) -> None:
        self.apply(lambda machine: machine.commit(pick, is_end))

    @rule(pick=PICK)
    def suspend(self, pick: int) -> None:
        self.apply(lambda machine: machine.suspend(pick))

    @rule(pick=PICK, level=st.integers(0, 2))
    def prefetch(self, pick: int, level: int) -> None:
        self.apply(lambda machine: machine.prefetch(pick, level))

    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        self.apply(lambda machine: machine.close(pick))

    @rule(pick=PICK)
    def drop_committed(self, pick: int) -> None:
        self.apply(lambda machine: machine.drop_committed(pick))

    @rule()
    def rebalance(self) -> None:
        self.apply(lambda machine: machine.rebalance())

    @rule(level=st.integers(0, 2), quota_slots=st.integers(4, 48))
    def resize_tier(self, level: int, quota_slots: int) -> None:
        self.apply(lambda machine: machine.resize_tier(level, quota_slots))

    @invariant()
    def everything_agrees(self) -> None:
        if self.machine is not None:
            self.machine.check()
            CacheCore.num_steps += 1

    def teardown(self) -> None:
        if self.machine is not None:
            self.machine.end()


def test_ten_thousand_steps_of_drawn_rules() -> None:
    CacheCore.num_steps = 0
    run_state_machine_as_test(
        CacheCore,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    assert CacheCore.num_steps >= 10_000


def test_the_seeded_driver_reaches_every_interesting_state() -> None:
    """150 steps of each variant by the rules that the long run takes; each way a run can turn is taken."""
    counts = run(num_steps=len(VARIANTS) * 150, seed=7, episode_steps=150)
    for name in (
        "reused",
        "shared",
        "resumed",
        "resume_refused",
        "grow_refused",
        "injected",
        "dropped",
        "offloaded",
        "onboarded",
    ):
        assert counts[name] > 0, name
