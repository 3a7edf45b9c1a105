# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint: byte-level `tokenizer.json` files, encoding and exact decoding."""

import codecs
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

TOKENIZER_FILE = "tokenizer.json"


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 bytes U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_SYMBOL = _byte_of_symbol()


class Tokenizer:
    """Text to token ids and back, for byte-level vocabularies.

    Every token stands for a fixed run of bytes, so text is decoded token by token without looking back.
    """

    def __init__(self, backend: HfTokenizer) -> None:
        """Raises ValueError if the vocabulary is not byte-level."""
        if "ByteLevel" not in _decoder_types(backend):
            raise ValueError(
                f"tokenizer: its decoder is {_decoder_types(backend) or 'absent'}, and only byte-level "
                "vocabularies (decoder ByteLevel) can be decoded token by token; convert the tokenizer.json"
            )
        # A tokenizer.json may carry the padding and truncation of its training run.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """Read a `tokenizer.json`, or the one in a checkpoint folder. Raises ValueError if there is none."""
        file = Path(path)
        file = file / TOKENIZER_FILE if file.is_dir() else file
        if not file.is_file():
            raise ValueError(
                f"tokenizer={str(path)!r}: no file {file}; give a folder with a {TOKENIZER_FILE}"
            )
        try:
            backend = HfTokenizer.from_str(file.read_text(encoding="utf-8"))
        # The library raises bare Exception for every malformed file.
        except Exception as error:  # noqa: BLE001
            raise ValueError(f"tokenizer={str(path)!r}: {file} is not a tokenizer: {error}") from error
        return cls(backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; names of special tokens inside the text become those tokens."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(token) for token in token_ids if token not in hidden).decode(
            "utf-8", errors="replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id beyond the vocabulary (models have more rows)."""
        symbols = self._backend.id_to_token(token_id)
        if symbols is None:
            return b""
        try:
            return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in symbols)
        except KeyError:
            # Names of added tokens are stored as plain text and may hold characters outside the alphabet.
            return symbols.encode()


class Detokenizer:
    """Turns one request's tokens into text as they come, holding back characters that are not complete."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest at the end of the text: U+FFFD for a character cut in half, else nothing."""
        return self._decoder.decode(b"", final=True)


def _decoder_types(backend: HfTokenizer) -> list[str]:
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return []
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts]
