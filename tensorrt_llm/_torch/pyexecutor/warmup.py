# SPDX-License-Identifier: Apache-2.0
"""Steps that no user asked for: the fullest one, whose peak of memory says what is left for the cache."""

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, LlmRequest, LlmRequestState
from tensorrt_llm._torch.pyexecutor.py_executor import CacheManager, StepRunner
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests


def full_step_lengths(max_num_tokens: int, max_batch_size: int, max_seq_len: int) -> list[int]:
    """Prompts that fill a step: as few as can be, in tokens; together max_num_tokens where the limits
    allow it.
    """
    lengths: list[int] = []
    while max_num_tokens > 0 and len(lengths) < max_batch_size:
        lengths.append(min(max_num_tokens, max_seq_len - 1))
        max_num_tokens -= lengths[-1]
    return lengths


def run_full_step(engine: StepRunner, cache: CacheManager, lengths: list[int]) -> int:
    """Run prompts of these lengths in one step and give everything back; return how many prompts had
    capacity.

    Mutates what the cache holds of free pages and slots, which nobody reads.
    """
    batch = ScheduledRequests()
    for i, length in enumerate(lengths):
        req = _dummy(-1 - i, length)
        if not cache.prepare_context(req):
            break
        if not cache.resize_context(req, length):
            cache.free_resources(req)
            break
        batch.context_requests.append(req)
    if batch.context_requests:
        cache.prepare_resources(batch)
        engine.forward(batch)
        cache.update_context_resources(batch)
    for req in batch.context_requests:
        cache.free_resources(req)
        engine.forget(req.py_request_id)
    return batch.batch_size


def _dummy(request_id: int, length: int) -> LlmRequest:
    request = ExecutorRequest(request_id=request_id, prompt_token_ids=(0,) * length, max_tokens=1)
    req = LlmRequest.admit(request, max_seq_len=length + 1, seed=0, arrival=0.0)
    req.state = LlmRequestState.CONTEXT_INIT
    req.context_chunk_size = length
    return req
