# SPDX-License-Identifier: Apache-2.0
"""The sizes that are measured, and the fewest bytes that a call of an op moves at each."""

from dataclasses import dataclass

HEAD_DIM = 128
CONV_WIDTH = 4
HIDDEN = 7168
"""Kimi K3's hidden size."""
COLD_BYTES = 240_000_000
"""Distinct bytes between two visits to the same address: four times what an H200's L2 holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """N requests of T tokens, H heads, P drafts to replay per request or "mixed"."""

    n: int
    h: int = 6
    t: int = 8
    p: int | str = "mixed"

    @property
    def width(self) -> int:
        return self.h * HEAD_DIM

    @property
    def replayed(self) -> int:
        """Drafts replayed by all requests together."""
        return sum(pending_counts(self.n, self.p))


def pending_counts(requests: int, p: int | str) -> list[int]:
    """Drafts to replay per request."""
    return [(3 + i) % 8 for i in range(requests)] if p == "mixed" else [int(p)] * requests


def layer_copies(requests: int) -> int:
    """Copies of a layer in a graph of a verify or decode op: enough for 240 MB of distinct bytes."""
    return {1: 283, 2: 164, 3: 120, 4: 90}.get(requests, 48 if requests >= 8 else 64)


def copies_of(num_bytes: int) -> int:
    """Copies of a larger call: enough for 240 MB, four at least."""
    return min(283, max(4, -(-COLD_BYTES // num_bytes)))


def state_bytes(size: Size) -> int:
    """One request's states, read and written."""
    return 2 * size.width * HEAD_DIM * 4


def row_bytes(size: Size, tokens: int) -> int:
    """Projection rows read, outputs written."""
    return tokens * (4 * size.width + HEAD_DIM + size.h) * 2 + tokens * size.width * 2


def weight_bytes(size: Size) -> int:
    """f_b, taps, gate and norm of a layer."""
    D = size.width
    return D * HEAD_DIM * 2 + 3 * D * CONV_WIDTH * 4 + D * 4 + size.h * 4 + HEAD_DIM * 4


def _round_bytes(size: Size, conv_bytes: int) -> int:
    """What every verify round moves: states, rows, outputs, conv columns, the layer's weights once."""
    columns = CONV_WIDTH - 1 + size.t + CONV_WIDTH - 2
    conv = 3 * size.width * conv_bytes * columns
    return size.n * (state_bytes(size) + row_bytes(size, size.t) + conv) + weight_bytes(size)


def records_bytes(size: Size, conv_bytes: int = 4) -> int:
    """A verify round with records: vn, beta k and decay per draft."""
    drafts = size.n * (size.t - 1) + size.replayed
    return _round_bytes(size, conv_bytes) + 3 * size.width * 4 * drafts


def replay_bytes(size: Size) -> int:
    """A verify round with replay caches: q, k, log decay, v and beta per draft, all but q read again."""
    written, read = 4 * size.width + size.h, 3 * size.width + size.h
    return _round_bytes(size, 4) + 4 * (size.n * (size.t - 1) * written + size.replayed * read)


def intermediate_bytes(size: Size) -> int:
    """A verify round with the states after the drafts, and the promotion of one of them where P > 0."""
    one_way = state_bytes(size) // 2
    promoted = sum(count > 0 for count in pending_counts(size.n, size.p))
    windows = 3 * size.width * 4 * 2 * (CONV_WIDTH - 1)
    return _round_bytes(size, 4) + size.n * (size.t - 1) * one_way + promoted * (state_bytes(size) + windows)


def decode_bytes(size: Size) -> int:
    """One token per request: states, row, output, a bf16 window read and written, the weights."""
    window = 3 * size.width * (CONV_WIDTH - 1) * 2 * 2
    return size.n * (state_bytes(size) + row_bytes(size, 1) + window) + weight_bytes(size)


def projection_columns(size: Size) -> int:
    """Columns of a projection row, q | k | v | gate | f_a | b, padded to a multiple of 8."""
    return (4 * size.width + HEAD_DIM + size.h + 7) // 8 * 8


def projection_bytes(columns: int, hidden: int, tokens: int) -> int:
    """The input projection's bf16 weight and activations."""
    return 2 * (columns + tokens) * hidden


def prefill_bytes(size: Size) -> int:
    """Prompts from their start: rows, outputs, states and windows written, the weights."""
    window = 3 * size.width * (CONV_WIDTH - 1) * 2
    one = state_bytes(size) // 2 + row_bytes(size, size.t) + window
    return size.n * one + weight_bytes(size)


REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
STANDARD: dict[str, tuple[Size, ...]] = {
    "verify": (
        *(Size(n=n) for n in REQUESTS),
        *(Size(n=n, h=12) for n in (1, 8, 32, 64)),
        *(Size(n=n, p=p) for p in (0, 3, 7) for n in REQUESTS),
    ),
    "decode": (
        *(Size(n=n, t=1, p=0) for n in REQUESTS),
        *(Size(n=n, h=12, t=1, p=0) for n in (1, 8, 32, 64)),
    ),
    "attn": tuple(Size(n=1, p=p) for p in ("mixed", 0, 7)),
    "prefill": tuple(Size(n=1, t=t, p=0) for t in PROMPT_TOKENS),
}
"""What `--all` measures, by comparison."""
