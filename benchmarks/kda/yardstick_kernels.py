# SPDX-License-Identifier: Apache-2.0
"""The yardsticks' kernels, and the one that runs before an op: plain loops over memory."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(source, target, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


@triton.jit
def read_kernel(source, sums, size, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """A sum per program of STEPS blocks, so that the loads cannot be left out."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(STEPS):
        at = (tl.program_id(0) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def predecessor_kernel(source, target, size, BLOCK: tl.constexpr):
    """A copy that waits for what ran before, then lets its dependents start, as a projection would.

    What an op reads before its own wait is thereby older than this kernel.
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
