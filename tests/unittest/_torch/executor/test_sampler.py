# SPDX-License-Identifier: Apache-2.0
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, LlmRequest, SamplingSpec
from tensorrt_llm._torch.pyexecutor.sampler import (
    NO_TOKEN,
    LogitRows,
    Sampler,
    draw_tokens,
    token_logprobs,
    uniform,
)

NEVER = float("-inf")


def make_req(
    sampling: SamplingSpec,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    seed: int = 3,
    end_id: int | None = None,
) -> LlmRequest:
    request = ExecutorRequest(
        request_id=0, prompt_token_ids=prompt, max_tokens=100, sampling=sampling, end_id=end_id
    )
    req = LlmRequest.admit(request, max_seq_len=1000, seed=seed, arrival=0.0)
    for token in output:
        req.append_output(token)
    return req


def sample_one(logits: Tensor, sampling: SamplingSpec, **more: object) -> int:
    req = make_req(sampling, **more)  # type: ignore[arg-type]
    return Sampler().sample(logits[None], [LogitRows(req, 0, ())])[0][0]


def frequencies(logits: Tensor, sampling: SamplingSpec, draws: int = 4000) -> Counter[int]:
    counts: Counter[int] = Counter()
    req = make_req(sampling, seed=17)
    for start in range(0, draws, 100):
        rows = LogitRows(make_req(sampling, seed=start), 0, (0,) * 99)
        counts.update(Sampler().sample(logits.expand(100, -1), [rows])[0])
    assert req.num_generated == 0
    return counts


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSpec(),
        SamplingSpec(temperature=0.0),
        SamplingSpec(temperature=2.0, top_k=1),
        SamplingSpec(temperature=2.0, top_p=0.0),
    ],
)
def test_greedy_takes_the_best_and_of_equals_the_first(sampling: SamplingSpec) -> None:
    assert sampling.is_greedy
    assert sample_one(torch.tensor([0.0, 2.0, 1.0, 2.0]), sampling) == 1


def test_top_p_or_top_k_alone_sample_at_temperature_one() -> None:
    assert not SamplingSpec(top_p=0.5).is_greedy
    assert not SamplingSpec(top_k=3).is_greedy
    assert not SamplingSpec(temperature=1.0).is_greedy


def test_draws_follow_the_distribution() -> None:
    p = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    counts = frequencies(p.log(), SamplingSpec(temperature=1.0))
    assert counts[4] == 0
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(p[token].item(), abs=0.03)


def test_temperature_sharpens() -> None:
    p = torch.tensor([0.6, 0.4])
    counts = frequencies(p.log(), SamplingSpec(temperature=0.5))
    assert counts[0] / 4000 == pytest.approx(0.36 / 0.52, abs=0.03)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingSpec(temperature=1.0, top_k=2), {0, 1}),
        (SamplingSpec(temperature=1.0, top_k=100), {0, 1, 2, 3}),
        (SamplingSpec(temperature=1.0, top_k=0), {0, 1, 2, 3}),
        (SamplingSpec(temperature=1.0, top_p=0.6), {0, 1}),
        (SamplingSpec(temperature=1.0, top_p=0.4), {0}),
        (SamplingSpec(temperature=1.0, min_p=0.35), {0, 1}),
        # Of the two best, with masses 2/3 and 1/3, the first alone reaches 0.6.
        (SamplingSpec(temperature=1.0, top_k=2, top_p=0.6), {0}),
    ],
)
def test_filters_keep_the_best(sampling: SamplingSpec, allowed: set[int]) -> None:
    p = torch.tensor([0.48, 0.24, 0.16, 0.12])
    assert set(frequencies(p.log(), sampling, draws=1000)) == allowed


def test_a_token_that_cannot_be_chosen_is_not_even_at_the_last_random_number() -> None:
    logits = torch.tensor([[0.0, NEVER, 0.0, NEVER]])
    last = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    one, all_tokens = torch.ones(1), torch.tensor([4])
    token = draw_tokens(logits, one, all_tokens, one.double(), torch.zeros(1, dtype=torch.float64), last)
    assert token.tolist() == [2]


ROW_LISTS = st.lists(
    st.tuples(st.integers(0, 1000), st.floats(0.1, 3), st.integers(1, 70), st.floats(0.05, 1)),
    min_size=1,
    max_size=9,
)


@settings(deadline=None)
@given(ROW_LISTS, st.integers(1, 300))
def test_a_row_does_not_see_the_others(rows: list[tuple[int, float, int, float]], vocab_size: int) -> None:
    logits = torch.stack(
        [torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3 for seed, *_ in rows]
    )
    operands = (
        torch.tensor([row[1] for row in rows]),
        torch.tensor([row[2] for row in rows]),
        torch.tensor([row[3] for row in rows], dtype=torch.float64),
        torch.zeros(len(rows), dtype=torch.float64),
        torch.tensor([uniform(5, row[0]) for row in rows], dtype=torch.float64),
    )
    together = draw_tokens(logits, *operands)
    for i in range(len(rows)):
        alone = draw_tokens(logits[i : i + 1].clone(), *(x[i : i + 1] for x in operands))
        assert torch.equal(alone, together[i : i + 1])


def test_random_numbers_are_keyed_by_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, 2**63) for position in range(1000)]
    assert len(set(numbers)) == 3000
    assert all(0 <= number < 1 for number in numbers)
    assert sum(numbers) / 3000 == pytest.approx(0.5, abs=0.02)
    assert uniform(1, 5) == uniform(1, 5)


def test_rows_behind_drafts_count_the_drafts_for_penalties() -> None:
    sampling = SamplingSpec(repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.4)
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    sampler = Sampler()
    got = sampler.sample(logits, [LogitRows(make_req(sampling, output=(4, 4)), 0, (6, 4))])[0]
    for j, output in enumerate([(4, 4), (4, 4, 6), (4, 4, 6, 4)]):
        expected = penalised_argmax(logits[j], (1, 2), output, sampling)
        assert got[j] == expected
        assert sample_one(logits[j], sampling, output=output) == expected


def penalised_argmax(
    row: Tensor, prompt: tuple[int, ...], output: tuple[int, ...], sampling: SamplingSpec
) -> int:
    values = row.tolist()
    for token in set(prompt + output):
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, count in Counter(output).items():
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    return max(range(len(values)), key=values.__getitem__)


def test_penalties_follow_the_output_as_it_grows() -> None:
    sampling = SamplingSpec(frequency_penalty=1.0)
    req, sampler = make_req(sampling), Sampler()
    logits = torch.tensor([[0.0, 0.0, 2.5, 2.0]])
    texts = []
    for _ in range(4):
        texts.append(sampler.sample(logits, [LogitRows(req, 0, ())])[0][0])
        req.append_output(texts[-1])
    assert texts == [2, 3, 2, 3]
    # A rejected draft must not have been counted.
    sampler.sample(logits.expand(2, -1), [LogitRows(req, 0, (2,))])
    assert sampler.sample(logits, [LogitRows(req, 0, ())])[0] == [2]


def test_bias_and_min_tokens() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert sample_one(logits, SamplingSpec(logit_bias={2: 5.0})) == 2
    early = SamplingSpec(min_tokens=2)
    rows = logits.expand(3, -1).clone()
    req = make_req(early, end_id=0)
    assert Sampler().sample(rows, [LogitRows(req, 0, (1, 1))])[0] == [1, 1, 0]
    assert rows.equal(logits.expand(3, -1)), "the model's logits were changed"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [SamplingSpec(), SamplingSpec(temperature=1.0)])
def test_logits_that_are_not_finite_give_no_token(value: float, sampling: SamplingSpec) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, value, 2.0], [NEVER, NEVER, NEVER]])
    got = Sampler().sample(logits, [LogitRows(make_req(sampling), 0, (0, 0))])[0]
    assert got[0] != NO_TOKEN
    assert got[1:] == [NO_TOKEN, NO_TOKEN]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(4))
    entries = token_logprobs(logits, [int(logits[0].argmax()), 5], num_best=3)
    exact = logits.double().log_softmax(-1)
    for row, entry in enumerate(entries):
        assert len(entry) == 4
        for item in entry:
            assert item.logprob == pytest.approx(exact[row, item.token_id].item(), abs=1e-5)
            assert item.rank == 1 + int((exact[row] > exact[row, item.token_id]).sum())
        assert [item.rank for item in entry[1:]] == [1, 2, 3]
    assert entries[0][0] == entries[0][1]
    assert [entry[0].token_id for entry in entries][1] == 5


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.5},
        {"min_tokens": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {3: float("inf")}},
        {"num_logprobs": -1},
    ],
)
def test_values_out_of_range_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} is "):
        SamplingSpec(**bad)  # type: ignore[arg-type]
