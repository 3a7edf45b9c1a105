# SPDX-License-Identifier: Apache-2.0
"""Token ids as the reuse tree keeps them: one after the other, 20 bits each in text, 32 bits otherwise.

A key is a big-endian bit string, so that byte order is token order and the longest common prefix of two
keys is where their bits part. No vocabulary of text reaches 2**20 ids; ids that stand for something else,
such as the hash of an image's patch, may need all 32 bits.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import MisuseError

TokenIds = npt.NDArray[np.uint32]

TEXT_BITS = 20
ANY_BITS = 32
_BITS_PER_HEX_DIGIT = 4


class TokenPacker:
    """Makes keys of `bits` bits a token: TEXT_BITS if `text_only`, ANY_BITS otherwise."""

    __slots__ = ("bits",)

    def __init__(self, *, text_only: bool) -> None:
        self.bits = TEXT_BITS if text_only else ANY_BITS

    def parse(self, tokens: Sequence[int], *, text_only: bool = False) -> TokenIds:
        """Return `tokens` as uint32 [len(tokens)].

        `text_only`: all of them are promised to be text. MisuseError for anything that is no token id.
        """
        try:
            ids = np.frombuffer(array("I", tokens), dtype=np.uint32)
        except (OverflowError, TypeError) as error:
            raise MisuseError(f"token ids must be integers from 0 to 2**{ANY_BITS} - 1: {error}") from error
        limit = 1 << (TEXT_BITS if text_only else self.bits)
        if len(ids) and ids.max() >= limit:
            raise MisuseError(
                f"token id {ids.max()} is no text: with text_only=True ids go from 0 to 2**{TEXT_BITS} - 1; "
                "set text_only=False in the manager's configuration and in create_kv_cache"
            )
        return ids

    def key(self, ids: TokenIds) -> bytes:
        """Return the key of all tokens of `ids`."""
        return self._pack(ids[np.newaxis])[0] if len(ids) else b""

    def block_keys(self, ids: TokenIds, tokens_per_block: int) -> list[bytes]:
        """Return the keys of the full blocks at the start of `ids`."""
        num_blocks = len(ids) // tokens_per_block
        if not num_blocks:
            return []
        return self._pack(ids[: num_blocks * tokens_per_block].reshape(num_blocks, tokens_per_block))

    def _pack(self, rows: TokenIds) -> list[bytes]:
        """Return a key for each row of uint32 [num_rows, num_tokens]."""
        num_rows, num_tokens = rows.shape
        if self.bits == ANY_BITS:
            packed, row_bytes = rows.astype(">u4").tobytes(), 4 * num_tokens
            num_bytes = row_bytes
        else:
            # Two tokens are five bytes: the low five of a big-endian 64-bit word.
            even = np.pad(rows, ((0, 0), (0, 1))) if num_tokens % 2 else rows
            pairs = even[:, 0::2].astype(np.uint64) << np.uint64(TEXT_BITS) | even[:, 1::2]
            words = pairs.astype(">u8").view(np.uint8).reshape(num_rows, -1, 8)
            packed, row_bytes = words[:, :, 3:].tobytes(), 5 * words.shape[1]
            num_bytes = self._num_bytes(num_tokens)
        return [packed[row * row_bytes : row * row_bytes + num_bytes] for row in range(num_rows)]

    def _num_bytes(self, num_tokens: int) -> int:
        return (num_tokens * self.bits + 7) // 8

    def num_tokens(self, key: bytes) -> int:
        """Return how many tokens `key` has."""
        return len(key) * 8 // self.bits

    def unpack(self, key: bytes) -> list[int]:
        """Return the token ids behind `key`."""
        digits, step = key.hex(), self.bits // _BITS_PER_HEX_DIGIT
        return [int(digits[i * step : (i + 1) * step], 16) for i in range(self.num_tokens(key))]

    def head(self, key: bytes, num_tokens: int) -> bytes:
        """Return the key of the first `num_tokens` tokens of `key`."""
        taken = key[: self._num_bytes(num_tokens)]
        num_spare_bits = len(taken) * 8 - num_tokens * self.bits
        return (
            taken
            if num_spare_bits <= 0
            else taken[:-1] + bytes([taken[-1] >> num_spare_bits << num_spare_bits])
        )

    def num_common(self, left: bytes, right: bytes) -> int:
        """Return how many leading tokens two keys share."""
        size = min(len(left), len(right))
        difference = int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])
        num_equal_bits = size * 8 - difference.bit_length()
        return min(num_equal_bits // self.bits, size * 8 // self.bits)
