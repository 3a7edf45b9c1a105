# SPDX-License-Identifier: Apache-2.0
"""From a step's target tokens to what each request has emitted: acceptance, ends inside a round, log-
probabilities.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tensorrt_llm import logger
from tensorrt_llm._torch.pyexecutor.llm_request import (
    FailureKind,
    Finish,
    LlmRequest,
    RequestFailure,
    TokenLogprob,
)
from tensorrt_llm._torch.pyexecutor.sampler import NO_TOKEN, LogitRows, token_logprobs
from tensorrt_llm._torch.speculative.speculator import Speculator


class Emission(NamedTuple):
    """What a step gave one request: new tokens, and its end if it came."""

    request: LlmRequest
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish: Finish | None = None
    error: RequestFailure | None = None


def emit(
    entry: LogitRows, targets: Sequence[int], logits: Tensor, speculator: Speculator, now: float
) -> Emission:
    """Append the round's tokens to the request, up to the one that ends it.

    What was accepted behind an end is dropped as if rejected, so that tokens, log-probabilities, counters and
    cache all stop at the same token. An error here fails this request alone.
    """
    req = entry.request
    try:
        token_ids, finish = _append(req, speculator.accept(req, targets))
        num_logprobs = req.request.sampling.num_logprobs
        logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
        if num_logprobs is not None:
            rows = logits[entry.start : entry.start + len(token_ids)]
            logprobs = token_logprobs(rows, token_ids, num_logprobs)
    except Exception as error:  # noqa: BLE001 - a stop checker is the caller's code; it must not stop the others
        logger.error(f"request {req.py_request_id} fails:", repr(error))
        req.record_round(len(entry.drafts), 0)
        return Emission(req, error=RequestFailure(kind=FailureKind.REQUEST, message=str(error)))
    if not req.in_context:
        req.record_round(len(entry.drafts), len(token_ids) - 1)
    req.decode_iterations += 1
    req.last_token = now
    if req.first_token is None:
        req.first_token = now
    return Emission(req, token_ids, logprobs, finish)


def _append(req: LlmRequest, candidates: Sequence[int]) -> tuple[tuple[int, ...], Finish | None]:
    for count, token_id in enumerate(candidates, start=1):
        if token_id == NO_TOKEN:
            raise FloatingPointError(
                f"the model gave no finite logits at position {req.num_tokens} of request {req.py_request_id}"
            )
        finish = req.append_output(token_id)
        if finish is not None:
            return tuple(candidates[:count]), finish
    return tuple(candidates), None
