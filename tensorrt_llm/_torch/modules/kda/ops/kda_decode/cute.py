# SPDX-License-Identifier: Apache-2.0
"""`kda_decode` in CuTe DSL: one launch from projection rows to gated output.

Work split: a CTA owns V / split rows of one head of one request; the `split` CTAs of a head form a cluster.
Every thread loads its part of the state (64 bytes of each of up to four rows) into registers before anything
else that depends on the slot, so that the state's way from memory hides the preparation: convolutions,
gate (f_b on tensor cores, all eight columns the same token), norms. With S the old state

    u = S (d k),   vn = v - u,   S' = fma(d, S, vn (beta k)),   o = S' q = S (d q) + vn (beta k . q)

both dot products read S once, and only `vn` is waited for. Eight lanes share a row.

Before the wait nothing is read that an earlier kernel may write, but for a hint: `slots` as it is then says
which state to prefetch into L2, the point where all SMs agree, so that an outdated hint costs only time.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify import cute_primitives as ptx
from tensorrt_llm._torch.modules.kda.ops.kda_decode.launch import CONV_WIDTH, HEAD_DIM, DecodeConfig

K = V = HEAD_DIM
COLUMNS = CONV_WIDTH - 1
L2_NORM_EPS = 1e-6
KEY_WARPS = K // 32
ROW_LANES = 8  # lanes that share a row of the state, four vectors of four keys each
VECTORS = K // (4 * ROW_LANES)
SUMS = 4  # |q|^2, |k|^2, k . q of a warp's channels, and padding


def _load_hint(pointer: Any) -> Any:
    """An int32 from L2, past L1: a later load must not find this one's line."""
    return cute.arch.inline_ptx(
        "ld.global.cg.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[pointer]
    )


def _prefetch_block(pointer: Any, size_bytes: int) -> None:
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[pointer, Int32(size_bytes)]
    )


class DecodeKernel:
    """Traces `kda_decode` for one `DecodeConfig`."""

    def __init__(self, config: DecodeConfig) -> None:
        self.split = config.split
        self.external_gate = config.external_gate
        self.pdl = config.pdl
        self.early_trigger = config.early_trigger
        self.rows = V // config.split  # V rows of a CTA
        self.warps = 8 if config.split == 1 else 4
        self.threads = 32 * self.warps
        self.lane_rows = self.rows // (self.warps * 32 // ROW_LANES)  # rows of the state in a lane
        self.gate_tiles = K // (16 * self.warps)  # tiles of 16 gate channels of a warp

    @cute.jit
    def __call__(
        self,
        proj: cute.Tensor,
        w_fb: cute.Tensor,
        w_q: cute.Tensor,
        w_k: cute.Tensor,
        w_v: cute.Tensor,
        a_log: cute.Tensor,
        dt_bias: cute.Tensor,
        onorm_w: cute.Tensor,
        conv_pool: cute.Tensor,
        ssm: cute.Tensor,
        slots: cute.Tensor,
        g_ext: cute.Tensor | None,
        out: cute.Tensor,
        lower_bound: Float32,
        scale: Float32,
        eps: Float32,
        stream: CUstream,
    ):
        self.kernel(
            proj, w_fb, w_q, w_k, w_v, a_log, dt_bias, onorm_w, conv_pool, ssm, slots, g_ext, out,
            lower_bound, scale, eps,
        ).launch(
            grid=(self.split, ssm.shape[1], slots.shape[0]),
            block=(self.threads, 1, 1),
            cluster=(self.split, 1, 1) if self.split > 1 else None,
            stream=stream,
            use_pdl=self.pdl,
            # 32 KB of state to a CTA of 128 threads: three of them cover the latency of the memory.
            min_blocks_per_mp=2 if self.split == 1 else 3,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.jit
    def _prefetch(self, conv_pool, ssm, hint, head, rank, tid):
        """What the slot holds for this CTA, into L2; the slot is a hint, kept inside the pool."""
        slot = cutlass.max(cutlass.min(hint, ssm.shape[0] - 1), Int32(0))
        if tid == 0:
            state = ssm[slot, head, rank * self.rows, None].iterator
            _prefetch_block(state, self.rows * K * 4)
        if tid < 24:  # 16 channels of 6 bytes are less than a line of 128
            channel = (tid // 8) * (conv_pool.shape[1] // 3) + head * K + (tid % 8) * 16
            ptx.prefetch_line(conv_pool[slot, channel, None].iterator)

    def _load_gate_weights(self, w_fb, first_row, col):
        """This warp's rows of w_fb as mma fragments: tiles of 16, four blocks of 32 keys, two row halves."""
        return [
            ptx.load_words(w_fb.iterator + ((first_row + tile * 16 + half * 8) * K + block * 32 + col * 8))
            for tile in range(self.gate_tiles)
            for block in range(4)
            for half in range(2)
        ]

    def _gate_logits(self, weights, f_a, col):
        """f_b's output of this lane's channel: of tile col / 2 (there may be one alone), row half col % 2."""
        halves = []
        for tile in range(self.gate_tiles):
            acc = [ptx.zeros(), ptx.zeros()]
            for block in range(4):
                low, high = weights[(tile * 4 + block) * 2], weights[(tile * 4 + block) * 2 + 1]
                for step in range(2):
                    a = [low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]]
                    acc[step] = ptx.mma_bf16(acc[step], a, f_a[block][2 * step : 2 * step + 2])
            # Columns are copies of one token.
            halves.extend([acc[0][0] + acc[1][0], acc[0][2] + acc[1][2]])
        logits = halves[0]
        for i in range(1, len(halves)):
            logits = ptx.select(col % len(halves) == i, halves[i], logits)
        return Float32(logits).to(BFloat16).to(Float32)

    def _taps(self, weight, channel):
        return cute.make_tensor(weight.iterator, cute.make_layout((4, weight.shape[0])))[None, channel].load()

    def _window(self, conv_pool, slot, channel):
        """The three raw inputs before the token, as they are."""
        return [conv_pool[slot, channel, column] for column in range(COLUMNS)]

    def _move_window(self, conv_pool, slot, channel, window, fresh):
        for column, value in enumerate([*window[1:], fresh]):
            conv_pool[slot, channel, column] = value

    def _conv_silu(self, taps, window, fresh):
        past = [value.to(Float32) for value in window]
        y = taps[0] * past[0] + taps[1] * past[1] + taps[2] * past[2] + taps[3] * fresh.to(Float32)
        return y * ptx.sigmoid(y)

    def _load_state(self, ssm, slot, head, first_row, part):
        """Rows first_row .. of this lane: `lane_rows` x `VECTORS` x 4 words."""
        base = ssm[slot, head, first_row, None].iterator
        return [
            ptx.load_words(base + cute.assume(row * K + (part + ROW_LANES * j) * 4, divby=4))
            for row in range(self.lane_rows)
            for j in range(VECTORS)
        ]

    def _sum_over(self, value, offsets):
        for offset in offsets:
            value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
        return value

    @cute.jit
    def _send_to_peer(self, value, inbox, mbar, rank, peer):
        """st.async of this CTA's sum to place `rank` of a peer's inbox, itself among them."""
        send = cute.make_copy_atom(cpasync.CopyDsmemStoreOp(), Float32, num_bits_per_copy=32)
        word = cute.make_rmem_tensor((1,), Float32)
        word[0] = value
        there = cute.make_tensor(cute.arch.map_dsmem_ptr(inbox.iterator + rank, peer), cute.make_layout((1,)))
        cute.copy(send, word, there, mbar_ptr=cute.arch.map_dsmem_ptr(mbar, peer))

    @cute.jit
    def _dots(self, state, s_dk, s_dq, part):
        """S (d k) and S (d q) of this lane's rows, summed over the row's lanes."""
        u = [Float32(0.0) for _ in range(self.lane_rows)]
        p = [Float32(0.0) for _ in range(self.lane_rows)]
        for j in cutlass.range_constexpr(VECTORS):
            key, query = s_dk[None, part + ROW_LANES * j].load(), s_dq[None, part + ROW_LANES * j].load()
            for row in cutlass.range_constexpr(self.lane_rows):
                for e in cutlass.range_constexpr(4):
                    s = state[row * VECTORS + j][e].bitcast(Float32)
                    u[row] = u[row] + s * key[e]
                    p[row] = p[row] + s * query[e]
        return [
            (self._sum_over(u[row], (1, 2, 4)), self._sum_over(p[row], (1, 2, 4)))
            for row in range(self.lane_rows)
        ]

    @cute.jit
    def _store_state(self, target, state, vn, s_d, s_bk, part):
        """S' = fma(d, S, vn (beta k)), the product rounded first; `target` is this lane's first row."""
        for j in cutlass.range_constexpr(VECTORS):
            decay, bk = s_d[None, part + ROW_LANES * j].load(), s_bk[None, part + ROW_LANES * j].load()
            for row in cutlass.range_constexpr(self.lane_rows):
                values = [
                    ptx.fma(
                        decay[e], state[row * VECTORS + j][e].bitcast(Float32), ptx.mul(vn[row], bk[e])
                    ).bitcast(Int32)
                    for e in range(4)
                ]
                place = target + cute.assume(row * K + (part + ROW_LANES * j) * 4, divby=4)
                ptx.store_words(place, values)

    @cute.kernel
    def kernel(
        self,
        proj: cute.Tensor,  # (N, columns) bf16
        w_fb: cute.Tensor,  # (D, K) bf16
        w_q: cute.Tensor,  # (D, 4) fp32
        w_k: cute.Tensor,
        w_v: cute.Tensor,
        a_log: cute.Tensor,  # (H,)
        dt_bias: cute.Tensor,  # (D,)
        onorm_w: cute.Tensor,  # (V,)
        conv_pool: cute.Tensor,  # (slots, 3 D, 3) bf16
        ssm: cute.Tensor,  # (slots, H, V, K) fp32
        slots: cute.Tensor,  # (N,)
        g_ext: cute.Tensor | None,  # (N, D) bf16
        out: cute.Tensor,  # (N, H, V) bf16
        lower_bound: Float32,
        scale: Float32,
        eps: Float32,
    ):
        rows, lane_rows = self.rows, self.lane_rows
        tid, _, _ = cute.arch.thread_idx()
        rank, head, request = cute.arch.block_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        quad, col = lane // 4, lane % 4  # of mma fragments
        group, part = lane // ROW_LANES, lane % ROW_LANES  # of the state
        width = w_fb.shape[0]  # D
        key = tid % K
        channel = head * K + key
        # An undivided head has four more warps, which take its v.
        v_row = key % rows
        v_channel = head * V + rank * rows + v_row
        has_keys, has_value = warp < KEY_WARPS, key < rows
        if cutlass.const_expr(self.warps > KEY_WARPS):
            has_value = warp >= KEY_WARPS
        lane_row = (warp * (32 // ROW_LANES) + group) * lane_rows  # first row of this lane, in the CTA
        out_row = rank * rows + lane_row + cutlass.min(part, lane_rows - 1)

        smem = cutlass.memory.SmemAllocator()
        s_d = smem.allocate_tensor(Float32, cute.make_layout((4, 32)), 128)
        s_dk = smem.allocate_tensor(Float32, cute.make_layout((4, 32)), 128)
        s_dq = smem.allocate_tensor(Float32, cute.make_layout((4, 32)), 128)
        s_bk = smem.allocate_tensor(Float32, cute.make_layout((4, 32)), 128)
        s_v = smem.allocate_tensor(Float32, cute.make_layout(rows), 128)
        s_sums = smem.allocate_tensor(Float32, cute.make_layout(KEY_WARPS * SUMS), 128)
        s_square = smem.allocate_tensor(Float32, cute.make_layout(self.warps), 128)
        flat_d, flat_dk, flat_dq, flat_bk = [
            cute.make_tensor(x.iterator, cute.make_layout(K)) for x in (s_d, s_dk, s_dq, s_bk)
        ]
        inbox, mbar = s_square, s_square.iterator
        if cutlass.const_expr(self.split > 1):
            inbox = smem.allocate_tensor(Float32, cute.make_layout(self.split), 128)
            mbar = smem.allocate_array(Int64, 1)
            if tid == 0:
                cute.arch.mbarrier_init(mbar, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, self.split * 4)

        # Before the wait: weights alone, and the hint.
        hint = Int32(0)
        if cutlass.const_expr(self.pdl):
            hint = _load_hint(slots.iterator + Int64(request) * slots.stride[0])
        taps_q, taps_k = self._taps(w_q, channel), self._taps(w_k, channel)
        taps_v = self._taps(w_v, v_channel)
        rate = cute.math.exp2(a_log[head] * Float32(ptx.LOG2E), fastmath=True)
        norm_weight = onorm_w[out_row]
        gate_key, weights = key, []
        if cutlass.const_expr(not self.external_gate):
            gate_row = warp * (16 * self.gate_tiles) + quad
            gate_key = gate_row + 8 * (col % (2 * self.gate_tiles))
            weights = self._load_gate_weights(w_fb, head * K + gate_row, col)
        bias = dt_bias[head * K + gate_key]
        if cutlass.const_expr(self.pdl):
            self._prefetch(conv_pool, ssm, hint, head, rank, tid)
            if cutlass.const_expr(self.early_trigger):
                cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        slot = slots[request]
        row = proj.iterator + Int64(request) * proj.stride[0]
        f_a, g = [], Float32(0.0)
        if cutlass.const_expr(self.external_gate):
            assert g_ext is not None
            g = g_ext[request, channel].to(Float32)
        else:
            f_a = [ptx.load_words(row + (4 * width + block * 32 + col * 8)) for block in range(4)]
        raw_q, raw_k = proj[request, channel], proj[request, width + channel]
        raw_v = proj[request, 2 * width + v_channel]
        output_gate = proj[request, 3 * width + head * V + out_row].to(Float32)
        beta = ptx.sigmoid(proj[request, 4 * width + K + head].to(Float32))
        if slot < 0:
            if part < lane_rows:
                out[request, head, out_row] = BFloat16(0.0)
        else:
            state = self._load_state(ssm, slot, head, rank * rows + lane_row, part)
            window_q = self._window(conv_pool, slot, channel)
            window_k = self._window(conv_pool, slot, width + channel)
            window_v = self._window(conv_pool, slot, 2 * width + v_channel)

            # Decay of every key: exp(lower_bound sigmoid(exp(a_log) (g + dt_bias))).
            if cutlass.const_expr(not self.external_gate):
                g = self._gate_logits(weights, f_a, col)
            bound = lower_bound * Float32(ptx.LOG2E)
            flat_d[gate_key] = cute.math.exp2(bound * ptx.sigmoid(rate * (g + bias)), fastmath=True)
            q, k = Float32(0.0), Float32(0.0)
            if has_keys:
                q = self._conv_silu(taps_q, window_q, raw_q)
                k = self._conv_silu(taps_k, window_k, raw_k)
                sums = [self._sum_over(x, (16, 8, 4, 2, 1)) for x in (q * q, k * k, k * q)]
                if lane == 0:
                    for i in cutlass.range_constexpr(3):
                        s_sums[warp * SUMS + i] = sums[i]
            if has_value:  # and its window: this thread is the channel's only reader
                s_v[v_row] = self._conv_silu(taps_v, window_v, raw_v)
                self._move_window(conv_pool, slot, 2 * width + v_channel, window_v, raw_v)
            cute.arch.sync_threads()
            if cutlass.const_expr(self.split > 1):
                # This CTA has read the shared windows, which peers move once they have waited.
                cute.arch.cluster_arrive()
            totals = []
            for i in cutlass.range_constexpr(3):
                total = s_sums[i]
                for w in cutlass.range_constexpr(1, KEY_WARPS):
                    total = total + s_sums[w * SUMS + i]
                totals.append(total)
            norm_q = ptx.rsqrt(totals[0] + Float32(L2_NORM_EPS)) * scale
            write = beta * ptx.rsqrt(totals[1] + Float32(L2_NORM_EPS))
            norm_k = ptx.rsqrt(totals[1] + Float32(L2_NORM_EPS))
            if has_keys:
                decay = flat_d[key]
                flat_dk[key] = decay * (k * norm_k)
                flat_dq[key] = decay * (q * norm_q)
                flat_bk[key] = k * write
                if cutlass.const_expr(self.split == 1):
                    self._move_window(conv_pool, slot, channel, window_q, raw_q)
                    self._move_window(conv_pool, slot, width + channel, window_k, raw_k)
            cute.arch.sync_threads()

            dots = self._dots(state, s_dk, s_dq, part)
            if cutlass.const_expr(self.pdl and not self.early_trigger):
                cute.arch.griddepcontrol_launch_dependents()
            coupling = totals[2] * norm_q * write  # beta k . q
            vn = [s_v[lane_row + i] - dots[i][0] for i in range(lane_rows)]
            o = [(dots[i][1] + vn[i] * coupling).to(BFloat16).to(Float32) for i in range(lane_rows)]
            target = ssm[slot, head, rank * rows + lane_row, None].iterator
            self._store_state(target, state, vn, s_d, s_bk, part)

            # --- RMS norm over the head, gate, store ---
            square, mine = Float32(0.0), o[0]
            for i in cutlass.range_constexpr(lane_rows):
                square = square + o[i] * o[i]
                mine = ptx.select(part == i, o[i], mine)
            square = self._sum_over(square, (8, 16))
            if lane == 0:
                s_square[warp] = square
            cute.arch.sync_threads()
            square = s_square[0]
            for w in cutlass.range_constexpr(1, self.warps):
                square = square + s_square[w]
            if cutlass.const_expr(self.split > 1):
                cute.arch.cluster_wait()
                if tid < self.split:
                    self._send_to_peer(square, inbox, mbar, rank, tid)
                if key // rows == rank:  # shared channels that this CTA writes
                    self._move_window(conv_pool, slot, channel, window_q, raw_q)
                    self._move_window(conv_pool, slot, width + channel, window_k, raw_k)
                ptx.wait_for_peers(mbar)
                square = inbox[0]
                for peer in cutlass.range_constexpr(1, self.split):
                    square = square + inbox[peer]
            inverse = ptx.rsqrt(square * Float32(1.0 / V) + eps)
            if part < lane_rows:
                result = mine * inverse * norm_weight * ptx.sigmoid(output_gate)
                out[request, head, out_row] = result.to(BFloat16)


def fake_arguments(config: DecodeConfig) -> tuple[Any, ...]:
    """Placeholders of the launch arguments: which extents and strides are free, what is aligned."""

    def compact(dtype: Any, *shape: Any, align: int = 16) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def free(div: int = 1) -> Any:
        return cute.sym_int64(divisibility=div)

    columns, width, channels, heads, requests, pool = (cute.sym_int() for _ in range(6))
    return (
        make_fake_tensor(BFloat16, (requests, columns), (free(8), 1), assumed_align=16),
        compact(BFloat16, width, K),
        *(compact(Float32, width, CONV_WIDTH) for _ in range(3)),
        compact(Float32, heads, align=4),
        compact(Float32, width, align=4),
        compact(Float32, V),
        make_fake_tensor(BFloat16, (pool, channels, COLUMNS), (free(), free(), free()), assumed_align=2),
        make_fake_tensor(Float32, (pool, heads, V, K), (free(4), V * K, K, 1), assumed_align=16),
        make_fake_tensor(Int32, (requests,), (free(),), assumed_align=4),
        make_fake_tensor(BFloat16, (requests, width), (free(), 1), assumed_align=2)
        if config.external_gate
        else None,
        compact(BFloat16, requests, heads, V),
        Float32(-5.0),
        Float32(1.0),
        Float32(1e-5),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def compile_decode(config: DecodeConfig, arch: str | None = None, options: str = "") -> Any:
    """The compiled launcher; call it with torch tensors and without the stream."""
    target = f" --gpu-arch {arch}" if arch else ""
    return cute.compile(
        DecodeKernel(config), *fake_arguments(config), options=f"--enable-tvm-ffi{target} {options}".strip()
    )
