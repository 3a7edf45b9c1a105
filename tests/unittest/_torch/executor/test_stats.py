# SPDX-License-Identifier: Apache-2.0
import json
from datetime import datetime

from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.fakes import Rig, ScriptedDrafter, make_request, make_rig

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
