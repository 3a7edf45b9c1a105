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


class StopScanner:
    """Finds the first of several stop strings in a text given piece by piece.

    The match that ends first wins, of those the longest, wherever the pieces are cut. A tail of the text that
    could still become a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> TextStep:
        """Add `piece`; matches that end inside it are passed over unless `may_stop`."""
        text = self._held + piece
        match = self._find(text) if may_stop else None
        if match is not None:
            start, stop = match
            self._held = ""
            return TextStep(text=text[: start + len(stop) if self._include_stop else start], stop=stop)
        certain = len(text) - self._num_open_chars(text)
        self._held = text[certain:]
        return TextStep(text=text[:certain], stop=None)

    def flush(self) -> str:
        """The held tail, certain now that the text has ended."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) of the first match that ends beyond the held part, searched before."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _num_open_chars(self, text: str) -> int:
        """Length of the longest tail of `text` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


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
