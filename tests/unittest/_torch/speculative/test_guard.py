# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.speculative.guard import MATCH_LENGTH_BOUNDS, PRIOR_CONTINUATION, DraftGuard


def taught(cost: float, chance: float, rounds: int = 400) -> DraftGuard:
    """A guard whose matches of one token went on with this chance."""
    guard = DraftGuard(cost)
    for i in range(rounds):
        right = int((i + 1) * chance) > int(i * chance)
        guard.observe(1, [5], [5 if right else 6])
    return guard


@pytest.mark.parametrize("chance", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_it_learns_the_chance(chance: float) -> None:
    assert DraftGuard(0.3).continuation_chance(1) == pytest.approx(PRIOR_CONTINUATION[0])
    assert taught(0.3, chance).continuation_chance(1) == pytest.approx(chance, abs=0.05)


def test_outcomes_belong_to_the_match_length_they_were_seen_at() -> None:
    guard = DraftGuard(0.3)
    # Two right drafts after one matched token, then a wrong one: classes 1 and 2 gain, 3-4 loses.
    for _ in range(50):
        guard.observe(1, [5, 6, 7, 8], [5, 6, 9, 8])
    assert guard.continuation_chance(1) > 0.8
    assert guard.continuation_chance(2) > 0.8
    assert guard.continuation_chance(3) < 0.2
    unseen = guard.continuation_chance(5)
    assert unseen == pytest.approx(PRIOR_CONTINUATION[3]), "nothing was seen behind the difference"


def test_only_tokens_that_came_are_scored() -> None:
    guard = DraftGuard(0.3)
    guard.observe(1, [5, 6, 7], [5])
    assert guard.continuation_chance(2) == pytest.approx(PRIOR_CONTINUATION[1])


def test_cost_decides() -> None:
    assert taught(0.9, 0.5).choose(1, 7, 1) == 0
    assert taught(0.02, 0.5).choose(1, 7, 1) > 0
    assert taught(0.0, 0.0).choose(1, 7, 1) == 7, "cost 0 switches the guard off"


def test_a_fuller_round_drafts_less() -> None:
    guard = taught(0.1, 0.37)
    lengths = [guard.choose(1, 7, num_generating) for num_generating in range(1, 33)]
    assert lengths[0] > 0
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


@pytest.mark.parametrize("max_drafts", range(1, 8))
def test_few_lengths(max_drafts: int) -> None:
    allowed = {0, 1, 3, 7, max_drafts}
    for chance in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        for cost in (0.01, 0.1, 0.3, 0.6):
            length = taught(cost, chance).choose(1, max_drafts, 1)
            assert length in allowed
            assert length <= max_drafts


@pytest.mark.parametrize("num_generating", [1, 4, 16])
@pytest.mark.parametrize("cost", [0.02, 0.06, 0.3])
def test_by_its_own_costs_it_hardly_loses_to_not_drafting(cost: float, num_generating: int) -> None:
    """The estimate is off by what the prior weighs; the loss that this can cause is small."""
    undrafted = 1 + 2 * cost * (num_generating - 1)
    for chance in (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95):
        guard = DraftGuard(cost)
        for bound in (1, *MATCH_LENGTH_BOUNDS):
            for i in range(500):
                right = int((i + 1) * chance) > int(i * chance)
                guard.observe(bound, [5], [5 if right else 6])
        length = guard.choose(3, 7, num_generating)
        emitted = num_generating + sum(chance**j for j in range(1, length + 1))
        spent = undrafted + (cost * (length + 1 / num_generating) if length else 0)
        assert emitted / spent >= 0.97 * num_generating / undrafted
