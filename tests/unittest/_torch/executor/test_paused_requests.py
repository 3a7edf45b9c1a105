# SPDX-License-Identifier: Apache-2.0
"""On a real model and real managers a request that was paused gives the text of one that never was."""

from functools import cache

import pytest

from tensorrt_llm._torch.pyexecutor.config import VerifySchemeName
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, SamplingSpec
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.crowded_kimi import make_crowded_rig
from tests.unittest._torch.executor.tiny_kimi import make_tiny_rig, scripted_speculation, tiny_request

SCHEMES: tuple[VerifySchemeName, ...] = ("records", "replay", "intermediate")
SAMPLED = SamplingSpec(temperature=1.3, top_k=30, top_p=0.97, seed=99, repetition_penalty=1.05)
NGRAM = SpeculationSpec(decoding_type="NGram", max_draft_len=5, round_cost_per_token=0.0)
SCRIPT = [(7, 7), (3, 2), (0, 0), (5, 0), (1, 1), (7, 4)]
COUNT = 4
MAX_TOKENS = 90


def make_requests(sampling: SamplingSpec | None = None) -> list[ExecutorRequest]:
    """Prompts of a page or two, whose texts end in their third or fourth."""
    return [tiny_request(i, 70 + 13 * i, MAX_TOKENS, sampling) for i in range(COUNT)]


@cache
def plain_texts(is_sampled: bool) -> dict[int, list[int]]:
    """The outputs with room for all, without speculation."""
    rig = make_tiny_rig()
    for request in make_requests(SAMPLED if is_sampled else None):
        rig.submit(request)
    return rig.run()


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("scheme", "drafts"),
    [("records", "none"), *((scheme, drafts) for scheme in SCHEMES for drafts in ("ngram", "scripted"))],
)
def test_a_suspended_request_goes_on_where_it_stood(
    scheme: VerifySchemeName, drafts: str, is_sampled: bool
) -> None:
    texts = plain_texts(is_sampled)
    spec = {"none": None, "ngram": NGRAM, "scripted": scripted_speculation(texts, SCRIPT)}[drafts]
    rig = make_crowded_rig(num_pages=8, scheme=scheme, spec=spec)
    for request in make_requests(SAMPLED if is_sampled else None):
        rig.submit(request)
    assert rig.run() == texts
    assert rig.num_suspended == rig.num_resumed >= 1
    assert rig.num_moved > 0, "no state came back to another slot"


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_a_lower_tier_caches_are_computed_again(scheme: VerifySchemeName, is_sampled: bool) -> None:
    texts = plain_texts(is_sampled)
    spec = scripted_speculation(texts, SCRIPT)
    rig = make_crowded_rig(
        num_pages=9,
        has_host=False,
        scheme=scheme,
        spec=spec,
        max_num_tokens=130,
        enable_chunked_prefill=False,
    )
    for request in make_requests(SAMPLED if is_sampled else None):
        rig.submit(request)
    contexts = []
    while rig.step():
        contexts += [req.context_len - req.prompt_len for req in rig.executor._scheduler.running]
    assert {request_id: answer.token_ids for request_id, answer in rig.answers.items()} == texts
    assert max(contexts) > 30, "no output was read again"
    assert [answer.last.cached_tokens for answer in rig.answers.values()] == [0] * COUNT
    rig.run()


@pytest.mark.parametrize("has_host", [True, False], ids=["host", "no_host"])
def test_a_prompt_that_gave_way_is_read_on(has_host: bool) -> None:
    """The second request's prompt is read in chunks while the first one's text grows into its pages."""
    requests = [tiny_request(0, 62, 150), tiny_request(1, 250, 20)]
    rig = make_tiny_rig()
    for request in requests:
        rig.submit(request)
    texts = rig.run()
    crowded = make_crowded_rig(num_pages=5, has_host=has_host, max_num_tokens=65)
    for request in requests:
        crowded.submit(request)
    was_paused_in_context = False
    while crowded.step():
        was_paused_in_context |= any(req.in_context for req in crowded.executor._scheduler.paused)
    assert was_paused_in_context
    assert crowded.run() == texts


@pytest.mark.parametrize("has_host", [True, False], ids=["host", "no_host"])
def test_reused_prefixes_and_pauses_together(has_host: bool) -> None:
    texts = plain_texts(False)
    rig = make_crowded_rig(num_pages=9, has_host=has_host, scheme="replay", spec=NGRAM, snapshot_interval=64)
    for request in make_requests():
        rig.submit(request)
    assert rig.run() == texts


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cancelling_paused_requests_returns_all_they_hold(scheme: VerifySchemeName) -> None:
    texts = plain_texts(False)
    rig = make_crowded_rig(num_pages=9, scheme=scheme, spec=NGRAM)
    for request in make_requests():
        rig.submit(request)
    while not any(req.holds_cache for req in rig.executor._scheduler.paused):
        assert rig.step()
    cancelled = [req.py_request_id for req in rig.executor._scheduler.paused]
    for request_id in cancelled:
        rig.executor.cancel(request_id)
    rig.step()
    assert not rig.executor._scheduler.paused
    result = rig.run()
    for request_id, text in result.items():
        reason = "cancelled" if request_id in cancelled else "length"
        assert rig.answers[request_id].last.finish_reason == reason
        assert text == texts[request_id][: len(text)]


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pauses_on_a_gpu(scheme: VerifySchemeName) -> None:
    """Products on a GPU depend on the batch, so texts may differ: everything ends and everything returns."""
    for has_host in (True, False):
        rig = make_crowded_rig(num_pages=9, has_host=has_host, scheme=scheme, spec=NGRAM, device="cuda")
        for request in make_requests():
            rig.submit(request)
        assert all(len(text) == MAX_TOKENS for text in rig.run().values())
        assert not has_host or rig.num_moved > 0
