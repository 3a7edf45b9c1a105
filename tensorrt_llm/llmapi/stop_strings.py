# SPDX-License-Identifier: Apache-2.0
"""Stop strings in text that arrives in pieces."""

from dataclasses import dataclass

from tensorrt_llm.llmapi.tokenizer import Detokenizer, Tokenizer
from tensorrt_llm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStep:
    """What one token did to the text: the characters now certain, and the stop string it completed."""

    text: str
    stop: str | None


class _PrefixMatcher:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt), whatever its length."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = _shorter_matches(stop)

    def push(self, character: str) -> bool:
        """Add a character; True if it completes the stop string."""
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched]
        matched += self.stop[matched] == character
        is_complete = matched == len(self.stop)
        self.num_matched = self._shorter[matched] if is_complete else matched
        return is_complete


def _shorter_matches(stop: str) -> list[int]:
    """Entry m: the longest proper prefix of stop that its first m characters end with."""
    table = [0, 0]
    for character in stop[1:]:
        length = table[-1]
        while length and stop[length] != character:
            length = table[length]
        table.append(length + (stop[length] == character))
    return table


class StopScanner:
    """Finds the first of several stop strings in a text given piece by piece.

    The match that ends first wins, of those the longest, wherever the pieces are cut. A tail of the text that
    could still become a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._matchers = [_PrefixMatcher(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> TextStep:
        """Add `piece`; matches that end inside it are passed over unless `may_stop`."""
        if not self._matchers:
            return TextStep(text=piece, stop=None)
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.push(character)]
            if complete and may_stop:
                stop = max(complete, key=len)
                self._held = ""
                return TextStep(text=text[: end if self._include_stop else end - len(stop)], stop=stop)
        certain = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[certain:]
        return TextStep(text=text[:certain], stop=None)

    def flush(self) -> str:
        """The held tail, certain now that the text has ended."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """One choice's text, token by token: detokenised, and cut at the first stop string.

    Both ends of the engine build one from the same parameters: the loop to end the request at the very token
    that completes a stop string (`StopStringChecker`), the output to write the text. So they cannot disagree.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._scanner = StopScanner(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._num_unstoppable_tokens = max(0, params.min_tokens - 1)

    def push(self, token_id: int) -> TextStep:
        """Add a token; once a stop string is returned the text has ended."""
        may_stop = self._num_unstoppable_tokens == 0
        self._num_unstoppable_tokens -= not may_stop
        return self._scanner.push(self._detokenizer.push(token_id), may_stop=may_stop)

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        step = self._scanner.push(self._detokenizer.flush(), may_stop=False)
        return step.text + self._scanner.flush()


class StopStringChecker:
    """The loop's view of a text: which token completes a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = TextStream(tokenizer, params)

    def push(self, token_id: int) -> str | None:
        """The stop string that this generated token completes, if any."""
        return self._stream.push(token_id).stop
