# SPDX-License-Identifier: Apache-2.0
"""Drafts from the text itself: what followed the last time these tokens occurred (`NGramDecodingConfig`)."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tensorrt_llm._torch.speculative.guard import DraftGuard
from tensorrt_llm._torch.speculative.interface import DraftTarget, SpeculationSpec

MAX_MATCH_LEN = 32
"""Tokens over which a match's length is told; beyond this it makes no difference."""

MAX_FINISHED_NGRAMS = 1 << 19
"""N-grams of finished requests that a public pool keeps, at 100 to 130 bytes each; the oldest texts
go first.
"""


class Match(NamedTuple):
    """The end of a text occurred before: `text[start:]` is what followed there, `length` >= 1 tokens
    agree.
    """

    text: list[int]
    start: int
    length: int


class NGramPool:
    """For every n-gram of 1 to `max_ngram` tokens in the texts read, where it went on.

    Keeps one place per n-gram, the newest or the oldest. Reading a token costs `max_ngram` dictionary
    entries, whatever the texts' length; nothing is read twice. Texts are the callers' growing lists and not
    copied.
    """

    def __init__(self, max_ngram: int, keep_newest: bool) -> None:
        self._max_ngram = max_ngram
        self._keep_newest = keep_newest
        self._places: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def read(self, text: list[int], num_read: int) -> int:
        """Take in text[num_read:], where the tokens before were read already; return the new count."""
        places, put = self._places, self._places.setdefault
        for position in range(max(num_read, 1), len(text)):
            place = (text, position)
            for size in range(1, min(self._max_ngram, position) + 1):
                key = tuple(text[position - size : position])
                if self._keep_newest:
                    places[key] = place
                else:
                    put(key, place)
        return len(text)

    def forget(self, text: list[int]) -> None:
        """Drop every place in this text; n-grams whose kept place was here are lost until they occur
        again.
        """
        for position in range(1, len(text)):
            for size in range(1, min(self._max_ngram, position) + 1):
                key = tuple(text[position - size : position])
                place = self._places.get(key)
                if place is not None and place[0] is text:
                    del self._places[key]

    def find(self, text: list[int]) -> Match | None:
        """The continuation of the longest n-gram that ends `text`, with the length of the whole match
        there.
        """
        for size in range(min(self._max_ngram, len(text)), 0, -1):
            place = self._places.get(tuple(text[-size:]))
            if place is not None:
                source, start = place
                return Match(source, start, _match_length(text, source, start, size))
        return None

    def __len__(self) -> int:
        return len(self._places)


def _match_length(text: Sequence[int], source: Sequence[int], start: int, size: int) -> int:
    """Tokens before source[start] that equal the end of text, `size` known, up to MAX_MATCH_LEN."""
    limit = min(start, len(text), MAX_MATCH_LEN)
    while size < limit and source[start - 1 - size] == text[-1 - size]:
        size += 1
    return size


class _Reader:
    """One request's place in its pool, its guard, and its proposal that waits to be scored."""

    __slots__ = ("guard", "num_read", "pool", "proposal", "proposed_at", "proposed_match_len", "text")

    def __init__(self, text: list[int], pool: NGramPool, guard: DraftGuard) -> None:
        self.text = text
        self.pool = pool
        self.guard = guard
        self.num_read = 0
        self.proposal: list[int] = []
        self.proposed_at = 0
        self.proposed_match_len = 0


class NGramDrafter:
    """Looks up the longest n-gram at the text's end and drafts what followed it.

    `is_public_pool`: all requests share one pool, and finished ones stay in it up to MAX_FINISHED_NGRAMS;
    else each request knows its own text only. Of several places the oldest is used if `is_use_oldest` or if
    only one is kept (`is_keep_all` False: the first), else the newest. Drafts end where the source text
    ends.
    """

    def __init__(self, spec: SpeculationSpec, round_cost_per_token: float) -> None:
        self._max_ngram = spec.max_matching_ngram_size
        self._keep_newest = spec.is_keep_all and not spec.is_use_oldest
        self._round_cost = round_cost_per_token
        self._public = self._new_pool() if spec.is_public_pool else None
        self._readers: dict[int, _Reader] = {}
        self._finished: deque[list[int]] = deque()
        self._num_finished_tokens = 0

    def _new_pool(self) -> NGramPool:
        return NGramPool(self._max_ngram, self._keep_newest)

    def propose(self, request: DraftTarget, max_draft_len: int, num_generating: int) -> list[int]:
        reader = self._readers.get(request.py_request_id) or self._start(request)
        text = reader.text
        reader.num_read = reader.pool.read(text, reader.num_read)
        if reader.proposal:
            reader.guard.observe(reader.proposed_match_len, reader.proposal, text[reader.proposed_at :])
        match = reader.pool.find(text)
        reader.proposal = [] if match is None else match.text[match.start : match.start + max_draft_len]
        if match is None or not reader.proposal:
            return []
        reader.proposed_at, reader.proposed_match_len = len(text), match.length
        return reader.proposal[: reader.guard.choose(match.length, len(reader.proposal), num_generating)]

    def _start(self, request: DraftTarget) -> _Reader:
        pool = self._new_pool() if self._public is None else self._public
        reader = _Reader(request.get_tokens(), pool, DraftGuard(self._round_cost))
        self._readers[request.py_request_id] = reader
        return reader

    def finish(self, request_id: int) -> None:
        reader = self._readers.pop(request_id, None)
        if reader is None or self._public is None:
            return
        self._finished.append(reader.text)
        self._num_finished_tokens += len(reader.text)
        while self._num_finished_tokens * self._max_ngram > MAX_FINISHED_NGRAMS:
            oldest = self._finished.popleft()
            self._num_finished_tokens -= len(oldest)
            self._public.forget(oldest)
