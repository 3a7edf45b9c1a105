# SPDX-License-Identifier: Apache-2.0
"""What the verify kernels share, in CuTe DSL: one launch from projection rows to gated output.

Work split: a CTA of four warps owns V / split rows of one head of one request; the `split` CTAs of a head
form a cluster. Warp w prepares the key channels 32w .. 32w+31 (convolutions, gate, decays); then two or four
warps share 32 or 16 state rows, each with its part of the keys.

The T tokens are solved as one chunk. With D_t the product of the decays up to token t and S the state after
replay, U = S (D_t k_t) and O = S (D_t q_t) come from one pass of tensor cores over S (16 columns); then
    vn_t = v_t - U_t - sum_{j<t} A[t,j] vn_j,      A[t,j] = (D_t k_t) . (beta_j k_j / D_j)
    o_t  = O_t       + sum_{j<=t} B[t,j] vn_j,     B[t,j] = (D_t q_t) . (beta_j k_j / D_j)
and the committed state is d_0 S + vn_0 (beta_0 k_0): S is read once and written once.
Everything that reaches the state is 3xTF32 (error about 2^-21); q is rounded to TF32 once.

Kernels differ in what is kept of the drafts of a round and how the next one returns to the accepted of them:
the hooks of `VerifyBody`, over a tuple `history` of tensors in global memory, `s_history` in shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify import cute_primitives as ptx
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import (
    CONV_WIDTH,
    HEAD_DIM,
    MAX_TOKENS,
    VerifyConfig,
)

K = V = HEAD_DIM
CONV = CONV_WIDTH
L2_NORM_EPS = 1e-6
WARPS = 4
THREADS = 32 * WARPS
COEF = MAX_TOKENS * MAX_TOKENS


class VerifyBody:
    """Traces a round for one `VerifyConfig`; subclasses launch `kernel` and fill in the hooks.

    has_serial_form: `chunked` may be False.
    keeps_innovations: vn of the drafts takes the place of v in shared memory, for `store_rows`; else v stays.
    keeps_log_decay: decays are exp of a log decay that is kept, so that it gives the same bits again.
    commits_before_solving: the golden state is written as soon as its vn is known; else `store_states` does.
    waits_between_passes: `replay` has a barrier of the warps that share rows.
    loads_history_first: `prepare_history` finds there what `load_history` copies.
    """

    has_serial_form = False
    keeps_innovations = True
    keeps_log_decay = False
    commits_before_solving = True
    waits_between_passes = False
    loads_history_first = False

    def __init__(self, config: VerifyConfig) -> None:
        self.split = config.split
        self.external_gate = config.external_gate
        self.pdl = config.pdl
        self.late_trigger = config.late_trigger
        self.chunked = config.chunked
        self.bf16_conv = config.bf16_conv
        self.early_reads = config.early_reads
        self.conv_bytes = 2 if config.bf16_conv else 4
        self.rows = V // config.split  # V rows of a CTA
        self.pass_rows = min(self.rows, 64)
        self.passes = self.rows // self.pass_rows
        # A warp takes `tiles` tiles of 16 rows and 1 / k_warps of the keys: many rows to a lane, since every
        # key's operands are read from shared memory once per lane whatever the rows.
        self.k_warps = 2 if config.split <= 2 and config.chunked else 4
        self.tiles = self.pass_rows * self.k_warps // 64
        if not config.chunked:
            self.k_warps, self.tiles = 1, 1
        self.key_blocks = 8 // self.k_warps  # blocks of 16 keys of a warp
        self.v_pitch = self.rows + 4  # floats between tokens: no bank conflicts between a quad's columns
        self.o_pitch = self.rows + 8  # bf16
        # Latency matters where CTAs are few: fetch what the pending count will select before it is known.
        self.speculative = config.split >= 4
        if config.early_reads and (self.loads_history_first or not config.pdl):
            raise ValueError(f"{config.name}: early reads are of PDL launches without inputs to replay")
        if not config.chunked and (config.split > 2 or not self.has_serial_form):
            raise ValueError(f"{config.name}: the token by token form is of k3_kda_verify with split 1 or 2")

    def launch(self, arguments, ssm, slots, stream):
        """The kernel over every request and head."""
        self.kernel(*arguments).launch(
            grid=(self.split, ssm.shape[1], slots.shape[0]),
            block=(THREADS, 1, 1),
            cluster=(self.split, 1, 1) if self.split > 1 else None,
            stream=stream,
            use_pdl=self.pdl,
            # 168 registers, three CTAs to an SM: all tiles of 64 requests are resident at once.
            min_blocks_per_mp=2 if self.external_gate else 3,
            preferred_smem_carveout=100,
        )

    def pending_drafts(self, history, pending, slot):
        """How many drafts come before the golden token, clamped to what there is room for."""
        raise NotImplementedError

    def allocate_history(self, smem):
        """Shared memory for drafts, a tuple."""
        raise NotImplementedError

    def overlay_history(self, s_history, smem, s_kinv, s_taps):
        """`s_history` with what may lie over keys over D_t and taps, which are dead once coefficients are."""
        return s_history

    def prefetch_history(self, history, slot, head, draft, channel):
        """One line of 128 bytes from `channel` on of `draft`, which may be beyond M, into L2."""

    def load_history(self, history, s_history, slot, head, rank, pending, lane, warp):
        """Start to load the pending drafts alone: later ones may hold anything, NaN included.

        By asynchronous copies, or into registers, which are returned.
        """
        return ()

    def prepare_history(self, s_history, loaded, pending, d, lane, warp):
        """Work of this lane's key channel and this warp's 32 channels, before the first barrier."""

    def share_keys(
        self, history, s_history, slot, head, kept, s_beta, s_part, s_q2, scale, num_tokens, lane, warp
    ):
        """Work of this lane's key channel after the first barrier and before the second one."""

    def replay(self, s, s_history, loaded, count, row, first_chunk, lane, warp, step):
        """The state's registers after the first `count` drafts, oldest first, serial and in fma."""

    def store_states(
        self, s, history, s_history, s_v, state, slot, head, num_tokens, cta_row, row, first_chunk
    ):
        """What is kept of the states after each token, once vn of every token is known."""

    def store_keys(self, history, slot, head, key, kept, s_beta, s_norm, num_tokens):
        """What is kept of the drafts of a key channel, once nobody reads the history any more.

        kept: raw q, raw k, decays and log decays of the tokens.
        """

    def store_rows(self, history, s_v, slot, head, rank, tid, num_tokens):
        """What is kept of the drafts of this CTA's rows."""

    def apply_record(self, s, vn, keys, beta_k_row, decay_row, first_chunk):
        """S = fma(decay, S, vn * bk), the product rounded first; the rows of `keys` are of 32 chunks."""
        for block in range(self.key_blocks):
            bk = keys[None, beta_k_row * 32 + first_chunk + block * 4].load()
            decay = keys[None, decay_row * 32 + first_chunk + block * 4].load()
            for i in range(2 * self.tiles):
                for e in range(4):
                    at = self._at(i // 2, block, i % 2, e)
                    s[at] = ptx.fma(decay[e], s[at], ptx.mul(vn[i], bk[e]))

    @cute.jit
    def _load_state(self, source, target, first_row, lane, warp):
        """cp.async of this warp's rows and keys: 16-byte chunk j of row r goes to j ^ 4 (r & 1)."""
        chunks = 32 // self.k_warps
        key_chunk = (warp % self.k_warps) * chunks + lane % chunks
        tile_row = (warp // self.k_warps) * (16 * self.tiles)
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
        )
        for step in cutlass.range_constexpr(16 * self.tiles // self.k_warps):
            row = tile_row + step * self.k_warps + lane // chunks
            cute.copy(
                atom,
                source[None, (first_row + row) * 32 + key_chunk],
                target[None, row * 32 + (key_chunk ^ ((row & 1) * 4))],
            )

    @cute.jit
    def _prefetch(self, cs_q, cs_k, cs_v, history, slot, head, tid):
        """Every conv column and draft of the head into L2, one line of 128 bytes per thread and array."""
        line = tid % 4 * 32
        at = tid // 4
        columns = cs_q.shape[2]
        if at < columns:
            ptx.prefetch_line(cs_q[slot, None, at].iterator + (head * K + line))
            ptx.prefetch_line(cs_k[slot, None, at].iterator + (head * K + line))
            ptx.prefetch_line(cs_v[slot, None, at].iterator + (head * K + line))
        self.prefetch_history(history, slot, head, at, line)

    @cute.jit
    def _fetch_rows(self, source, raw, token_pitch, last_token, stride, lane, chunks):
        """cp.async of this warp's channels, `chunks` of 16 bytes a token; tokens past the last repeat it."""
        if lane < MAX_TOKENS * chunks:
            token = lane // chunks
            offset = cutlass.min(token, last_token) * stride + lane % chunks * 8
            ptx.copy_16_bytes(raw + (token * token_pitch + lane % chunks * 8), source + offset)

    @cute.jit
    def _read_pools(self, caches, ssm, history, pending, s_state, s_history, slot, head, rank, tid):
        """For `early_reads`: the count and the windows; state and drafts start to come, as one group."""
        cs_q, cs_k, cs_v = caches
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        channel = head * K + tid
        count = Int32(0)
        window_q, window_k, window_v = [[Float32(0.0) for _ in range(CONV - 1)] for _ in range(3)]
        if slot >= 0:
            count = self.pending_drafts(history, pending, slot)
            if cutlass.const_expr(self.speculative):
                self._prefetch(cs_q, cs_k, cs_v, history, slot, head, tid)
            state = cute.make_tensor(ssm[slot, head, None, None].iterator, cute.make_layout((4, V * 32)))
            self._load_state(state, s_state, rank * self.rows, lane, warp)
            self.load_history(history, s_history, slot, head, rank, count, lane, warp)
            window_q = self._load_window(cs_q, slot, channel, count)
            window_k = self._load_window(cs_k, slot, channel, count)
            if tid < self.rows:
                window_v = self._load_window(cs_v, slot, head * V + rank * self.rows + tid, count)
        cute.arch.cp_async_commit_group()
        return count, window_q, window_k, window_v

    def _raw_inputs(self, raw, token_pitch, lane):
        """This lane's channel of every token, as floats."""
        column = cute.make_tensor(raw + lane, cute.make_layout(MAX_TOKENS, stride=token_pitch))
        return [column[t].to(Float32) for t in range(MAX_TOKENS)]

    def _load_window(self, cache, slot, channel, count):
        """The three raw inputs before the golden token."""
        load = ptx.load_bf16 if self.bf16_conv else ptx.load_float
        step = Int64(cache.stride[2]) * self.conv_bytes
        first = Int64(cache[slot, channel, None].iterator.toint()) + Int64(count) * step
        return [load(first), load(first + step), load(first + step + step)]

    @cute.jit
    def _store_conv(self, cache, slot, channel, window, inputs, num_tokens):
        """Columns 0 and 1 are the two inputs before the golden token, column 2 + t is token t.

        Addresses advance by a column: cheaper than one computed from indices for each of ten columns.
        """
        store = ptx.store_bf16 if cutlass.const_expr(self.bf16_conv) else ptx.store_float
        step = Int64(cache.stride[2]) * self.conv_bytes
        address = Int64(cache[slot, channel, None].iterator.toint())
        store(address, window[1])
        address = address + step
        store(address, window[2])
        for t in cutlass.range_constexpr(MAX_TOKENS):
            address = address + step
            if t < num_tokens:
                store(address, inputs[t])

    def _load_gate_weights(self, w_fb, first_row, col):
        """This warp's rows of w_fb as mma fragments: tiles of 16, four blocks of 32 keys, two row halves."""
        return [
            ptx.load_words(w_fb.iterator + ((first_row + tile * 16 + half * 8) * K + block * 32 + col * 8))
            for tile in range(2)
            for block in range(4)
            for half in range(2)
        ]

    def _send_to_peers(self, value, place, mbar):
        """st.async of one float to the same place of every CTA of the cluster, this one included."""
        send = cute.make_copy_atom(cpasync.CopyDsmemStoreOp(), Float32, num_bits_per_copy=32)
        word = cute.make_rmem_tensor((1,), Float32)
        word[0] = value
        for peer in range(self.split):
            there = cute.make_tensor(cute.arch.map_dsmem_ptr(place, peer), cute.make_layout((1,)))
            cute.copy(send, word, there, mbar_ptr=cute.arch.map_dsmem_ptr(mbar, peer))

    def _conv_silu(self, taps, window, inputs):
        w = taps.load()
        history = [*window, *inputs]
        activated = []
        for t in range(MAX_TOKENS):
            y = w[0] * history[t] + w[1] * history[t + 1] + w[2] * history[t + 2] + w[3] * history[t + 3]
            activated.append(y * ptx.sigmoid(y))
        return activated

    @cute.jit
    def _fetch_weights(self, w_q, w_k, w_v, onorm_w, s_taps, s_onorm, head, rank, tid):
        """cp.async of the taps this thread uses (q 0 .., k 128 .., v 256 ..) and of the norm's weights."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
        taps = cute.make_layout((4, w_q.shape[0]))
        taps_q, taps_k, taps_v = [cute.make_tensor(w.iterator, taps) for w in (w_q, w_k, w_v)]
        channel = head * K + tid
        cute.copy(atom, taps_q[None, channel], s_taps[None, tid])
        cute.copy(atom, taps_k[None, channel], s_taps[None, K + tid])
        if tid < self.rows:
            cute.copy(atom, taps_v[None, head * V + rank * self.rows + tid], s_taps[None, 2 * K + tid])
        if tid < self.rows // 4:
            norm = cute.make_tensor(onorm_w.iterator, cute.make_layout((4, V // 4)))
            cute.copy(atom, norm[None, rank * (self.rows // 4) + tid], s_onorm[None, tid])
        cute.arch.cp_async_commit_group()

    def _chunk(self, chunk_of, block, key_group):
        """Swizzled chunk of this lane's row for a block of 16 of the warp's keys."""
        return chunk_of[block % 2] + 4 * (block - block % 2) + key_group * (4 * self.key_blocks)

    @cute.jit
    def _couple(self, s_k, s_q, s_kinv, s_part, warp, quad, col):
        """Rows (k | q) of token t against columns j over this warp's keys, into s_part [warp][row][j]."""
        # Three sums: a chain of one would wait for each product in turn.
        low_high, high_low, high_high = ptx.zeros(), ptx.zeros(), ptx.zeros()
        for block in cutlass.range_constexpr(2):
            chunk = quad * 32 + (((warp * 2 + block) * 4 + col) ^ ((quad & 1) * 4))
            fk, fq, fi = s_k[None, chunk].load(), s_q[None, chunk].load(), s_kinv[None, chunk].load()
            if cutlass.const_expr(not self.chunked):
                fk = fi  # only |k|^2, the diagonal, is wanted
            for half in cutlass.range_constexpr(2):
                a = [
                    ptx.split_tf32(x)
                    for x in (fk[2 * half], fq[2 * half], fk[2 * half + 1], fq[2 * half + 1])
                ]
                b = [ptx.split_tf32(fi[2 * half]), ptx.split_tf32(fi[2 * half + 1])]
                a_hi, a_lo = [x[0] for x in a], [x[1] for x in a]
                b_hi, b_lo = [x[0] for x in b], [x[1] for x in b]
                low_high = ptx.mma_tf32(low_high, a_lo, b_hi)
                high_low = ptx.mma_tf32(high_low, a_hi, b_lo)
                high_high = ptx.mma_tf32(high_high, a_hi, b_hi)
        acc = [high_high[i] + (low_high[i] + high_low[i]) for i in range(4)]
        for half in cutlass.range_constexpr(2):
            at = (warp * 16 + half * 8 + quad) * MAX_TOKENS + 2 * col
            s_part[at] = acc[2 * half]
            s_part[at + 1] = acc[2 * half + 1]

    @cute.jit
    def _coefficients(self, s_part, s_q2, s_beta, s_coef, s_norm, scale, index):
        """Thread (row, j): A[t, j] for row t, B[t, j] for row 8 + t, and the norms."""
        j, t = index % 8, (index // 8) % 8
        raw, k2_t, k2_j, q2_t = [Float32(0.0) for _ in range(4)]
        for w in cutlass.range_constexpr(WARPS):
            raw = raw + s_part[w * 2 * COEF + index]
            k2_t = k2_t + s_part[w * 2 * COEF + t * 9]
            k2_j = k2_j + s_part[w * 2 * COEF + j * 9]
        for w in cutlass.range_constexpr(4):
            q2_t = q2_t + s_q2[w * MAX_TOKENS + t]
        norm_k = ptx.rsqrt(k2_t + Float32(L2_NORM_EPS))
        norm_q = ptx.rsqrt(q2_t + Float32(L2_NORM_EPS)) * scale
        norm_t = ptx.select(index < COEF, norm_k, norm_q)
        s_coef[(index // COEF) * COEF + j * 8 + t] = (
            raw * norm_t * (s_beta[j] * ptx.rsqrt(k2_j + Float32(L2_NORM_EPS)))
        )
        if j == 0:
            s_norm[index // 8] = norm_t

    def _decay(self, exponent):
        """What is stored of a decay: itself, from its log to base 2, or its natural log as it comes."""
        if self.keeps_log_decay:
            return exponent
        return cute.math.exp2(exponent, fastmath=True)

    def norms_by_lane(self, s_part, s_q2, scale, lane):
        """1 / |k| of token t in lane t, scale / |q| in lane 8 + t, as `_coefficients` has them."""
        k2, q2 = Float32(0.0), Float32(0.0)
        for w in range(WARPS):
            k2 = k2 + s_part[w * 2 * COEF + lane % MAX_TOKENS * 9]
            q2 = q2 + s_q2[w * MAX_TOKENS + lane % MAX_TOKENS]
        norm_k = ptx.rsqrt(k2 + Float32(L2_NORM_EPS))
        norm_q = ptx.rsqrt(q2 + Float32(L2_NORM_EPS)) * scale
        return ptx.select(lane < MAX_TOKENS, norm_k, norm_q)

    def _golden_write(self, s_part, beta, key_value):
        """beta_0 k_0 of a channel, from its unnormalised key."""
        square = Float32(0.0)
        for w in range(WARPS):
            square = square + s_part[w * 2 * COEF]
        return beta * ptx.rsqrt(square + Float32(L2_NORM_EPS)) * key_value

    def _at(self, tile, block, half, e):
        """Register of the state: tile of 16 rows, block of 16 keys, row half, key of the lane's four."""
        return ((tile * self.key_blocks + block) * 2 + half) * 4 + e

    def _project(self, s, s_k, s_q, chunk_of, key_group):
        """Partial U (3xTF32) and O of this warp's keys: per tile four sums of each, in fragment order."""
        chains = 2 if self.tiles == 1 else 1  # enough independent products without more registers
        high = [ptx.zeros() for _ in range(self.tiles)]
        low = [[ptx.zeros(), ptx.zeros()] for _ in range(self.tiles)]
        query = [ptx.zeros() for _ in range(self.tiles)]
        for block in range(self.key_blocks):
            chunk = self._chunk(chunk_of, block, key_group)
            fk, fq = s_k[None, chunk].load(), s_q[None, chunk].load()
            for half in range(2):
                b = [ptx.split_tf32(fk[2 * half]), ptx.split_tf32(fk[2 * half + 1])]
                b_hi, b_lo = [x[0] for x in b], [x[1] for x in b]
                q_hi = [fq[2 * half].bitcast(Int32), fq[2 * half + 1].bitcast(Int32)]
                for tile in range(self.tiles):
                    at = [self._at(tile, block, i % 2, 2 * half + i // 2) for i in range(4)]
                    a = [ptx.split_tf32(s[i]) for i in at]
                    a_hi, a_lo = [x[0] for x in a], [x[1] for x in a]
                    low[tile][0] = ptx.mma_tf32(low[tile][0], a_hi, b_lo)
                    query[tile] = ptx.mma_tf32(query[tile], a_hi, q_hi)
                    high[tile] = ptx.mma_tf32(high[tile], a_hi, b_hi)
                    low[tile][chains - 1] = ptx.mma_tf32(low[tile][chains - 1], a_lo, b_hi)
                    query[tile] = ptx.mma_tf32(query[tile], a_lo, q_hi)
        return [
            (
                [
                    high[m][i] + (low[m][0][i] + low[m][1][i] if chains == 2 else low[m][0][i])
                    for i in range(4)
                ],
                query[m],
            )
            for m in range(self.tiles)
        ]

    @cute.jit
    def _share(self, sums, half_buffer, first, warp, key_group, lane, quad, col):
        """Give partial sums to the warps with the other keys: column 0 of every row, and whole tiles.

        Of two warps each sends the tile that the other solves; of four, every warp sends all.
        """
        if cutlass.const_expr(self.commits_before_solving) and col == 0:
            for tile in cutlass.range_constexpr(self.tiles):
                column = cute.make_tensor(first + (warp * 32 + tile * 16 + quad), cute.make_layout(16))
                column[0] = sums[tile][0][0]
                column[8] = sums[tile][0][2]
        if cutlass.const_expr(self.k_warps == 2):
            other_is_0 = key_group == 1
            for z in cutlass.range_constexpr(2):
                sent = [ptx.select(other_is_0, sums[0][z][i], sums[1][z][i]) for i in range(4)]
                ptx.store_vector(half_buffer, warp * 64 + z * 32 + lane, sent)
        else:
            for tile in cutlass.range_constexpr(self.tiles):
                for z in cutlass.range_constexpr(2):
                    at = ((warp * self.tiles + tile) * 2 + z) * 32 + lane
                    ptx.store_vector(half_buffer, at, sums[tile][z])

    @cute.jit
    def _store_golden(self, s, state, operands, first, warp, cta_row, row, first_chunk):
        """The golden token's state, the only one that is committed: d_0 S + vn_0 (beta_0 k_0)."""
        v_first, s_norm, s_d0, s_bk0 = operands
        leader = warp - warp % self.k_warps
        norm = s_norm[0]
        vn = []
        for i in cutlass.range_constexpr(2 * self.tiles):
            column = cute.make_tensor(
                first + (leader * 32 + 8 * i + row % 8), cute.make_layout(self.k_warps, stride=32)
            )
            total = column[0]
            for w in cutlass.range_constexpr(1, self.k_warps):
                total = total + column[w]
            vn.append(v_first[i] - norm * total)
        for block in cutlass.range_constexpr(self.key_blocks):
            decay, bk = (
                s_d0[None, first_chunk + block * 4].load(),
                s_bk0[None, first_chunk + block * 4].load(),
            )
            for i in cutlass.range_constexpr(2 * self.tiles):
                golden = [decay[e] * s[self._at(i // 2, block, i % 2, e)] + vn[i] * bk[e] for e in range(4)]
                ptx.store_vector(state, (cta_row + row + 8 * i) * 32 + first_chunk + block * 4, golden)

    @cute.jit
    def _solve(self, sums, half_buffer, operands, warp, key_group, lane, row, col):
        """One tile's forward substitution: vn into s_v, o into s_o."""
        s_v, s_o, s_coef, s_norm = operands
        if cutlass.const_expr(self.k_warps == 2):
            mine_is_0 = key_group == 0
            pu, po = (
                half_buffer[None, (warp ^ 1) * 64 + lane].load(),
                half_buffer[None, (warp ^ 1) * 64 + 32 + lane].load(),
            )
            u = [ptx.select(mine_is_0, sums[0][0][i], sums[1][0][i]) + pu[i] for i in range(4)]
            o = [ptx.select(mine_is_0, sums[0][1][i], sums[1][1][i]) + po[i] for i in range(4)]
        else:
            u, o = ptx.zeros(), ptx.zeros()
            for w in cutlass.range_constexpr(self.k_warps):
                at = ((warp - key_group + w) * self.tiles + key_group) * 64 + lane
                pu, po = half_buffer[None, at].load(), half_buffer[None, at + 32].load()
                u = [u[i] + pu[i] for i in range(4)]
                o = [o[i] + po[i] for i in range(4)]
        tile_first = row + key_group * 16
        v_at = [(2 * col + i % 2) * self.v_pitch + tile_first + 8 * (i // 2) for i in range(4)]
        norms = [s_norm[2 * col], s_norm[2 * col + 1], s_norm[8 + 2 * col], s_norm[9 + 2 * col]]
        u = [s_v[v_at[i]] - norms[i % 2] * u[i] for i in range(4)]
        o = [norms[2 + i % 2] * o[i] for i in range(4)]
        a = [s_coef[n * 8 + 2 * col + i] for n in range(MAX_TOKENS) for i in range(2)]
        b = [s_coef[COEF + n * 8 + 2 * col + i] for n in range(MAX_TOKENS) for i in range(2)]
        # Token n sits in lane n / 2 of the quad, column n % 2. Selects, not zero coefficients: a non-finite
        # draft must not reach earlier tokens.
        for n in cutlass.range_constexpr(MAX_TOKENS):
            source = (lane & 28) + n // 2
            vn = [cute.arch.shuffle_sync(u[2 * h + n % 2], offset=source) for h in range(2)]
            later, from_here = col > n // 2, col >= n // 2
            for i in cutlass.range_constexpr(4):
                after = from_here if n % 2 == 0 and i % 2 == 1 else later
                since = from_here if n % 2 == 0 or i % 2 == 1 else later
                u[i] = ptx.select(after, u[i] - a[2 * n + i % 2] * vn[i // 2], u[i])
                o[i] = ptx.select(since, o[i] + b[2 * n + i % 2] * vn[i // 2], o[i])
        rounded = [value.to(BFloat16) for value in o]
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(self.keeps_innovations):
                s_v[v_at[i]] = u[i]
            s_o[(2 * col + i % 2) * self.o_pitch + tile_first + 8 * (i // 2)] = rounded[i]

    @cute.jit
    def _serial_tokens(self, s, state, operands, num_tokens, row, state_row, col):
        """The other formulation: token by token, four lanes to a row, two dots and an update per element."""
        s_k, s_d, s_kinv, s_q, s_v, s_o, s_norm, s_beta = operands
        for n in cutlass.range(num_tokens, unroll=1):
            chunks = [n * 32 + 4 * ((b - b % 2) + ((b % 2) ^ (n & 1))) + col for b in range(8)]
            dots = [Float32(0.0) for _ in range(4)]
            for block in cutlass.range_constexpr(8):
                key = s_k[None, chunks[block]].load()
                for i in cutlass.range_constexpr(8):
                    dots[i // 4] = dots[i // 4] + s[block * 8 + i] * key[i % 4]
            vn = []
            for half in cutlass.range_constexpr(2):
                x = dots[half] + cute.arch.shuffle_sync_bfly(dots[half], offset=1)
                x = x + cute.arch.shuffle_sync_bfly(x, offset=2)
                vn.append(s_v[n * self.v_pitch + row + 8 * half] - s_norm[n] * x)
            write = s_beta[n] * s_norm[n]
            for block in cutlass.range_constexpr(8):
                key, decay = s_kinv[None, chunks[block]].load(), s_d[None, chunks[block]].load()
                query = s_q[None, chunks[block]].load()
                for i in cutlass.range_constexpr(8):
                    at = block * 8 + i
                    s[at] = decay[i % 4] * s[at] + vn[i // 4] * (write * key[i % 4])
                    dots[2 + i // 4] = dots[2 + i // 4] + s[at] * query[i % 4]
            results = []
            for half in cutlass.range_constexpr(2):
                x = dots[2 + half] + cute.arch.shuffle_sync_bfly(dots[2 + half], offset=1)
                x = x + cute.arch.shuffle_sync_bfly(x, offset=2)
                results.append((x * s_norm[MAX_TOKENS + n]).to(BFloat16))
            if col == 0:
                for half in cutlass.range_constexpr(2):
                    s_v[n * self.v_pitch + row + 8 * half] = vn[half]
                    s_o[n * self.o_pitch + row + 8 * half] = results[half]
            if n == 0:
                for i in cutlass.range_constexpr(16):
                    place = (state_row + 8 * (i % 2)) * 32 + (i // 2) * 4 + col
                    ptx.store_vector(state, place, [s[i * 4 + e] for e in range(4)])

    @cute.kernel
    def kernel(
        self,
        proj: cute.Tensor,  # (N T, columns) bf16
        w_fb: cute.Tensor,  # (D, K) bf16
        w_q: cute.Tensor,  # (D, 4) fp32
        w_k: cute.Tensor,
        w_v: cute.Tensor,
        a_log: cute.Tensor,  # (H,)
        dt_bias: cute.Tensor,  # (D,)
        onorm_w: cute.Tensor,  # (V,)
        cs_q: cute.Tensor,  # (slots, D, 3 + M) fp32 or bf16, channels contiguous
        cs_k: cute.Tensor,
        cs_v: cute.Tensor,
        ssm: cute.Tensor,  # (slots, H, V, K) fp32
        history: tuple[cute.Tensor, ...],
        slots: cute.Tensor,  # (N,)
        pending: cute.Tensor | None,  # (slots,)
        g_ext: cute.Tensor | None,  # (N T, D) bf16
        out: cute.Tensor,  # (N T, H, V) bf16
        num_tokens: Int32,
        lower_bound: Float32,
        scale: Float32,
        eps: Float32,
    ):
        rows, k_warps, tiles = self.rows, self.k_warps, self.tiles
        tid, _, _ = cute.arch.thread_idx()
        rank, head, request = cute.arch.block_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        quad, col = lane // 4, lane % 4  # row of a fragment, pair of columns
        width = cs_q.shape[1]  # D
        first_token = request * num_tokens
        channel = head * K + tid

        smem = cutlass.memory.SmemAllocator()
        s_state = smem.allocate_tensor(Float32, cute.make_layout((4, self.pass_rows * 32)), 128)
        # Keys and queries times D_t, keys over D_t; 16-byte chunk j of token t sits at j ^ 4 (t & 1).
        s_k = smem.allocate_tensor(Float32, cute.make_layout((4, MAX_TOKENS * 32)), 128)
        s_q = smem.allocate_tensor(Float32, cute.make_layout((4, MAX_TOKENS * 32)), 128)
        s_kinv = smem.allocate_tensor(Float32, cute.make_layout((4, MAX_TOKENS * 32)), 128)
        s_d = s_k
        if cutlass.const_expr(not self.chunked):
            s_d = smem.allocate_tensor(Float32, cute.make_layout((4, MAX_TOKENS * 32)), 128)
        s_history = self.allocate_history(smem)
        s_d0 = smem.allocate_tensor(Float32, cute.make_layout((4, 32)), 128)
        s_bk0 = smem.allocate_tensor(Float32, cute.make_layout((4, 32)), 128)
        s_v = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.v_pitch), 128)
        s_o = smem.allocate_tensor(BFloat16, cute.make_layout(MAX_TOKENS * self.o_pitch), 128)
        s_part = smem.allocate_tensor(Float32, cute.make_layout(WARPS * 2 * COEF), 128)
        s_coef = smem.allocate_tensor(Float32, cute.make_layout(2 * COEF), 128)  # A then B, [j][t]
        s_norm = smem.allocate_tensor(Float32, cute.make_layout(2 * MAX_TOKENS), 128)  # 1 / |k|, scale / |q|
        s_q2 = smem.allocate_tensor(Float32, cute.make_layout(4 * MAX_TOKENS), 128)
        s_beta = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS), 128)
        # Partial sums of column 0, per warp and row of its tiles; by pass, since nobody waits between passes.
        s_first = smem.allocate_tensor(Float32, cute.make_layout(self.passes * WARPS * 32), 128)
        s_taps = smem.allocate_tensor(Float32, cute.make_layout((4, 2 * K + rows)), 128)
        s_onorm = smem.allocate_tensor(Float32, cute.make_layout((4, rows // 4)), 128)
        s_gate = smem.allocate_tensor(Float32, cute.make_layout(4 * rows), 128)
        # Partial sums that warps exchange, over arrays that are dead by then: keys over D_t, taps.
        s_half: tuple[cute.Tensor, ...] = (s_kinv, s_taps)
        if cutlass.const_expr(self.waits_between_passes):
            s_half = (s_kinv,)
        if cutlass.const_expr(k_warps == 4):
            half_size = WARPS * tiles * 2 * 32
            s_half = (smem.allocate_tensor(Float32, cute.make_layout((4, half_size)), 128),)
        # Raw rows of q and k, bf16. An undivided head has nobody to wait for and is done with them before its
        # decayed queries, in whose place they then lie (128 bytes of a warp and token); else they are kept.
        raw_pitch = 2 * K if self.split == 1 else K
        raw_q = cute.recast_ptr(s_q.iterator, dtype=BFloat16) + warp * 64
        raw_k = raw_q + 32
        if cutlass.const_expr(self.split > 1):
            s_raw = smem.allocate_tensor(BFloat16, cute.make_layout(2 * MAX_TOKENS * K), 128)
            raw_q = s_raw.iterator + warp * 32
            raw_k = raw_q + MAX_TOKENS * K
        raw_v = cute.recast_ptr(s_v.iterator, dtype=BFloat16) + warp * 64
        inbox = s_norm
        mbar = s_norm.iterator
        if cutlass.const_expr(self.split > 1):
            inbox = smem.allocate_tensor(Float32, cute.make_layout(self.split * MAX_TOKENS), 128)
            mbar = smem.allocate_array(Int64, 1)
            if tid == 0:
                cute.arch.mbarrier_init(mbar, 1)
                cute.arch.mbarrier_init_fence()
        s_history = self.overlay_history(s_history, smem, s_kinv, s_taps)
        flat_k = cute.make_tensor(s_k.iterator, cute.make_layout(MAX_TOKENS * K))
        flat_q = cute.make_tensor(s_q.iterator, cute.make_layout(MAX_TOKENS * K))
        flat_kinv = cute.make_tensor(s_kinv.iterator, cute.make_layout(MAX_TOKENS * K))
        flat_d = cute.make_tensor(s_d.iterator, cute.make_layout(MAX_TOKENS * K))
        flat_d0 = cute.make_tensor(s_d0.iterator, cute.make_layout(K))
        flat_bk0 = cute.make_tensor(s_bk0.iterator, cute.make_layout(K))

        # Before the wait: weights alone. Pools, counts and rows may still be written by earlier kernels.
        self._fetch_weights(w_q, w_k, w_v, onorm_w, s_taps, s_onorm, head, rank, tid)
        rate = a_log[head]
        weights, bias = [], []
        if cutlass.const_expr(self.external_gate):
            bias = [dt_bias[channel]]
        else:
            gate_key = warp * 32 + quad  # this lane's rows: 8 apart
            weights = self._load_gate_weights(w_fb, head * K + gate_key, col)
            bias = [dt_bias[head * K + gate_key + 8 * i] for i in range(4)]
        if cutlass.const_expr(self.pdl and not self.late_trigger):
            cute.arch.griddepcontrol_launch_dependents()
        ahead: Any = None
        if cutlass.const_expr(self.early_reads):
            slot = slots[request]
            ahead = self._read_pools(
                (cs_q, cs_k, cs_v), ssm, history, pending, s_state, s_history, slot, head, rank, tid
            )
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()

        if cutlass.const_expr(not self.early_reads):
            slot = slots[request]
        row_0 = proj.iterator + Int64(first_token) * proj.stride[0]
        stride, last_token = Int32(proj.stride[0]), num_tokens - 1
        f_a = []
        if cutlass.const_expr(not self.external_gate):
            f_a_row = row_0 + (cutlass.min(quad, last_token) * stride + 4 * width)
            f_a = [ptx.load_words(f_a_row + (block * 32 + col * 8)) for block in range(4)]
        v_channel = head * V + rank * rows + tid % rows
        self._fetch_rows(row_0 + (head * K + warp * 32), raw_q, raw_pitch, last_token, stride, lane, 4)
        self._fetch_rows(
            row_0 + (width + head * K + warp * 32), raw_k, raw_pitch, last_token, stride, lane, 4
        )
        if warp * 32 < rows:
            v_first = row_0 + (2 * width + head * V + rank * rows + warp * 32)
            self._fetch_rows(v_first, raw_v, 2 * self.v_pitch, last_token, stride, lane, min(4, rows // 8))
        cute.arch.cp_async_commit_group()
        beta_logit = Float32(0.0)
        if tid < MAX_TOKENS:
            beta_logit = proj[first_token + cutlass.min(tid, num_tokens - 1), 4 * width + K + head].to(
                Float32
            )
        if slot < 0:
            if tid < rows:
                token = tid // (rows // 8)
                if token < num_tokens:
                    target = out[first_token + token, head, None].iterator
                    zero = Int32(0)
                    ptx.store_words(
                        target + (rank * rows + (tid % (rows // 8)) * 8), [zero, zero, zero, zero]
                    )
        else:
            if cutlass.const_expr(self.early_reads):
                count = ahead[0]
            else:
                count = self.pending_drafts(history, pending, slot)
            if cutlass.const_expr(self.speculative and not self.early_reads):
                self._prefetch(cs_q, cs_k, cs_v, history, slot, head, tid)
            state = cute.make_tensor(ssm[slot, head, None, None].iterator, cute.make_layout((4, V * 32)))
            loaded: Any = ()
            if cutlass.const_expr(self.loads_history_first):
                loaded = self.load_history(history, s_history, slot, head, rank, count, lane, warp)
                cute.arch.cp_async_commit_group()
            if cutlass.const_expr(not self.early_reads):
                self._load_state(state, s_state, rank * rows, lane, warp)
            if cutlass.const_expr(not self.loads_history_first and not self.early_reads):
                loaded = self.load_history(history, s_history, slot, head, rank, count, lane, warp)
            # The output gate of this thread's eight channels of a token.
            lanes_per_token = rows // 8
            out_token = (tid % rows) // lanes_per_token
            out_channel = rank * rows + (tid % lanes_per_token) * 8
            if tid < rows:
                gate_row = cutlass.min(out_token, last_token) * stride + 3 * width
                ptx.copy_16_bytes(s_gate.iterator + tid * 4, row_0 + (gate_row + head * V + out_channel))
            cute.arch.cp_async_commit_group()

            # --- one thread per channel; warp-local until the first barrier ---
            if cutlass.const_expr(self.early_reads):
                window_q, window_k, window_v = ahead[1:]
            else:
                window_q = self._load_window(cs_q, slot, channel, count)
                window_k = self._load_window(cs_k, slot, channel, count)
                window_v = [Float32(0.0) for _ in range(CONV - 1)]
                if tid < rows:
                    window_v = self._load_window(cs_v, slot, v_channel, count)

            # Decay of every token: exp(lower_bound sigmoid(exp(a_log) (g + dt_bias))).
            rate = cute.math.exp2(rate * Float32(ptx.LOG2E), fastmath=True)
            bound = lower_bound
            if cutlass.const_expr(not self.keeps_log_decay):
                bound = lower_bound * Float32(ptx.LOG2E)
            if cutlass.const_expr(self.external_gate):
                for t in cutlass.range_constexpr(MAX_TOKENS):
                    assert g_ext is not None
                    g = g_ext[first_token + cutlass.min(Int32(t), num_tokens - 1), channel].to(Float32)
                    flat_d[t * K + (tid ^ (16 * (t & 1)))] = self._decay(
                        bound * ptx.sigmoid(rate * (g + bias[0]))
                    )
            else:
                # Two chains of products; one where registers are short.
                chains = 1 if self.split == 1 else 2
                gate_acc = [[ptx.zeros(), ptx.zeros()] for _ in range(2)]
                for block in cutlass.range_constexpr(4):
                    for step in cutlass.range_constexpr(2):
                        b = f_a[block][2 * step : 2 * step + 2]
                        for tile in cutlass.range_constexpr(2):
                            low = weights[(tile * 4 + block) * 2]
                            high = weights[(tile * 4 + block) * 2 + 1]
                            a = [low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]]
                            chain = step % chains
                            gate_acc[tile][chain] = ptx.mma_bf16(gate_acc[tile][chain], a, b)
                for i in cutlass.range_constexpr(4):
                    for odd in cutlass.range_constexpr(2):
                        at = 2 * (i % 2) + odd
                        g = (
                            Float32(gate_acc[i // 2][0][at] + gate_acc[i // 2][1][at])
                            .to(BFloat16)
                            .to(Float32)
                        )
                        flat_d[(2 * col + odd) * K + ((gate_key + 8 * i) ^ (16 * odd))] = self._decay(
                            bound * ptx.sigmoid(rate * (g + bias[i]))
                        )
            if tid < MAX_TOKENS:
                s_beta[tid] = ptx.sigmoid(beta_logit)
            cute.arch.cp_async_wait_group(
                1
            )  # the taps, copied by their own thread, and the rows by their warp
            cute.arch.sync_warp()
            # An undivided head writes its columns at once: a channel's only reader is this thread.
            x_q = self._raw_inputs(raw_q, raw_pitch, lane)
            qs = self._conv_silu(s_taps[None, tid], window_q, x_q)
            if cutlass.const_expr(self.split == 1):
                self._store_conv(cs_q, slot, channel, window_q, x_q, num_tokens)
            x_k = self._raw_inputs(raw_k, raw_pitch, lane)
            ks = self._conv_silu(s_taps[None, K + tid], window_k, x_k)
            if cutlass.const_expr(self.split == 1):
                self._store_conv(cs_k, slot, channel, window_k, x_k, num_tokens)
            if warp * 32 < rows:  # v and its cache: only this CTA's rows
                x_v = self._raw_inputs(raw_v, 2 * self.v_pitch, lane)
                cute.arch.sync_warp()
                if tid < rows:
                    v = self._conv_silu(s_taps[None, 2 * K + tid], window_v, x_v)
                    self._store_conv(cs_v, slot, v_channel, window_v, x_v, num_tokens)
                    for t in cutlass.range_constexpr(MAX_TOKENS):
                        s_v[t * self.v_pitch + tid] = v[t]
            cute.arch.sync_warp()
            d = [flat_d[t * K + (tid ^ (16 * (t & 1)))] for t in range(MAX_TOKENS)]
            log_decay = d
            if cutlass.const_expr(self.keeps_log_decay):
                d = [ptx.exp(x) for x in log_decay]
            kept = (qs, ks, d, log_decay)
            total = Float32(1.0)
            for t in cutlass.range_constexpr(MAX_TOKENS):
                at = t * K + (tid ^ (16 * (t & 1)))
                total = total * d[t]
                if cutlass.const_expr(self.chunked):
                    flat_q[at] = ptx.round_tf32(total * qs[t])
                    flat_k[at] = total * ks[t]
                    flat_kinv[at] = ks[t] * cute.arch.rcp_approx(total)
                else:
                    flat_k[at], flat_kinv[at], flat_d[at], flat_q[at] = d[t] * ks[t], ks[t], d[t], qs[t]

            # |q|^2: eight sums over the warp, halving the values a lane carries.
            sums = [q * q for q in qs]
            for bit in (16, 8, 4):
                upper = (lane & bit) != 0
                half = len(sums) // 2
                sums = [
                    ptx.select(upper, sums[i + half], sums[i])
                    + cute.arch.shuffle_sync_bfly(ptx.select(upper, sums[i], sums[i + half]), offset=bit)
                    for i in range(half)
                ]
            q2 = sums[0]
            for bit in (2, 1):
                q2 = q2 + cute.arch.shuffle_sync_bfly(q2, offset=bit)
            if col == 0:
                s_q2[warp * MAX_TOKENS + quad] = q2
            cute.arch.sync_warp()
            self._couple(s_k, s_q, s_kinv, s_part, warp, quad, col)
            self.prepare_history(s_history, loaded, count, d, lane, warp)

            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            own_key = tid >= rank * rows and tid < (rank + 1) * rows  # a shared channel that this CTA writes
            if cutlass.const_expr(self.split > 1):
                if tid == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(mbar, self.split * MAX_TOKENS * 4)
                cute.arch.cluster_arrive()  # this CTA has read the shared columns and drafts
            if cutlass.const_expr(self.commits_before_solving):
                flat_d0[tid] = d[0]
                flat_bk0[tid] = self._golden_write(s_part, s_beta[0], ks[0])
            self.share_keys(
                history, s_history, slot, head, kept, s_beta, s_part, s_q2, scale, num_tokens, lane, warp
            )
            # Chunk of a fragment row: even and odd blocks of 16 keys, see the swizzle above.
            odd_row = quad & 1
            chunk_of = (quad * 32 + col + 4 * odd_row, quad * 32 + col + 4 * (1 - odd_row))

            # --- state rows ---
            key_group = warp % k_warps
            tile_row = (warp // k_warps) * (16 * tiles)
            first_chunk = key_group * (4 * self.key_blocks) + col
            s = cute.make_rmem_tensor((8 * self.key_blocks * tiles,), Float32)
            for step in cutlass.range_constexpr(self.passes):
                if cutlass.const_expr(step > 0):
                    cute.arch.cp_async_wait_group(0)
                    cute.arch.sync_warp()
                # Of the CTA; a tile's other row is 8 below, the warp's next tile 16 below.
                row = step * self.pass_rows + tile_row + quad
                for tile in cutlass.range_constexpr(tiles):
                    for block in cutlass.range_constexpr(self.key_blocks):
                        chunk = self._chunk(chunk_of, block, key_group)
                        for half in cutlass.range_constexpr(2):
                            vec = s_state[None, (tile_row + tile * 16 + half * 8) * 32 + chunk].load()
                            for e in cutlass.range_constexpr(4):
                                s[self._at(tile, block, half, e)] = vec[e]
                if cutlass.const_expr(step + 1 < self.passes):
                    cute.arch.sync_warp()
                    self._load_state(state, s_state, rank * rows + (step + 1) * self.pass_rows, lane, warp)
                    cute.arch.cp_async_commit_group()
                self.replay(s, s_history, loaded, count, row, first_chunk, lane, warp, step)

                if cutlass.const_expr(self.chunked):
                    sums = self._project(s, s_k, s_q, chunk_of, key_group)
                    half_buffer = s_half[step % len(s_half)]
                    first = s_first.iterator + step * (WARPS * 32)
                    v_first = [s_v[row + 8 * i] for i in range(2 * tiles)]
                    # While the tensor cores work, unless registers are short.
                    early = self.split > 1
                    if cutlass.const_expr(step == 0 and early):
                        self._coefficients(s_part, s_q2, s_beta, s_coef, s_norm, scale, tid)
                    self._share(sums, half_buffer, first, warp, key_group, lane, quad, col)
                    if cutlass.const_expr(step == 0 and not early):
                        self._coefficients(s_part, s_q2, s_beta, s_coef, s_norm, scale, tid)
                    if cutlass.const_expr(step == 0):
                        cute.arch.sync_threads()
                    else:
                        cute.arch.barrier(barrier_id=1 + warp // k_warps, number_of_threads=32 * k_warps)
                    if cutlass.const_expr(self.commits_before_solving):
                        golden = (v_first, s_norm, s_d0, s_bk0)
                        self._store_golden(s, state, golden, first, warp, rank * rows, row, first_chunk)
                    if key_group < tiles:
                        self._solve(
                            sums, half_buffer, (s_v, s_o, s_coef, s_norm), warp, key_group, lane, row, col
                        )
                    if cutlass.const_expr(not self.commits_before_solving):
                        cute.arch.barrier(barrier_id=1 + warp // k_warps, number_of_threads=32 * k_warps)
                        self.store_states(
                            s, history, s_history, s_v, state, slot, head, num_tokens, rank * rows, row,
                            first_chunk,
                        )  # fmt: skip
                else:
                    if cutlass.const_expr(step == 0):
                        self._coefficients(s_part, s_q2, s_beta, s_coef, s_norm, scale, tid)
                        cute.arch.sync_threads()
                    operands = (s_k, s_d, s_kinv, s_q, s_v, s_o, s_norm, s_beta)
                    self._serial_tokens(s, state, operands, num_tokens, row, rank * rows + row, col)
                if cutlass.const_expr(step == 0 and self.split == 1):
                    self.store_keys(history, slot, head, tid, kept, s_beta, s_norm, num_tokens)

            if cutlass.const_expr(self.pdl and self.late_trigger):
                cute.arch.griddepcontrol_launch_dependents()
            cute.arch.sync_threads()
            # --- RMS norm over the head, gate, store; records of vn ---
            o_at = out_token * self.o_pitch + (tid % lanes_per_token) * 8
            o_words = cute.recast_tensor(
                cute.make_tensor(s_o.iterator, cute.make_layout((8, MAX_TOKENS * self.o_pitch // 8))), Int32
            )[None, o_at // 8].load()
            values = ptx.bf16_words_to_floats([o_words[i] for i in range(4)])
            square = Float32(0.0)
            for i in cutlass.range_constexpr(8):
                square = square + values[i] * values[i]
            for bit in cutlass.range_constexpr(4):
                if cutlass.const_expr((1 << bit) < lanes_per_token):
                    square = square + cute.arch.shuffle_sync_bfly(square, offset=1 << bit)
            if cutlass.const_expr(self.split > 1):
                sender = tid < rows and tid % lanes_per_token == 0
                if sender:
                    self._send_to_peers(square, inbox.iterator + (rank * MAX_TOKENS + out_token), mbar)

            self.store_rows(history, s_v, slot, head, rank, tid, num_tokens)
            if cutlass.const_expr(self.split > 1):
                cute.arch.cluster_wait()
                if own_key:
                    x_q = self._raw_inputs(raw_q, raw_pitch, lane)
                    x_k = self._raw_inputs(raw_k, raw_pitch, lane)
                    self._store_conv(cs_q, slot, channel, window_q, x_q, num_tokens)
                    self._store_conv(cs_k, slot, channel, window_k, x_k, num_tokens)
                    self.store_keys(history, slot, head, tid, kept, s_beta, s_norm, num_tokens)
            if cutlass.const_expr(self.split > 1):
                ptx.wait_for_peers(mbar)
                square = Float32(0.0)
                for peer in cutlass.range_constexpr(self.split):
                    square = square + inbox[peer * MAX_TOKENS + out_token]
            inverse = ptx.rsqrt(square * Float32(1.0 / V) + eps)
            if tid < rows and out_token < num_tokens:
                words = cute.recast_tensor(
                    cute.make_tensor(s_gate.iterator, cute.make_layout((4, rows))), Int32
                )
                gate = words[None, tid].load()
                gates = ptx.bf16_words_to_floats([gate[i] for i in range(4)])
                part = (tid % lanes_per_token) * 2
                weight = [s_onorm[None, part].load(), s_onorm[None, part + 1].load()]
                result = []
                for i in cutlass.range_constexpr(8):
                    result.append(values[i] * inverse * weight[i // 4][i % 4] * ptx.sigmoid(gates[i]))
                target = out[first_token + out_token, head, None].iterator
                ptx.store_words(target + out_channel, ptx.floats_to_bf16_words(result))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Free extents that arguments share: slots of the pools, heads, channels, drafts."""

    pool: Any
    heads: Any
    width: Any
    drafts: Any


def free_stride(divisor: int = 1) -> Any:
    """A stride that is known at the launch, a multiple of `divisor`."""
    return cute.sym_int64(divisibility=divisor)


def fake_arguments(
    config: VerifyConfig, fake_history: Callable[[Extents], tuple[Any, ...]], *, pending: bool = True
) -> tuple[Any, ...]:
    """Placeholders of the launch arguments: which extents and strides are free, what is aligned.

    pending: whether the op takes counts of pending drafts.
    """

    def compact(dtype: Any, *shape: Any, align: int = 16) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    rows, columns, width, heads, requests, pool = (cute.sym_int() for _ in range(6))
    window, drafts = cute.sym_int(), cute.sym_int()

    def conv_cache() -> Any:
        strides = (free_stride(), 1, free_stride())
        kind, align = (BFloat16, 2) if config.bf16_conv else (Float32, 4)
        return make_fake_tensor(kind, (pool, width, window), strides, assumed_align=align)

    conv_weight = [compact(Float32, width, CONV) for _ in range(3)]
    return (
        make_fake_tensor(BFloat16, (rows, columns), (free_stride(8), 1), assumed_align=16),
        compact(BFloat16, width, K),
        *conv_weight,
        compact(Float32, heads, align=4),
        compact(Float32, width, align=4),
        compact(Float32, V),
        conv_cache(),
        conv_cache(),
        conv_cache(),
        make_fake_tensor(Float32, (pool, heads, V, K), (free_stride(4), V * K, K, 1), assumed_align=16),
        *fake_history(Extents(pool=pool, heads=heads, width=width, drafts=drafts)),
        make_fake_tensor(Int32, (requests,), (free_stride(),), assumed_align=4),
        *((make_fake_tensor(Int32, (pool,), (free_stride(),), assumed_align=4),) if pending else ()),
        make_fake_tensor(BFloat16, (rows, width), (free_stride(), 1), assumed_align=2)
        if config.external_gate
        else None,
        compact(BFloat16, rows, heads, V),
        Int32(MAX_TOKENS),
        Float32(-5.0),
        Float32(1.0),
        Float32(1e-5),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
