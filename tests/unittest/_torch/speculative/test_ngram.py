# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.speculative import ngram
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tensorrt_llm._torch.speculative.ngram import MAX_MATCH_LEN, Match, NGramDrafter, NGramPool


class Request:
    def __init__(self, request_id: int, tokens: list[int]) -> None:
        self.py_request_id = request_id
        self.tokens = tokens

    def get_tokens(self, beam: int = 0) -> list[int]:
        return self.tokens


def make_drafter(cost: float = 0.0, **changes: object) -> NGramDrafter:
    spec = SpeculationSpec(decoding_type="NGram", max_draft_len=4, **changes)  # type: ignore[arg-type]
    return NGramDrafter(spec, cost)


def find(tokens: list[int], max_ngram: int = 2, keep_newest: bool = False) -> Match | None:
    pool = NGramPool(max_ngram, keep_newest)
    pool.read(tokens, 0)
    return pool.find(tokens)


def brute_force(tokens: list[int], max_ngram: int, newest: bool) -> tuple[int, int] | None:
    """(start of the continuation, n-gram size): the longest n-gram that ends the text and occurred before."""
    for size in range(min(max_ngram, len(tokens)), 0, -1):
        end = tokens[-size:]
        starts = [i for i in range(size, len(tokens)) if tokens[i - size : i] == end]
        if starts:
            return (starts[-1] if newest else starts[0]), size
    return None


@pytest.mark.parametrize(
    ("tokens", "start", "length"),
    [
        ([1, 2, 3, 4, 5, 1, 2], 2, 2),
        ([1, 2, 3, 4, 5, 1, 2, 3], 3, 3),
        ([7, 7, 7, 7], 2, 2),
        ([1, 5, 2, 5], 2, 1),
    ],
)
def test_the_longest_ngram_at_the_oldest_place(tokens: list[int], start: int, length: int) -> None:
    assert find(tokens) == Match(tokens, start, length)


def test_no_match() -> None:
    assert find([1, 2, 3]) is None
    assert find([4]) is None


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.integers(1, 60), max_size=5),
)
def test_reading_piece_by_piece_finds_what_a_scan_finds(
    tokens: list[int], max_ngram: int, newest: bool, cuts: list[int]
) -> None:
    pool, text, num_read = NGramPool(max_ngram, newest), [], 0
    for cut in sorted({min(cut, len(tokens)) for cut in (*cuts, len(tokens))}):
        text += tokens[len(text) : cut]
        num_read = pool.read(text, num_read)
        assert num_read == len(text)
    match, expected = pool.find(text), brute_force(text, max_ngram, newest)
    assert (match is None) == (expected is None)
    if match is not None and expected is not None:
        start, size = expected
        assert match.start == start
        common = size
        while common < min(start, MAX_MATCH_LEN) and text[start - 1 - common] == text[-1 - common]:
            common += 1
        assert match.length == common


def test_reading_touches_each_new_token_once() -> None:
    class Counting(list[int]):
        """Counts slices, of which reading takes one per n-gram size and token."""

        slices = 0

        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            self.slices += isinstance(key, slice)
            return super().__getitem__(key)  # type: ignore[index]

    text = Counting(range(1000))
    pool = NGramPool(3, keep_newest=False)
    num_read = pool.read(text, 0)
    text.slices = 0
    text.append(5)
    pool.read(text, num_read)
    assert text.slices == 3


def test_drafts_end_with_the_source_and_with_the_limit() -> None:
    drafter = make_drafter(is_use_oldest=False, max_matching_ngram_size=1)
    assert drafter.propose(Request(0, [9, 1, 2, 9]), 4, 1) == [1, 2, 9]
    assert drafter.propose(Request(1, [8, 1, 2, 3, 8]), 2, 1) == [1, 2]
    assert drafter.propose(Request(2, [6, 1, 6]), 0, 1) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"is_use_oldest": True}, [1, 5, 2, 5]),
        ({"is_use_oldest": False}, [2, 5]),
        ({"is_use_oldest": False, "is_keep_all": False}, [1, 5, 2, 5]),
    ],
)
def test_which_of_several_places(changes: dict[str, bool], expected: list[int]) -> None:
    drafter = make_drafter(is_public_pool=False, **changes)
    assert drafter.propose(Request(0, [5, 1, 5, 2, 5]), 4, 1) == expected


def test_a_public_pool_shares_and_a_private_one_does_not() -> None:
    for public, expected in ((True, [2, 3, 4]), (False, [])):
        drafter = make_drafter(is_public_pool=public)
        drafter.propose(Request(0, [1, 2, 3, 4]), 4, 1)
        drafter.finish(0)
        assert drafter.propose(Request(1, [9, 1]), 4, 1) == expected


def test_a_public_pool_forgets_the_oldest_finished_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_FINISHED_NGRAMS", 16)
    drafter = make_drafter()
    for i, text in enumerate([[1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]]):
        drafter.propose(Request(i, text), 4, 1)
        drafter.finish(i)
    drafter.finish(77)
    assert drafter.propose(Request(5, [1]), 4, 1) == []
    assert drafter.propose(Request(6, [11]), 4, 1) == [12, 13, 14]


def test_forgetting_leaves_other_texts() -> None:
    pool = NGramPool(2, keep_newest=False)
    old, new = [1, 2, 3], [1, 2, 4]
    pool.read(old, 0)
    size = len(pool)
    pool.read(new, 0)
    pool.forget(old)
    assert pool.find([7, 1]) is None, "the oldest place was the forgotten one"
    pool.forget(new)
    assert len(pool) == 0
    assert size > 0


def test_drafts_are_the_same_every_time() -> None:
    text = [i * i % 13 for i in range(300)]

    def proposals() -> list[list[int]]:
        drafter, request = make_drafter(cost=0.3), Request(0, [])
        result = []
        for token in text:
            request.tokens.append(token)
            result.append(drafter.propose(request, 4, 1))
        return result

    assert proposals() == proposals()
    assert any(proposals())


def test_the_guard_stops_on_text_that_misleads_and_drafts_on_text_that_repeats() -> None:
    def num_drafts(text: list[int]) -> list[int]:
        drafter, request = make_drafter(cost=0.35, is_public_pool=False), Request(0, [])
        result = []
        for token in text:
            request.tokens.append(token)
            result.append(len(drafter.propose(request, 4, 1)))
        return result

    # The 1 occurs over and over, and never goes on as before.
    misleading = [t for n in range(3, 300) for t in (1, n)]
    assert sum(num_drafts(misleading)[-300:]) == 0
    repeating = list(range(10)) * 20
    assert sum(num_drafts(repeating)[-100:]) == 400
    # A change of habits is learnt without drafting.
    assert sum(num_drafts(misleading + repeating)[-50:]) == 200
