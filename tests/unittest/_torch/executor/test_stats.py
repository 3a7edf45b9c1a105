# SPDX-License-Identifier: Apache-2.0
import json
from datetime import datetime

from tensorrt_llm._torch.pyexecutor.stats import StepSummary
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.fakes import Rig, ScriptedDrafter, make_request, make_rig
from tests.unittest._torch.executor.tiny_kimi import make_tiny_rig

TOP_LEVEL_KEYS = {
    "timestamp",
    "iter",
    "iterLatencyMS",
    "newActiveRequestsQueueLatencyMS",
    "numNewActiveRequests",
    "numActiveRequests",
    "numQueuedRequests",
    "numCompletedRequests",
    "maxNumActiveRequests",
    "maxBatchSizeStatic",
    "maxBatchSizeTunerRecommended",
    "maxBatchSizeRuntime",
    "maxNumTokensStatic",
    "maxNumTokensTunerRecommended",
    "maxNumTokensRuntime",
    "gpuMemUsage",
    "cpuMemUsage",
    "pinnedMemUsage",
    "kvCacheStats",
    "inflightBatchingStats",
    "scheduledNumPrefillRequests",
    "scheduledSumPrefillTokens",
    "scheduledSumPrefillKvTokens",
    "scheduledNumDecodeRequests",
    "scheduledSumDecodeKvTokens",
    "queuedNumPrefillRequests",
    "queuedSumPrefillTokens",
    "queuedNumDecodeRequests",
    "queuedSumDecodeKvTokens",
}
KV_CACHE_KEYS = {
    "maxNumBlocks",
    "freeNumBlocks",
    "usedNumBlocks",
    "tokensPerBlock",
    "allocTotalBlocks",
    "allocNewBlocks",
    "reusedBlocks",
    "missedBlocks",
    "cacheHitRate",
}
INFLIGHT_KEYS = {
    "numScheduledRequests",
    "numContextRequests",
    "numGenRequests",
    "numPausedRequests",
    "numCtxTokens",
    "microBatchId",
    "avgNumDecodedTokensPerIter",
}
SPECULATION_KEYS = {
    "numDraftTokens",
    "numAcceptedTokens",
    "numRequestsWithDraftTokens",
    "acceptanceLength",
    "iterLatencyMS",
    "draftOverhead",
}


def drafting_rig(script: list[tuple[int, int]], max_stats_len: int = 1000) -> Rig:
    plain = make_rig()
    plain.submit(make_request(prompt_len=9, max_tokens=40))
    drafter = ScriptedDrafter(dict(plain.run()), script)
    spec = SpeculationSpec(decoding_type="NGram", max_draft_len=7)
    return make_rig(spec=spec, drafter=drafter, max_stats_len=max_stats_len)


def run_stats(rig: Rig) -> list[dict[str, object]]:
    rig.submit(make_request(prompt_len=9, max_tokens=40))
    rig.run()
    return rig.executor.get_stats()


def test_keys() -> None:
    stats = run_stats(make_rig())
    assert {frozenset(step) for step in stats} == {frozenset(TOP_LEVEL_KEYS)}
    drafting = run_stats(drafting_rig([(7, 3)]))
    assert {frozenset(step) for step in drafting} == {frozenset({*TOP_LEVEL_KEYS, "specDecodingStats"})}
    for name, keys in (
        ("kvCacheStats", KV_CACHE_KEYS),
        ("inflightBatchingStats", INFLIGHT_KEYS),
        ("specDecodingStats", SPECULATION_KEYS),
    ):
        assert {frozenset(step[name]) for step in drafting} == {frozenset(keys)}  # type: ignore[call-overload]
    json.dumps(drafting, allow_nan=False)
    datetime.strptime(str(stats[0]["timestamp"]), "%m-%d-%Y %H:%M:%S.%f")


def test_reading_drains() -> None:
    rig = make_rig()
    assert rig.executor.get_stats() == []
    stats = run_stats(rig)
    assert [step["iter"] for step in stats] == list(range(40))
    assert rig.executor.get_stats() == []


def test_only_so_many_iterations_are_kept() -> None:
    rig = drafting_rig([(0, 0)], max_stats_len=5)
    assert [step["iter"] for step in run_stats(rig)] == list(range(35, 40))
    silent = drafting_rig([(0, 0)], max_stats_len=0)
    assert run_stats(silent) == []
    assert silent.executor.snapshot().iterations_total == 40


def test_numbers_of_a_prompt_and_of_rounds() -> None:
    stats = run_stats(drafting_rig([(7, 3), (0, 0)]))
    first, second, third, last = stats[0], stats[1], stats[2], stats[-1]
    assert first["scheduledSumPrefillTokens"] == 9
    assert first["numNewActiveRequests"] == 1
    assert first["kvCacheStats"]["allocNewBlocks"] == 2  # type: ignore[index]
    assert second["scheduledSumDecodeKvTokens"] == 10
    assert second["specDecodingStats"]["numDraftTokens"] == 7  # type: ignore[index]
    assert second["specDecodingStats"]["acceptanceLength"] == 4  # type: ignore[index]
    assert second["inflightBatchingStats"]["avgNumDecodedTokensPerIter"] == 4  # type: ignore[index]
    assert third["specDecodingStats"]["numRequestsWithDraftTokens"] == 0  # type: ignore[index]
    assert third["specDecodingStats"]["acceptanceLength"] == 1  # type: ignore[index]
    assert (last["numActiveRequests"], last["numCompletedRequests"]) == (0, 1)


def test_acceptance_is_summed_then_divided() -> None:
    """1 of 2 drafts and 9 of 10 are 10 of 12, 83.33 %, not the mean of 50 % and 90 %."""
    summary = StepSummary(iteration=0, started_at=0.0)
    for num_drafts, num_accepted in ((2, 1), (10, 9), (0, 0)):
        summary.note_round(num_drafts, num_accepted)
    assert (summary.draft_tokens, summary.accepted_tokens, summary.num_drafted) == (12, 10, 2)
    rig = drafting_rig([(2, 1), (7, 7)])
    rig.submit(make_request(prompt_len=9, max_tokens=40))
    rig.run()
    found = rig.executor.snapshot()
    assert found.draft_tokens_total == sum(found.drafted_by_position)
    assert found.accepted_tokens_total == sum(found.accepted_by_position)
    steps = [step["specDecodingStats"] for step in rig.executor.get_stats()]
    assert sum(step["numDraftTokens"] for step in steps) == found.draft_tokens_total
    assert sum(step["numAcceptedTokens"] for step in steps) == found.accepted_tokens_total


def test_capacity_is_told_in_tokens_that_attention_holds() -> None:
    """Of a hybrid only the attention pages hold tokens; states count as slots, never as tokens."""
    rig = make_tiny_rig()
    stats, found = rig.manager.get_kv_cache_stats(), rig.executor.snapshot()
    tokens = rig.manager.num_attention_pages * rig.manager.tokens_per_block
    assert stats.max_num_blocks * stats.tokens_per_block == tokens
    assert found.max_pages * found.tokens_per_page == tokens
    assert rig.manager.get_num_available_tokens() == tokens
    assert rig.executor.description.ssm_slots == rig.manager.num_state_slots
    rig.executor.shutdown()
