# SPDX-License-Identifier: Apache-2.0
"""Runs compiled CuTe DSL kernels on the CPU: a PTX interpreter on numpy, for numerics, bounds and barriers.

    from tests.ptx import EmulatedKernels, emulated
    run = CompiledVerify(EmulatedKernels(ENTRY.kernels))   # an op's "cute" implementation, whole
    run(*inputs.arguments(), config=VerifyConfig(split=8))

    run = emulated(compile_verify, VerifyConfig(split=8))  # or a launcher: compile(config, arch, options)
    run(proj, ..., g_ext, out, 8, -5.0, scale, eps)        # CPU tensors, changed in place; None stays
    run.races(proj, ...)                                   # runs it too; the races found, [] if none
    run.with_seed(0)(...)                                  # warp by warp in random order, to find races
    run.with_ptx(run.ptx.replace("bar.sync", "//"))(...)   # other PTX behind the same host code

Shapes, strides, grid, cluster and shared memory come from the function's own host code, which runs against a
stand-in of the CUDA runtime (`capture`); that takes gcc. `compile` must have `--enable-tvm-ffi` among its
options and append those it is given.

What is checked, with the line of PTX, the instruction and the thread in the message (`PtxError`):

- accesses to global memory outside the elements of the tensors given, gaps of strided views included, and to
  shared memory outside of the CTA's; misaligned ones; those to the shared memory of a CTA that has exited;
- warp-synchronous instructions without their lanes, deadlocks, mbarriers that nobody initialised or that
  overflow, a cluster barrier's arrive without wait.

Shared memory starts as NaN. Data of cp.async and st.async arrives at the wait, as late as it may. In lockstep
(seed None) all CTAs of a launch run together and a missing barrier can go unnoticed; with a seed, clusters
run one after another and warps run up to a barrier in a random order, so compare a few seeds bit for bit.

`races` keeps vector clocks: it names every pair of accesses to shared or global memory that no barrier,
`bar.warp.sync`, mbarrier or wait for a copy orders, whatever the schedule. EmulatedKernels(...,
check_races=True) raises them.

Approximate functions (ex2, rcp, ...) are rounded from double; mma sums in double and rounds once; everything
else is exact. `parse` reads PTX; `program` compiles instructions to closures, which `arithmetic`, `access`,
`bulk`, `warp` and `control` hold by kind; `machine` schedules, `races` watches, `launch` ties them together.
Unknown instructions raise PtxError: add them there.
"""

from tests.ptx.launch import Emulated, EmulatedKernels, emulated
from tests.ptx.parse import PtxError

__all__ = ["Emulated", "EmulatedKernels", "PtxError", "emulated"]
