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
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.host import host_values
from tensorrt_llm._torch.modules.kda.ops import (
    k3_kda_verify,
    kda_commit_pending,
    kda_commit_replay,
    kda_decode,
    kda_intermediate_verify,
    kda_mtp_decode,
    kda_promote,
)
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
from tensorrt_llm._torch.modules.kda.windows import (
    KdaLayerCache,
    load_windows,
    store_windows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaGeometry:
    """Sizes of one rank's KDA layers; num_spec is M, the drafts of a full round.

    `conv_dtype` is the extended windows' element type: bfloat16 holds bfloat16 projections exactly in half
    the bytes.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    num_spec: int
    conv_dtype: torch.dtype = torch.float32

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

    def commit(self, layers: KdaLayerCache, slots: Tensor, counts: Tensor) -> None:
        """Apply each slot's pending drafts to its states, and copy its committed windows to `conv`.

        `layers` is the view of all layers, every tensor [L, N, ...]. slots int32 [n]; counts int32 [n], in
        [0, M], counts[i] for slots[i]. Mutates `temporal` and `conv` of these slots; the caller zeroes the
        counts.
        """
        ...

    def promote(self, layers: KdaLayerCache, slots: Tensor, counts: Tensor) -> bool:
        """Bring the slots to their accepted drafts if the scheme does so at acceptance; operands as `commit`.

        True when it did: nothing stays pending and the caller zeroes the counts. The host does not wait for
        the device.
        """
        ...


def decode(rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor) -> Tensor:
    """One token for each slot (int32 [N]), without drafts: gated output [N, H, V].

    Starts from the pool's state and `cache.conv` and updates both; legal only when nothing is pending. Where
    kernels serve the layer they run from the projection rows; else torch does, from their parts.
    """
    if weights.kernel_taps is not None and weights.lower_bound is not None:
        return kda_decode(
            rows.proj,
            weights.f_b,
            *weights.kernel_taps,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            cache.conv,
            cache.temporal,
            slots,
            lower_bound=weights.lower_bound,
            scale=weights.scale,
            eps=weights.norm_eps,
        )
    history = cache.conv[slots].mT.to(weights.conv.dtype)
    sequence = torch.cat((history, rows.qkv.unsqueeze(1).to(history.dtype)), dim=1)
    tokens = prepare_tokens(sequence, rows.f.unsqueeze(1), rows.b.unsqueeze(1), weights)
    o, state = recurrent_kda(tokens, cache.temporal[slots])
    cache.temporal[slots] = state
    cache.conv[slots] = sequence[:, 1:].mT.to(cache.conv.dtype)
    return gated_norm(o[:, 0], rows.gate.view(len(slots), weights.num_heads, weights.head_dim), weights)


def _replay(state: Tensor, counts: Tensor, num_spec: int, after: Callable[[int, Tensor], Tensor]) -> Tensor:
    """States [.., n, H, V, K] after the first counts[i] of their drafts; `after(m, state)` applies draft m.

    What a draft beyond its request's count leads to, NaN included, is dropped. Numbers on a device are not
    read: there every draft runs.
    """
    known = host_values(counts)
    least, most = (0, num_spec) if known is None else (min(known, default=0), max(known, default=0))
    for m in range(most):
        new = after(m, state)
        state = new if m < least else torch.where((counts > m).view(-1, 1, 1, 1), new, state)
    return state


def _shared(rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor) -> dict[str, Any]:
    """What the verify ops take alike, by name."""
    assert weights.kernel_taps is not None
    w_q, w_k, w_v = weights.kernel_taps
    return dict(
        proj=rows.proj, w_fb=weights.f_b, w_q=w_q, w_k=w_k, w_v=w_v, a_log=weights.a_log,
        dt_bias=weights.dt_bias, onorm_w=weights.norm, cs_q=cache.kda_conv_q, cs_k=cache.kda_conv_k,
        cs_v=cache.kda_conv_v, ssm=cache.temporal, slots=slots,
        num_spec=cache.kda_conv_q.shape[-1] - weights.conv_width + 1, lower_bound=weights.lower_bound,
        scale=weights.scale, eps=weights.norm_eps,
    )  # fmt: skip


class _Scheme(ABC):
    """The round that all share; schemes differ in what they keep of a draft and how they return to it."""

    @abstractmethod
    def replay_pending(self, cache: KdaLayerCache, slots: Tensor, counts: Tensor, state: Tensor) -> Tensor:
        """The states [.., n, H, V, K] after the slots' first `counts` pending drafts (both int [n])."""
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

    @abstractmethod
    def run_op(self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor) -> Tensor:
        """The round through the scheme's op, for weights that kernels read."""
        ...

    def verify(
        self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor, T: int
    ) -> Tensor:
        if weights.kernel_taps is not None and weights.lower_bound is not None:
            return self.run_op(rows, weights, cache, slots)
        N, W = len(slots), weights.conv_width
        pending = cache.prev_num_accepted_tokens.index_select(0, slots)
        # The sum of the convolution is taken in fp32 whatever the windows' element type is.
        history = load_windows(cache, slots, pending, W - 1).float()
        sequence = torch.cat((history, rows.qkv.view(N, T, -1).float()), dim=1)
        store_windows(cache, slots, sequence[:, 1:])
        tokens = prepare_tokens(sequence, rows.f.view(N, T, -1), rows.b.view(N, T, -1), weights)
        state = self.replay_pending(cache, slots, pending, cache.temporal.index_select(0, slots))
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

    def commit(self, layers: KdaLayerCache, slots: Tensor, counts: Tensor) -> None:
        index = slots.long()
        state = self.replay_pending(layers, slots, counts, layers.temporal.index_select(-4, index))
        layers.temporal.index_copy_(-4, index, state)
        window = load_windows(layers, slots, counts, layers.conv.shape[-1]).mT
        layers.conv.index_copy_(-3, index, window.to(layers.conv.dtype))

    def promote(self, layers: KdaLayerCache, slots: Tensor, counts: Tensor) -> bool:
        return False


def _conv_buffers(geometry: KdaGeometry) -> tuple[SlotBuffer, ...]:
    columns = geometry.conv_width - 1 + geometry.num_spec
    return tuple(
        SlotBuffer(
            name=f"kda_conv_{part}",
            shape=(geometry.channels, columns),
            memory_order=(1, 0),
            row_alignment_bytes=geometry.conv_dtype.itemsize,
            reseeded=True,
            dtype=geometry.conv_dtype,
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

    def run_op(self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor) -> Tensor:
        return k3_kda_verify(
            **_shared(rows, weights, cache, slots),
            state_tok=cache.kda_state_tok,
            pending=cache.prev_num_accepted_tokens,
        )

    def commit(self, layers: KdaLayerCache, slots: Tensor, counts: Tensor) -> None:
        kda_commit_pending(
            layers.temporal,
            layers.conv,
            layers.kda_conv_q,
            layers.kda_conv_k,
            layers.kda_conv_v,
            layers.kda_state_tok,
            slots,
            counts,
        )

    def replay_pending(self, cache: KdaLayerCache, slots: Tensor, counts: Tensor, state: Tensor) -> Tensor:
        records = cache.kda_state_tok

        def after(m: int, state: Tensor) -> Tensor:
            record = records.select(-3, m).index_select(-4, slots)
            return apply_record(state, KdaRecord(*record.unbind(-3)))

        return _replay(state, counts, records.shape[-3], after)

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

    def run_op(self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor) -> Tensor:
        return kda_mtp_decode(
            **_shared(rows, weights, cache, slots),
            qkg_cache=cache.kda_qkg_cache,
            v_cache=cache.kda_v_cache,
            beta_cache=cache.kda_beta_cache,
            pending=cache.prev_num_accepted_tokens,
        )

    def commit(self, layers: KdaLayerCache, slots: Tensor, counts: Tensor) -> None:
        kda_commit_replay(
            layers.temporal,
            layers.conv,
            layers.kda_conv_q,
            layers.kda_conv_k,
            layers.kda_conv_v,
            layers.kda_qkg_cache,
            layers.kda_v_cache,
            layers.kda_beta_cache,
            slots,
            counts,
        )

    def replay_pending(self, cache: KdaLayerCache, slots: Tensor, counts: Tensor, state: Tensor) -> Tensor:
        heads = (state.shape[-3], state.shape[-1])

        def after(m: int, state: Tensor) -> Tensor:
            qkg = cache.kda_qkg_cache.select(-3, m).index_select(-3, slots).unflatten(-1, heads)
            v = cache.kda_v_cache.select(-2, m).index_select(-2, slots).unflatten(-1, heads)
            beta = cache.kda_beta_cache.select(-2, m).index_select(-2, slots)
            _, k, log_decay = qkg.unbind(-3)
            return apply_record(state, make_record(state, k, v, log_decay, beta))

        return _replay(state, counts, cache.kda_v_cache.shape[-2], after)

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

    def run_op(self, rows: KdaRows, weights: KdaWeights, cache: KdaLayerCache, slots: Tensor) -> Tensor:
        return kda_intermediate_verify(
            **_shared(rows, weights, cache, slots), intermediate=cache.intermediate_ssm
        )

    def replay_pending(self, cache: KdaLayerCache, slots: Tensor, counts: Tensor, state: Tensor) -> Tensor:
        states = cache.intermediate_ssm.flatten(-5, -4)
        rows = slots * cache.intermediate_ssm.shape[-4] + (counts - 1).clamp(min=0)
        return torch.where((counts > 0).view(-1, 1, 1, 1), states.index_select(-4, rows), state)

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

    def promote(self, layers: KdaLayerCache, slots: Tensor, counts: Tensor) -> bool:
        kda_promote(
            layers.temporal,
            layers.kda_conv_q,
            layers.kda_conv_k,
            layers.kda_conv_v,
            layers.intermediate_ssm,
            slots,
            counts,
        )
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
