# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm.llmapi.stop_strings import StopScanner, StopStringChecker, TextStream
from tensorrt_llm.sampling_params import SamplingParams
from tests.unittest.executor_api.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


def cut_at_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def scan(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = ""
    for piece in pieces:
        step = scanner.push(piece)
        text += step.text
        if step.stop is not None:
            return text, step.stop
    return text + scanner.flush(), None


@given(st.lists(st.text("ab", max_size=3), max_size=12), STOPS)
def test_answer_does_not_depend_on_the_pieces(pieces: list[str], stops: tuple[str, ...]) -> None:
    assert scan(pieces, stops) == cut_at_first_stop("".join(pieces), stops)


@given(st.lists(st.text("ab", max_size=3), max_size=12), STOPS)
def test_held_text_is_the_longest_tail_that_may_become_a_stop(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    scanner = StopScanner(stops)
    given_text = shown = ""
    for piece in pieces:
        step = scanner.push(piece, may_stop=False)
        given_text += piece
        shown += step.text
        held = given_text.removeprefix(shown)
        assert shown + held == given_text
        tails = [given_text[start:] for start in range(len(given_text))]
        open_tails = [tail for tail in tails for stop in stops if stop.startswith(tail) and stop != tail]
        assert held == max(open_tails, key=len, default="")


def test_a_match_that_was_passed_over_is_not_found_later() -> None:
    scanner = StopScanner(("ab", "abc"))
    assert scanner.push("ab", may_stop=False).text == ""
    step = scanner.push("x")
    assert (step.text, step.stop) == ("abx", None)


def test_a_match_may_begin_in_a_part_that_could_not_stop() -> None:
    scanner = StopScanner(("STOP",))
    assert scanner.push("xST", may_stop=False).text == "x"
    step = scanner.push("OPy")
    assert (step.text, step.stop) == ("", "STOP")


def test_included_stop_string_stays_and_what_follows_goes() -> None:
    scanner = StopScanner(("##",), include_stop=True)
    assert scanner.push("a#").text == "a"
    step = scanner.push("#b")
    assert (step.text, step.stop) == ("##", "##")


def feed(text: str, params: SamplingParams) -> tuple[list[str], list[str | None]]:
    stream = TextStream(TOKENIZER, params)
    steps = [stream.push(token_id) for token_id in TOKENIZER.encode(text)]
    return [step.text for step in steps], [step.stop for step in steps]


def test_stop_string_across_tokens_shows_nothing_of_itself() -> None:
    texts, stops = feed("a ST", SamplingParams(stop="STOP"))
    assert "".join(texts) == "a "
    texts, stops = feed("a STOP", SamplingParams(stop="STOP"))
    assert "".join(texts) == "a "
    assert stops == [None, None, None, "STOP"]


def test_stop_string_in_the_middle_of_a_token() -> None:
    texts, stops = feed("a def", SamplingParams(stop="e"))
    assert "".join(texts) == "a d"
    assert stops[-1] == "e"


def test_stop_string_of_characters_split_over_tokens() -> None:
    texts, stops = feed("x€€", SamplingParams(stop="€€"))
    assert "".join(texts) == "x"
    assert stops == [None] * 6 + ["€€"]


def test_flush_returns_held_text_and_a_broken_character() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop="STOP"))
    ids = TOKENIZER.encode("aST€")[:-1]
    shown = "".join(stream.push(token_id).text for token_id in ids)
    assert shown + stream.flush() == "aST\ufffd"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
def test_min_tokens_may_be_reached_but_not_undercut(min_tokens: int) -> None:
    checker = StopStringChecker(TOKENIZER, SamplingParams(stop="a", min_tokens=min_tokens))
    answers = [checker.push(token_id) for token_id in TOKENIZER.encode("aaaa")]
    assert answers.index("a") == max(0, min_tokens - 1)
