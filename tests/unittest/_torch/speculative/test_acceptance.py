# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.speculative.acceptance import AcceptanceGate, ForcedAcceptance, count_accepted


@pytest.mark.parametrize(
    ("drafts", "targets", "accepted"),
    [
        ([], [4], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([1, 2, 3], [9, 2, 3, 4], 0),
    ],
)
def test_acceptance_is_the_equal_prefix(drafts: list[int], targets: list[int], accepted: int) -> None:
    assert count_accepted(drafts, targets) == accepted


@pytest.mark.parametrize("mean", [0.4, 1.0, 2.6, 7.0])
def test_forced_acceptance_has_its_mean(mean: float) -> None:
    counts = [ForcedAcceptance(mean).count(i, 7) for i in range(1000)]
    assert sum(counts) / 1000 == pytest.approx(mean, abs=0.001)
    assert set(counts) <= {int(mean), int(mean) + 1}


def test_forced_acceptance_ends_with_the_drafts() -> None:
    assert ForcedAcceptance(5.0).count(3, 2) == 2


def test_the_gate_closes_for_good_below_its_threshold() -> None:
    gate = AcceptanceGate(window_size=3, threshold=0.5)
    gate.observe(4, 0)
    gate.observe(0, 0)
    gate.observe(4, 4)
    assert gate.is_open, "the window is not full: rounds without drafts do not count"
    # 1 of 2 and 9 of 10: ratios are of sums.
    gate.observe(4, 2)
    assert gate.is_open
    gate.observe(4, 1)
    gate.observe(4, 1)
    assert not gate.is_open
    for _ in range(5):
        gate.observe(4, 4)
    assert not gate.is_open


@pytest.mark.parametrize(("window", "threshold"), [(0, 0.9), (3, 0.0)])
def test_a_gate_without_window_or_threshold_stays_open(window: int, threshold: float) -> None:
    gate = AcceptanceGate(window, threshold)
    for _ in range(10):
        gate.observe(7, 0)
    assert gate.is_open
