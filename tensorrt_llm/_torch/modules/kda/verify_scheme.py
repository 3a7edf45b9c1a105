# SPDX-License-Identifier: Apache-2.0
"""The three ways to undo rejected drafts, as values with one interface.

A recurrent state cannot be rewound, so a verify round commits only the state after its first (golden) token
and keeps, per draft, what is needed to reach the accepted one later:

* RECORDS       the draft's record (vn, beta k, decay): replayed at the start of the next round;
* REPLAY        the draft's inputs (q, k, log decay, v, beta): recomputed at the start of the next round;
* INTERMEDIATE  the whole state after the draft: copied into place once acceptance is known.

`slot_buffers` says what a cache slot must hold for a scheme; whoever owns slots allocates, counts, moves,
seeds and frees those buffers without knowing the scheme. All three also keep the drafts' conv inputs in
extended windows of W-1+M columns: column c is the raw input at position c-(W-2) around the golden token.

Shapes: L layers, N slots, H heads, K = V head width, D = H*K, W conv width, M drafts, T tokens of a round, P
accepted drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops import k3_kda_verify
from tensorrt_llm._torch.modules.kda.recurrence import (
    KdaRecord,
    KdaTokens,
    KdaWeights,
    apply_record,
    gated_norm,
    make_record,
    prepare_tokens,
    read_out,
    recurrent_kda,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaGeometry:
    """Sizes of one rank's KDA layers; num_spec is M, the drafts of a full round."""

    num_heads: int
    head_dim: int
    conv_width: int
    num_spec: int

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBuffer:
    """One tensor [L, N, *shape] beside the state pool, zeroed at allocation.

    `memory_order` permutes the axes of `shape` from outermost to innermost in memory; `row_alignment_bytes`
    pads the innermost one. `reseeded` says what becomes of the slot when its committed window is loaded from
    the pool: True zeroes the buffer, False leaves it (nothing is pending then, so it is never read).
    `paid_by_quota`: the cache's quota pays for the buffer; others lie beside it.
    """

    name: str
    shape: tuple[int, ...]
    memory_order: tuple[int, ...]
    row_alignment_bytes: int = 4
    reseeded: bool = False
    paid_by_quota: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def _memory_shape(self) -> tuple[int, ...]:
        shape = [self.shape[axis] for axis in self.memory_order]
        step = max(1, self.row_alignment_bytes // self.dtype.itemsize)
        return (*shape[:-1], -(-shape[-1] // step) * step)

    @property
    def bytes_per_slot_layer(self) -> int:
        """Bytes one slot takes in one layer, padding included."""
        return prod(self._memory_shape) * self.dtype.itemsize

    def allocate(self, num_layers: int, num_slots: int, device: torch.device | str) -> Tensor:
        """A zeroed [L, N, *shape] view of memory laid out as the buffer asks."""
        memory = torch.zeros(num_layers, num_slots, *self._memory_shape, dtype=self.dtype, device=device)
        memory = memory[..., : self.shape[self.memory_order[-1]]]
        inverse = sorted(range(len(self.memory_order)), key=self.memory_order.__getitem__)
        return memory.permute(0, 1, *(2 + axis for axis in inverse))


class KdaLayerCache(Protocol):
    """One layer's view of the slots; upstream's attribute names. Tensors a scheme does not use are None.

    temporal [N, H, V, K] fp32 with any slot stride, conv [N, 3D, W-1] in the model's dtype (q | k | v, oldest
    first), prev_num_accepted_tokens int32 [N] (P, shared by all layers), kda_conv_q/k/v fp32 [N, D, W-1+M].
    """

    @property
    def conv(self) -> Tensor: ...
    @property
    def temporal(self) -> Tensor: ...
    @property
    def prev_num_accepted_tokens(self) -> Any: ...
    @property
    def kda_conv_q(self) -> Any: ...
    @property
    def kda_conv_k(self) -> Any: ...
    @property
    def kda_conv_v(self) -> Any: ...
    @property
    def kda_state_tok(self) -> Any: ...
    @property
    def kda_qkg_cache(self) -> Any: ...
    @property
    def kda_v_cache(self) -> Any: ...
    @property
    def kda_beta_cache(self) -> Any: ...
    @property
    def intermediate_ssm(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaRows:
    """Input rows of the core, N*T of them in a verify group.

    proj [rows, columns] is the fused projection's output as the kernels read it; qkv [rows, 3D] raw, gate
    [rows, D], f [rows, D] and b [rows, H] logits are its parts, f after f_b.
    """

    proj: Tensor
    qkv: Tensor
    gate: Tensor
    f: Tensor
    b: Tensor

    def span(self, rows: slice) -> "KdaRows":
        """The rows of one request or group, as views."""
        return KdaRows(
            proj=self.proj[rows], qkv=self.qkv[rows], gate=self.gate[rows], f=self.f[rows], b=self.b[rows]
        )


class VerifyScheme(Protocol):
    """One way to undo rejected drafts.

    Slot ids are distinct; -1 is not allowed here (kernels skip padding rows themselves).
    """

    @property
    def name(self) -> str: ...

    def slot_buffers(self, geometry: KdaGeometry) -> tuple[SlotBuffer, ...]:
        """Everything a slot holds for this scheme beside its state and conv window."""
        ...

    def verify(
        self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor, T: int
    ) -> Tensor:
        """Run one round of T <= M+1 tokens for each slot and return the gated output [rows, H, V] in the
        rows' dtype.

        Mutates, for these slots only: the state (after the golden token), conv columns 0..W-3+T and what the
        scheme keeps of drafts 0..T-2. Starts from the state and conv columns that `prev_num_accepted_tokens`
        names; leaves the count.
        """
        ...

    def commit(self, cache: KdaLayerCache, slot_ids: Sequence[int], counts: Sequence[int]) -> None:
        """Apply each slot's pending drafts to its state, and copy its committed window to `cache.conv`.

        counts[i] in [0, M] belongs to slot_ids[i]. Mutates `temporal` and `conv` of these slots; the caller
        zeroes the count.
        """
        ...

    def promote(self, cache: KdaLayerCache, slot_ids: Sequence[int], counts: Sequence[int]) -> bool:
        """Bring the slots to their accepted drafts if the scheme does so at acceptance.

        True when it did: nothing stays pending and the caller zeroes the count.
        """
        ...


def load_window(cache: KdaLayerCache, slot: int, pending: int, columns: int) -> Tensor:
    """Raw inputs [columns, 3D] before the next token: columns P..P+columns-1 of the extended windows."""
    parts = [
        c[slot, :, pending : pending + columns].T
        for c in (cache.kda_conv_q, cache.kda_conv_k, cache.kda_conv_v)
    ]
    return torch.cat(parts, dim=1)


def store_window(cache: KdaLayerCache, slot: int, window: Tensor) -> None:
    """Write raw inputs [columns, 3D] to columns 0.. of the slot's extended windows; later columns stay."""
    for target, part in zip(
        (cache.kda_conv_q, cache.kda_conv_k, cache.kda_conv_v), window.chunk(3, dim=1), strict=True
    ):
        target[slot, :, : window.shape[0]] = part.T


def sync_window(cache: KdaLayerCache, slot_ids: Sequence[int]) -> None:
    """Copy the committed window of `cache.conv` into columns 0..W-2 of the extended windows (after a prefill
    chunk)."""
    for slot in slot_ids:
        store_window(cache, slot, cache.conv[slot].T.to(torch.float32))


def decode(rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor) -> Tensor:
    """One token for each slot (int32 [N]), without drafts: gated output [N, H, V].

    Starts from the pool's state and `cache.conv` and updates both; legal only when nothing is pending.
    """
    history = cache.conv[slots].mT.to(weights.conv.dtype)
    sequence = torch.cat((history, rows.qkv.unsqueeze(1).to(history.dtype)), dim=1)
    tokens = prepare_tokens(sequence, rows.f.unsqueeze(1), rows.b.unsqueeze(1), weights)
    o, state = recurrent_kda(tokens, cache.temporal[slots])
    cache.temporal[slots] = state
    cache.conv[slots] = sequence[:, 1:].mT.to(cache.conv.dtype)
    return gated_norm(o[:, 0], rows.gate.view(len(slots), weights.num_heads, weights.head_dim), weights)


def _replayed(state: Tensor, records: Sequence[KdaRecord]) -> Tensor:
    for record in records:
        state = apply_record(state, record)
    return state


class _Scheme(ABC):
    """The round that all share; schemes differ in what they keep of a draft and how they return to it."""

    @abstractmethod
    def replay_pending(self, cache: KdaLayerCache, slot: int, state: Tensor, count: int) -> Tensor:
        """The state after the slot's first `count` pending drafts."""
        ...

    @abstractmethod
    def keep_draft(
        self,
        cache: KdaLayerCache,
        slots: Tensor,
        draft: int,
        tokens: KdaTokens,
        record: KdaRecord,
        state: Tensor,
    ) -> None:
        """Store draft `draft`, token draft+1 of the round, of these slots; its operands are [N, H, ...]."""
        ...

    def verify(
        self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor, T: int
    ) -> Tensor:
        slot_ids, W = slots.tolist(), weights.conv_width
        N = len(slot_ids)
        pending = cache.prev_num_accepted_tokens[slots].tolist()
        history = torch.stack(
            [load_window(cache, s, p, W - 1) for s, p in zip(slot_ids, pending, strict=True)]
        )
        sequence = torch.cat((history, rows.qkv.view(N, T, -1).to(history.dtype)), dim=1)
        for i, slot in enumerate(slot_ids):
            store_window(cache, slot, sequence[i, 1:])
        tokens = prepare_tokens(sequence, rows.f.view(N, T, -1), rows.b.view(N, T, -1), weights)
        state = torch.stack(
            [
                self.replay_pending(cache, s, cache.temporal[s], p)
                for s, p in zip(slot_ids, pending, strict=True)
            ]
        )
        outputs = []
        for t in range(T):
            token = KdaTokens(*(x[:, t] for x in tokens))
            record = make_record(state, token.k, token.v, token.log_decay, token.beta)
            state = apply_record(state, record)
            outputs.append(read_out(state, token.q))
            if t == 0:
                cache.temporal[slots] = state
            else:
                self.keep_draft(cache, slots, t - 1, token, record, state)
        o = torch.stack(outputs, dim=1).flatten(0, 1)
        return gated_norm(o, rows.gate.view(N * T, weights.num_heads, weights.head_dim), weights)

    def commit(self, cache: KdaLayerCache, slot_ids: Sequence[int], counts: Sequence[int]) -> None:
        columns = cache.conv.shape[-1]
        for slot, count in zip(slot_ids, counts, strict=True):
            if count:
                cache.temporal[slot] = self.replay_pending(cache, slot, cache.temporal[slot], count)
            cache.conv[slot] = load_window(cache, slot, count, columns).T.to(cache.conv.dtype)

    def promote(self, cache: KdaLayerCache, slot_ids: Sequence[int], counts: Sequence[int]) -> bool:
        return False


def _conv_buffers(geometry: KdaGeometry) -> tuple[SlotBuffer, ...]:
    columns = geometry.conv_width - 1 + geometry.num_spec
    return tuple(
        SlotBuffer(
            name=f"kda_conv_{part}", shape=(geometry.channels, columns), memory_order=(1, 0), reseeded=True
        )
        for part in "qkv"
    )


class RecordsScheme(_Scheme):
    """Keep the drafts' records in `kda_state_tok` fp32 [N, 3, M, H, K]: vn, beta k, decay."""

    name = "records"

    def slot_buffers(self, geometry: KdaGeometry) -> tuple[SlotBuffer, ...]:
        shape = (3, geometry.num_spec, geometry.num_heads, geometry.head_dim)
        return (
            *_conv_buffers(geometry),
            SlotBuffer(name="kda_state_tok", shape=shape, memory_order=(0, 1, 2, 3), paid_by_quota=True),
        )

    def verify(
        self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor, T: int
    ) -> Tensor:
        if weights.kernel_taps is None or weights.lower_bound is None:
            return super().verify(rows, weights, cache, slots, T)
        return k3_kda_verify(
            rows.proj,
            weights.f_b,
            *weights.kernel_taps,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            cache.kda_conv_q,
            cache.kda_conv_k,
            cache.kda_conv_v,
            cache.temporal,
            cache.kda_state_tok,
            slots,
            cache.prev_num_accepted_tokens,
            num_spec=cache.kda_state_tok.shape[2],
            lower_bound=weights.lower_bound,
            scale=weights.scale,
            eps=weights.norm_eps,
        )

    def replay_pending(self, cache: KdaLayerCache, slot: int, state: Tensor, count: int) -> Tensor:
        return _replayed(state, [KdaRecord(*cache.kda_state_tok[slot, :, m]) for m in range(count)])

    def keep_draft(
        self,
        cache: KdaLayerCache,
        slots: Tensor,
        draft: int,
        tokens: KdaTokens,
        record: KdaRecord,
        state: Tensor,
    ) -> None:
        cache.kda_state_tok[slots, :, draft] = torch.stack(record, dim=1)


class ReplayScheme(_Scheme):
    """Keep the drafts' inputs.

    `kda_qkg_cache` [N, M, 3, D] (q, k, log decay), `kda_v_cache` [N, M, D], `kda_beta_cache` [N, M, H].
    """

    name = "replay"

    def slot_buffers(self, geometry: KdaGeometry) -> tuple[SlotBuffer, ...]:
        M, D = geometry.num_spec, geometry.channels
        return (
            *_conv_buffers(geometry),
            SlotBuffer(name="kda_qkg_cache", shape=(M, 3, D), memory_order=(0, 1, 2), reseeded=True),
            SlotBuffer(name="kda_v_cache", shape=(M, D), memory_order=(0, 1), reseeded=True),
            SlotBuffer(
                name="kda_beta_cache",
                shape=(M, geometry.num_heads),
                memory_order=(0, 1),
                row_alignment_bytes=16,
                reseeded=True,
            ),
        )

    def replay_pending(self, cache: KdaLayerCache, slot: int, state: Tensor, count: int) -> Tensor:
        H, V, K = state.shape
        for m in range(count):
            _, k, log_decay = cache.kda_qkg_cache[slot, m].view(3, H, K)
            v, beta = cache.kda_v_cache[slot, m].view(H, V), cache.kda_beta_cache[slot, m]
            state = apply_record(state, make_record(state, k, v, log_decay, beta))
        return state

    def keep_draft(
        self,
        cache: KdaLayerCache,
        slots: Tensor,
        draft: int,
        tokens: KdaTokens,
        record: KdaRecord,
        state: Tensor,
    ) -> None:
        cache.kda_qkg_cache[slots, draft] = torch.stack(
            (tokens.q, tokens.k, tokens.log_decay), dim=1
        ).flatten(2)
        cache.kda_v_cache[slots, draft] = tokens.v.flatten(1)
        cache.kda_beta_cache[slots, draft] = tokens.beta


class IntermediateScheme(_Scheme):
    """Keep the states after the M drafts, `intermediate_ssm` fp32 [N, M, H, V, K]; one is copied back."""

    name = "intermediate"

    def slot_buffers(self, geometry: KdaGeometry) -> tuple[SlotBuffer, ...]:
        K = geometry.head_dim
        shape = (geometry.num_spec, geometry.num_heads, K, K)
        return (
            *_conv_buffers(geometry),
            SlotBuffer(name="intermediate_ssm", shape=shape, memory_order=(0, 1, 2, 3)),
        )

    def replay_pending(self, cache: KdaLayerCache, slot: int, state: Tensor, count: int) -> Tensor:
        return cache.intermediate_ssm[slot, count - 1] if count else state

    def keep_draft(
        self,
        cache: KdaLayerCache,
        slots: Tensor,
        draft: int,
        tokens: KdaTokens,
        record: KdaRecord,
        state: Tensor,
    ) -> None:
        cache.intermediate_ssm[slots, draft] = state

    def promote(self, cache: KdaLayerCache, slot_ids: Sequence[int], counts: Sequence[int]) -> bool:
        columns = cache.conv.shape[-1]
        for slot, count in zip(slot_ids, counts, strict=True):
            if count:
                cache.temporal[slot] = self.replay_pending(cache, slot, cache.temporal[slot], count)
                store_window(cache, slot, load_window(cache, slot, count, columns))
        return True


RECORDS = RecordsScheme()
REPLAY = ReplayScheme()
INTERMEDIATE = IntermediateScheme()
SCHEMES: dict[str, VerifyScheme] = {scheme.name: scheme for scheme in (RECORDS, REPLAY, INTERMEDIATE)}


def get_scheme(name: str) -> VerifyScheme:
    """The scheme of this name; ValueError names the choices."""
    if name not in SCHEMES:
        raise ValueError(f"kda_verify_scheme={name!r} is unknown: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def bytes_per_slot_layer(scheme: VerifyScheme, geometry: KdaGeometry) -> dict[str, int]:
    """Bytes of each buffer of the scheme for one slot in one layer, by buffer name."""
    return {buffer.name: buffer.bytes_per_slot_layer for buffer in scheme.slot_buffers(geometry)}
