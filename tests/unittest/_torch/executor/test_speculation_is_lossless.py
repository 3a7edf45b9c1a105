# SPDX-License-Identifier: Apache-2.0
"""On a real model and real managers a text with drafts is the text without, token for token."""

from functools import cache

import pytest

from tensorrt_llm._torch.pyexecutor.config import VerifySchemeName
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, SamplingSpec
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.tiny_kimi import (
    make_tiny_rig,
    scripted_speculation,
    tiny_prompt,
    tiny_request,
)

SCHEMES: tuple[VerifySchemeName, ...] = ("records", "replay", "intermediate")
SAMPLED = SamplingSpec(temperature=1.3, top_k=30, top_p=0.97, seed=99, repetition_penalty=1.05)


def make_requests(
    count: int, sampling: SamplingSpec | None = None, max_tokens: int = 60
) -> list[ExecutorRequest]:
    return [tiny_request(i, 40 + 13 * i, max_tokens, sampling) for i in range(count)]


@cache
def plain_text(request_id: int, is_sampled: bool, max_tokens: int = 60) -> tuple[int, ...]:
    """The request's output when it runs alone without speculation."""
    rig = make_tiny_rig()
    requests = make_requests(request_id + 1, SAMPLED if is_sampled else None, max_tokens)
    rig.submit(requests[request_id])
    return tuple(rig.run()[request_id])


def speculation(max_draft_len: int) -> SpeculationSpec:
    return SpeculationSpec(decoding_type="NGram", max_draft_len=max_draft_len, round_cost_per_token=0.0)


def test_text_does_not_depend_on_company_or_chunks() -> None:
    for max_num_tokens in (512, 70):
        rig = make_tiny_rig(max_num_tokens=max_num_tokens)
        for request in make_requests(8):
            rig.submit(request)
        assert rig.run() == {i: list(plain_text(i, False)) for i in range(8)}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("max_draft_len", [1, 3, 5, 7])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ngram_drafts(scheme: VerifySchemeName, max_draft_len: int, batch: int) -> None:
    spec = speculation(max_draft_len)
    rig = make_tiny_rig(scheme=scheme, spec=spec)
    for request in make_requests(batch):
        rig.submit(request)
    assert rig.run() == {i: list(plain_text(i, False)) for i in range(batch)}
    assert rig.executor.snapshot().draft_tokens_total > 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("accepted", range(8))
def test_every_acceptance(scheme: VerifySchemeName, accepted: int) -> None:
    check_script(scheme, [(7, accepted)], batch=2, is_sampled=False)


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_changing_lengths(scheme: VerifySchemeName, is_sampled: bool) -> None:
    script = [(7, 7), (3, 2), (0, 0), (5, 0), (1, 1), (7, 4)]
    check_script(scheme, script, batch=4, is_sampled=is_sampled)


def check_script(
    scheme: VerifySchemeName, script: list[tuple[int, int]], batch: int, is_sampled: bool
) -> None:
    texts = {i: list(plain_text(i, is_sampled)) for i in range(batch)}
    rig = make_tiny_rig(scheme=scheme, spec=scripted_speculation(texts, script))
    for request in make_requests(batch, SAMPLED if is_sampled else None):
        rig.submit(request)
    assert rig.run() == texts


@pytest.mark.parametrize("scheme", SCHEMES)
def test_five_hundred_tokens_with_every_draft_rejected(scheme: VerifySchemeName) -> None:
    text = list(plain_text(0, False, 500))
    assert len(set(text)) > 5
    rig = make_tiny_rig(scheme=scheme, spec=scripted_speculation({0: text}, [(7, 0)]))
    answer = rig.submit(make_requests(1, None, 500)[0])
    assert rig.run() == {0: text}
    assert answer.last.num_accepted_tokens == 0


@pytest.mark.parametrize("scheme", ["replay", "intermediate"])
def test_a_reused_prefix_changes_no_text(scheme: VerifySchemeName) -> None:
    """Requests that share 128 tokens of prompt, one after the other: the later ones start from a snapshot."""
    prefix = tiny_prompt(0, 150)
    requests = [
        ExecutorRequest(request_id=i, prompt_token_ids=(*prefix, *range(i + 3)), max_tokens=40)
        for i in range(3)
    ]
    expected = []
    for request in requests:
        rig = make_tiny_rig()
        rig.submit(request)
        expected.append(rig.run()[request.request_id])
    rig = make_tiny_rig(scheme=scheme, spec=speculation(5), snapshot_interval=64)
    for request, text in zip(requests, expected, strict=True):
        answer = rig.submit(request)
        while rig.executor.run_step():
            rig.manager.check_integrity()
        assert answer.token_ids == text
        assert answer.last.cached_tokens == (128 if request.request_id else 0)
    snapshot = rig.executor.snapshot()
    assert (snapshot.prompt_tokens_total, snapshot.prompt_cached_tokens_total) == (462, 256)
    rig.executor.shutdown()


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loop_runs_on_a_gpu(scheme: VerifySchemeName) -> None:
    """Products on a GPU depend on the batch, so texts may differ: everything ends and everything returns."""
    rig = make_tiny_rig(scheme=scheme, spec=speculation(7), device="cuda")
    answers = [rig.submit(request) for request in (*make_requests(4), *make_sampled(4))]
    assert all(len(text) == 60 for text in rig.run().values())
    assert sum(answer.last.num_draft_tokens for answer in answers) > 0


def make_sampled(count: int) -> list[ExecutorRequest]:
    return [tiny_request(100 + i, 30 + 9 * i, 60, SAMPLED) for i in range(count)]
