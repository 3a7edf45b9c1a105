# SPDX-License-Identifier: Apache-2.0
"""The projection of `k3_kda_attn` in CuTe DSL: x w^T for up to eight tokens, bound by reading w once.

Work split: the `key_ctas` CTAs of a cluster share `rows` rows of w and take turns at its blocks of 256 keys,
of which each of the eight warps has 32. On mma m16n8k16, w is the operand of 16 rows and the tokens are the
eight columns. A lane keeps about twelve 16-byte loads of w in flight, from registers straight to the tensor
cores; the first of them start before the wait, since nobody writes weights. Sharing the keys lets a CTA read
only its part of x: all of x in every CTA would be a third of w's bytes again, through L2.

Late in the stream, so that w does not push it out again, what the verify round will read of the slot is
prefetched into L2: states, pending records, conv windows. The round is launched as this kernel's dependent.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_attn.launch import (
    BLOCK_KEYS,
    MAX_TOKENS,
    ProjectionConfig,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify import cute_primitives as ptx
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import HEAD_DIM

K = V = HEAD_DIM
WARPS = 8
THREADS = 32 * WARPS
LOADS_IN_FLIGHT = 12  # of a lane: 48 KB of a CTA
PIECE_FLOATS = 1024  # of a head's state, prefetched at once
LINE_BYTES = 128


# Weights are read once and written by nobody. Hidden states come from the kernel before, which may still run
# when this one starts: they are read coherently.
LOAD_WEIGHTS = "ld.global.nc.L1::no_allocate.v4.b32"
LOAD_TOKENS = "ld.global.v4.b32"


def _load_if(instruction: str, pointer: Any, wanted: Any) -> Any:
    """Four words, zeros where not wanted."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        f"@p {instruction} {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}]; }}",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer, wanted],
    )


def _prefetch_block(pointer: Any, size_bytes: Any) -> None:
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[pointer, size_bytes]
    )


class ProjectionKernel:
    """Traces the projection for one `ProjectionConfig`."""

    def __init__(self, config: ProjectionConfig) -> None:
        if config.rows % 16 or config.rows % config.key_ctas:
            raise ValueError(f"{config.name}: rows must be a multiple of 16 and of key_ctas")
        self.rows = config.rows
        self.key_ctas = config.key_ctas
        self.pdl = config.pdl
        self.groups = config.rows // 8  # of w's rows, one load each
        self.stages = max(1, LOADS_IN_FLIGHT // self.groups)
        self.pitch = self.rows + 4  # floats between tokens: no bank conflicts between a quad's columns

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        cs_q: cute.Tensor,
        cs_k: cute.Tensor,
        cs_v: cute.Tensor,
        ssm: cute.Tensor,
        state_tok: cute.Tensor,
        slots: cute.Tensor,
        pending: cute.Tensor,
        out: cute.Tensor,
        stream: CUstream,
    ):
        self.kernel(x, w, cs_q, cs_k, cs_v, ssm, state_tok, slots, pending, out).launch(
            grid=(self.key_ctas, (w.shape[0] + self.rows - 1) // self.rows, 1),
            block=(THREADS, 1, 1),
            cluster=(self.key_ctas, 1, 1) if self.key_ctas > 1 else None,
            stream=stream,
            use_pdl=self.pdl,
            # All CTAs have to be resident at once, and the round's CTAs beside them.
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
        )

    def _load_weights(self, words, source, stage, step, shape):
        """This lane's part of a block of keys: one load for each of w's row groups."""
        hidden, blocks, groups, first_block = shape
        inside = first_block + step * (WARPS * self.key_ctas) < blocks
        place = source + step * (WARPS * self.key_ctas * BLOCK_KEYS)
        for group in range(self.groups):
            wanted = Int32(cutlass.select_(inside, cutlass.select_(group < groups, 1, 0), 0))
            loaded = _load_if(LOAD_WEIGHTS, place + Int64(group * 8) * hidden, wanted)
            for e in range(4):
                words[(stage * self.groups + group) * 4 + e] = loaded[e]

    def _load_tokens(self, words, source, stage, step, shape):
        """This lane's part of a block of keys of one token."""
        _, blocks, _, first_block = shape
        inside = first_block + step * (WARPS * self.key_ctas) < blocks
        place = source + step * (WARPS * self.key_ctas * BLOCK_KEYS)
        loaded = _load_if(LOAD_TOKENS, place, Int32(cutlass.select_(inside, 1, 0)))
        for e in range(4):
            words[stage * 4 + e] = loaded[e]

    def _multiply(self, acc, weights, tokens, stage):
        """Both halves of a block: a lane's eight neighbouring keys stand for pairs of k that lie 8 apart."""
        for half in range(2):
            b = [tokens[stage * 4 + 2 * half], tokens[stage * 4 + 2 * half + 1]]
            for tile in range(self.groups // 2):
                low, high = [((stage * self.groups + 2 * tile + i) * 4 + 2 * half) for i in range(2)]
                a = [weights[low], weights[high], weights[low + 1], weights[high + 1]]
                sums = ptx.mma_bf16([acc[tile * 4 + i] for i in range(4)], a, b)
                for i in range(4):
                    acc[tile * 4 + i] = sums[i]

    @cute.jit
    def _prefetch(self, pools, slot, pending, index):
        """Piece `index` of what the round reads of its slot, into L2."""
        cs_q, cs_k, cs_v, ssm, state_tok = pools
        if slot >= 0:
            drafts, width = state_tok.shape[2], cs_q.shape[1]
            count = cutlass.max(cutlass.min(pending, drafts), Int32(0))
            pieces = ssm.shape[1] * (V * K // PIECE_FLOATS)
            records = pieces + 3 * drafts
            if index < pieces:
                head = index // (V * K // PIECE_FLOATS)
                row = index % (V * K // PIECE_FLOATS) * (PIECE_FLOATS // K)
                _prefetch_block(ssm[slot, head, row, None].iterator, Int32(PIECE_FLOATS * 4))
            elif index < records:
                plane, draft = (index - pieces) // drafts, (index - pieces) % drafts
                if draft < count:
                    _prefetch_block(state_tok[slot, plane, draft, 0, None].iterator, width * 4)
            else:
                per_line = LINE_BYTES * 8 // cs_q.element_type.width
                lines = width // per_line
                column, line = (index - records) // lines, (index - records) % lines
                channel = line * per_line
                if column < 3:
                    ptx.prefetch_line(cs_q[slot, None, count + column].iterator + channel)
                elif column < 6:
                    ptx.prefetch_line(cs_k[slot, None, count + column - 3].iterator + channel)
                elif column < 9:
                    ptx.prefetch_line(cs_v[slot, None, count + column - 6].iterator + channel)

    @cute.jit
    def _sum_warps(self, s_part, token, row):
        total = s_part[token * self.pitch + row]
        for warp in cutlass.range_constexpr(1, WARPS):
            total = total + s_part[(warp * MAX_TOKENS + token) * self.pitch + row]
        return total

    @cute.jit
    def _send_to_peer(self, value, place, mbar, peer):
        """st.async of a sum to the same place of the CTA that collects its row, be it this one."""
        send = cute.make_copy_atom(cpasync.CopyDsmemStoreOp(), Float32, num_bits_per_copy=32)
        word = cute.make_rmem_tensor((1,), Float32)
        word[0] = value
        there = cute.make_tensor(cute.arch.map_dsmem_ptr(place, peer), cute.make_layout((1,)))
        cute.copy(send, word, there, mbar_ptr=cute.arch.map_dsmem_ptr(mbar, peer))

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,  # (T, hidden) bf16
        w: cute.Tensor,  # (columns, hidden) bf16
        cs_q: cute.Tensor,  # (slots, D, 3 + M)
        cs_k: cute.Tensor,
        cs_v: cute.Tensor,
        ssm: cute.Tensor,  # (slots, H, V, K) fp32
        state_tok: cute.Tensor,  # (slots, 3, M, H, K) fp32
        slots: cute.Tensor,  # (1,)
        pending: cute.Tensor,  # (slots,)
        out: cute.Tensor,  # (T, columns) bf16
    ):
        rows, key_ctas, stages = self.rows, self.key_ctas, self.stages
        tid, _, _ = cute.arch.thread_idx()
        rank, cluster, _ = cute.arch.block_idx()
        _, clusters, _ = cute.arch.grid_dim()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        quad, col = lane // 4, lane % 4
        num_tokens, columns, hidden = x.shape[0], w.shape[0], w.shape[1]
        blocks = hidden // BLOCK_KEYS
        first_row, first_block = cluster * rows, rank * WARPS + warp
        shape = (hidden, blocks, (columns - first_row) // 8, first_block)
        key = first_block * BLOCK_KEYS + col * 8

        smem = cutlass.memory.SmemAllocator()
        s_part = smem.allocate_tensor(Float32, cute.make_layout(WARPS * MAX_TOKENS * self.pitch), 128)
        inbox, mbar = s_part, s_part.iterator
        share = rows // key_ctas  # the rows whose sums this CTA collects and stores
        if cutlass.const_expr(key_ctas > 1):
            inbox = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * rows), 128)
            mbar = smem.allocate_array(Int64, 1)
            if tid == 0:
                cute.arch.mbarrier_init(mbar, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, MAX_TOKENS * rows * 4)
            cute.arch.cluster_arrive_relaxed()

        weights = cute.make_rmem_tensor((stages * self.groups * 4,), Int32)
        tokens = cute.make_rmem_tensor((stages * 4,), Int32)
        acc = cute.make_rmem_tensor((self.groups // 2 * 4,), Float32)
        acc.fill(0.0)
        row_source = w.iterator + (Int64(first_row + quad) * hidden + key)
        for stage in cutlass.range_constexpr(stages):
            self._load_weights(weights, row_source, stage, Int32(stage), shape)
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        slot = slots[0]
        # Columns past the last token repeat it, and are dropped.
        token_source = x.iterator + (Int64(cutlass.min(quad, num_tokens - 1)) * x.stride[0] + key)
        for stage in cutlass.range_constexpr(stages):
            self._load_tokens(tokens, token_source, stage, Int32(stage), shape)

        count = pending[cutlass.max(slot, Int32(0))]  # here, so that nobody waits for it in the loop
        steps_of_rank = (blocks + WARPS * key_ctas - 1) // (WARPS * key_ctas)
        rounds = (steps_of_rank + stages - 1) // stages
        for step in cutlass.range(rounds, unroll=1):
            if step == rounds * 3 // 4:
                index = (cluster * key_ctas + rank) + tid * (clusters * key_ctas)
                self._prefetch((cs_q, cs_k, cs_v, ssm, state_tok), slot, count, index)
            for stage in cutlass.range_constexpr(stages):
                self._multiply(acc, weights, tokens, stage)
                after = (step + 1) * stages + stage
                self._load_weights(weights, row_source, stage, after, shape)
                self._load_tokens(tokens, token_source, stage, after, shape)

        for tile in cutlass.range_constexpr(self.groups // 2):
            for i in cutlass.range_constexpr(4):
                token, row = 2 * col + i % 2, tile * 16 + 8 * (i // 2) + quad
                s_part[(warp * MAX_TOKENS + token) * self.pitch + row] = acc[tile * 4 + i]
        cute.arch.sync_threads()
        if cutlass.const_expr(key_ctas > 1):
            cute.arch.cluster_wait()  # every peer's inbox is ready
        for step in cutlass.range_constexpr((MAX_TOKENS * rows + THREADS - 1) // THREADS):
            index = step * THREADS + tid
            token, row = index // rows, index % rows
            if token < MAX_TOKENS:
                total = self._sum_warps(s_part, token, row)
                if cutlass.const_expr(key_ctas > 1):
                    place = (rank * MAX_TOKENS + token) * share + row % share
                    self._send_to_peer(total, inbox.iterator + place, mbar, row // share)
                elif token < num_tokens and first_row + row < columns:
                    out[token, first_row + row] = total.to(BFloat16)
        if cutlass.const_expr(key_ctas > 1):
            ptx.wait_for_peers(mbar)
            for step in cutlass.range_constexpr((MAX_TOKENS * share + THREADS - 1) // THREADS):
                index = step * THREADS + tid
                token, row = index // share, rank * share + index % share
                if token < num_tokens and first_row + row < columns:
                    total = inbox[index]
                    for peer in cutlass.range_constexpr(1, key_ctas):
                        total = total + inbox[peer * (MAX_TOKENS * share) + index]
                    out[token, first_row + row] = total.to(BFloat16)


def fake_arguments(config: ProjectionConfig) -> tuple[Any, ...]:
    """Placeholders of the launch arguments: which extents and strides are free, what is aligned."""

    def free(div: int = 1) -> Any:
        return cute.sym_int64(divisibility=div)

    def compact(dtype: Any, *shape: Any) -> Any:
        return make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)

    tokens, width, heads, pool, window, drafts = (cute.sym_int() for _ in range(6))
    hidden, columns = cute.sym_int(divisibility=BLOCK_KEYS), cute.sym_int(divisibility=8)
    conv = BFloat16 if config.narrow_conv else Float32

    def conv_cache() -> Any:
        return make_fake_tensor(
            conv, (pool, width, window), (free(), 1, free()), assumed_align=conv.width // 8
        )

    return (
        make_fake_tensor(BFloat16, (tokens, hidden), (free(8), 1), assumed_align=16),
        compact(BFloat16, columns, hidden),
        *(conv_cache() for _ in range(3)),
        make_fake_tensor(Float32, (pool, heads, V, K), (free(4), V * K, K, 1), assumed_align=16),
        make_fake_tensor(
            Float32, (pool, 3, drafts, heads, K), (free(4), free(4), free(4), K, 1), assumed_align=16
        ),
        make_fake_tensor(Int32, (1,), (free(),), assumed_align=4),
        make_fake_tensor(Int32, (pool,), (free(),), assumed_align=4),
        compact(BFloat16, tokens, columns),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def compile_projection(config: ProjectionConfig, arch: str | None = None, options: str = "") -> Any:
    """The compiled launcher; call it with torch tensors and without the stream."""
    target = f" --gpu-arch {arch}" if arch else ""
    return cute.compile(
        ProjectionKernel(config),
        *fake_arguments(config),
        options=f"--enable-tvm-ffi{target} {options}".strip(),
    )
