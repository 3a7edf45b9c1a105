# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens.

Every row of logits gives one target token, whether the row belongs to a prompt's end, a golden token or a
draft. A row's token depends on the row, the request's tokens before it and (seed, position) alone: neither on
other rows nor on whether the tokens before it were drafted, so that speculation and batching change no text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tensorrt_llm._torch.pyexecutor.kv_cache.device_copy import to_device
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, SamplingSpec, TokenLogprob

NO_TOKEN = -1
"""Stands for the token of a row whose logits are not finite."""

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class LogitRows(NamedTuple):
    """Rows [start, start + 1 + len(drafts)) of the logits: what follows the request's tokens, then each
    draft.
    """

    request: LlmRequest
    start: int
    drafts: Sequence[int]

    @property
    def stop(self) -> int:
        return self.start + 1 + len(self.drafts)


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers that scatters them."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that chooses the token at an absolute position of a request."""
    return (mix64(mix64(seed + _GOLDEN_GAMMA) + position * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def draw_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """Tokens int64 [n] drawn from logits fp32 [n, vocab] by inverting the cumulative distribution at u.

    All operands but the logits are [n]: temperature fp32 > 0, top_k int64 >= 1, top_p, min_p and u fp64. The
    three filters each keep a prefix of the tokens in order of falling probability (ties: lower id first).
    """
    best = logits.amax(dim=-1, keepdim=True)
    ordered, order = ((logits - best) / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(ordered, dim=-1).double()
    reached = p.cumsum(dim=-1)
    kept = top_k.clamp(max=logits.shape[-1])
    wanted = top_p * reached.gather(1, kept[:, None] - 1)[:, 0]
    kept = torch.minimum(kept, (reached < wanted[:, None]).sum(dim=-1) + 1)
    kept = torch.minimum(kept, (p >= min_p[:, None] * p[:, :1]).sum(dim=-1).clamp(min=1))
    mass = reached.gather(1, kept[:, None] - 1)
    index = torch.searchsorted(reached, u[:, None] * mass, right=True).clamp(max=kept[:, None] - 1)
    return order.gather(1, index)[:, 0]


class TokenHistory:
    """How often each token occurs in one request, for penalties. Follows the request's tokens as they
    grow.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._num_seen = 0

    def follow(self, req: LlmRequest) -> None:
        """Count the tokens that came since the last call."""
        tokens = req.get_tokens()
        if self._num_seen == 0:
            self._in_prompt.index_fill_(0, self._ids(tokens[: req.prompt_len]), True)
            self._num_seen = req.prompt_len
        if self._num_seen < len(tokens):
            self.count(tokens[self._num_seen :], 1.0)
            self._num_seen = len(tokens)

    def count(self, tokens: Sequence[int], times: float) -> None:
        """Add (or with a negative `times` take away) occurrences in the output."""
        self._output_counts.index_add_(
            0, self._ids(tokens), self._output_counts.new_full((len(tokens),), times)
        )

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return to_device(tokens, self._in_prompt.device)

    def penalise(self, row: Tensor, sampling: SamplingSpec) -> None:
        """Apply the penalties to one row of logits, in place."""
        counts = self._output_counts
        if sampling.repetition_penalty != 1:
            seen = self._in_prompt | (counts > 0)
            penalty = sampling.repetition_penalty
            row.copy_(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
        row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


class Sampler:
    """Chooses tokens; keeps the token counts of requests that have penalties until `forget`."""

    def __init__(self) -> None:
        self._histories: dict[int, TokenHistory] = {}

    def forget(self, request_id: int) -> None:
        """Drop what is kept of a request; unknown ids are allowed."""
        self._histories.pop(request_id, None)

    def sample(self, logits: Tensor, rows: Sequence[LogitRows]) -> list[list[int]]:
        """The target tokens of each entry's rows. logits fp32 [n, vocab] are left as they are.

        A row with a logit that is NaN or infinity, or with no token left to choose, gives NO_TOKEN. Reads the
        tokens to the host once, when all are chosen: the one wait for the device in a step.
        """
        if any(entry.request.request.sampling.changes_logits for entry in rows):
            logits = self._adjusted(logits, rows)
        best, ids = logits.max(dim=-1)
        drawn = [entry for entry in rows if not entry.request.request.sampling.is_greedy]
        if drawn:
            _replace_by_draws(ids, logits, drawn)
        chosen = ids.where(best.isfinite(), NO_TOKEN).tolist()
        return [chosen[entry.start : entry.stop] for entry in rows]

    def _adjusted(self, logits: Tensor, rows: Sequence[LogitRows]) -> Tensor:
        logits = logits.clone()
        for entry in rows:
            if entry.request.request.sampling.changes_logits:
                self._adjust(logits[entry.start : entry.stop], entry)
        return logits

    def _adjust(self, logits: Tensor, entry: LogitRows) -> None:
        req, sampling = entry.request, entry.request.request.sampling
        if sampling.logit_bias:
            ids = to_device(list(sampling.logit_bias), logits.device)
            biases = to_device(list(sampling.logit_bias.values()), logits.device, logits.dtype)
            logits.index_add_(1, ids, biases.expand(len(logits), -1))
        if sampling.has_penalties:
            self._penalise(logits, entry)
        num_early = min(sampling.min_tokens - req.num_generated, logits.shape[0])
        if num_early > 0 and req.ending_ids:
            ids = to_device(list(req.ending_ids), logits.device)
            logits[:num_early].index_fill_(1, ids, float("-inf"))

    def _penalise(self, logits: Tensor, entry: LogitRows) -> None:
        req = entry.request
        history = self._histories.get(req.py_request_id)
        if history is None:
            history = self._histories[req.py_request_id] = TokenHistory(logits.shape[-1], logits.device)
        history.follow(req)
        # A row behind drafts matters only if they are accepted, so they count as output there.
        for row, draft in zip(logits, (*entry.drafts, None), strict=True):
            history.penalise(row, req.request.sampling)
            if draft is not None:
                history.count((draft,), 1.0)
        if entry.drafts:
            history.count(entry.drafts, -1.0)


def _replace_by_draws(ids: Tensor, logits: Tensor, drawn: Sequence[LogitRows]) -> None:
    """Overwrite the best tokens int64 [n] of the drawn entries' rows, in place."""
    rows, temperature, top_k, top_p, min_p, u = [], [], [], [], [], []
    for entry in drawn:
        req, sampling = entry.request, entry.request.request.sampling
        for offset in range(entry.stop - entry.start):
            rows.append(entry.start + offset)
            temperature.append(1.0 if sampling.temperature is None else sampling.temperature)
            top_k.append(sampling.top_k or logits.shape[-1])
            top_p.append(1.0 if sampling.top_p is None else sampling.top_p)
            min_p.append(sampling.min_p)
            u.append(uniform(req.seed, req.num_tokens + offset))
    device = logits.device
    index = to_device(rows, device)
    tokens = draw_tokens(
        logits[index],
        to_device(temperature, device, torch.float32),
        to_device(top_k, device),
        to_device(top_p, device, torch.float64),
        to_device(min_p, device, torch.float64),
        to_device(u, device, torch.float64),
    )
    ids.index_copy_(0, index, tokens)


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_best: int
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """For each row of logits [n, vocab]: its token's log-probability, then those of the `num_best` best
    tokens.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, to_device(token_ids, logits.device)[:, None])
    ranks = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    best, best_ids = logprobs.topk(min(num_best, logits.shape[-1]), dim=-1)
    # One read to the host; fp64 holds ids, ranks and fp32 values exactly.
    table = torch.cat([part.double() for part in (own, ranks, best, best_ids)], dim=-1).tolist()
    result = []
    for token, (logprob, rank, *others) in zip(token_ids, table, strict=True):
        values, ids = others[: len(others) // 2], others[len(others) // 2 :]
        places = enumerate(zip(ids, values, strict=True), start=1)
        result.append(
            (
                TokenLogprob(token_id=token, logprob=logprob, rank=int(rank)),
                *(TokenLogprob(token_id=int(i), logprob=value, rank=place) for place, (i, value) in places),
            )
        )
    return tuple(result)
