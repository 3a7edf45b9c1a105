# SPDX-License-Identifier: Apache-2.0
"""Runs compiled CuTe DSL functions on CPU tensors: `emulated` in place of a function's compile."""

import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch

from tensorrt_llm._torch.modules.kda.ops.registry import CompiledKernels
from tests.ptx import access, arithmetic, bulk, control, warp  # noqa: F401  they register their instructions
from tests.ptx.capture import HostLauncher, Launch
from tests.ptx.machine import Geometry, Machine, Order
from tests.ptx.memory import GlobalMemory
from tests.ptx.parse import Kernel, PtxError, parse
from tests.ptx.program import Program

# Lanes that run in lockstep: numpy's cost per instruction is shared by them all.
_MAX_LANES = 8192


class Emulated:
    """A compiled function that runs on the CPU; call it with the arguments of the compiled launcher.

    seed None runs all CTAs in lockstep. With a seed, clusters run one after another and the warps of one take
    turns at random, each up to a barrier or wait: a missing one changes the result. `apart`: CTAs of a
    cluster do not start together, which hardware all but ensures and PTX leaves to the cluster's barrier.
    """

    def __init__(
        self,
        ptx: str,
        launcher: HostLauncher,
        kernels: dict[str, Kernel],
        seed: int | None,
        apart: bool = False,
    ) -> None:
        self.ptx, self.launcher, self.seed = ptx, launcher, seed
        self._kernels, self._apart = kernels, apart
        self._programs: dict[str, Program] = {}

    def with_seed(self, seed: int | None, *, apart: bool = False) -> "Emulated":
        """The same function under another schedule."""
        other = Emulated(self.ptx, self.launcher, self._kernels, seed, apart)
        other._programs = self._programs
        return other

    def with_ptx(self, ptx: str) -> "Emulated":
        """The same host code with other PTX, for example without one of its barriers."""
        return Emulated(ptx, self.launcher, parse(ptx), self.seed, self._apart)

    def __call__(self, *arguments: Any) -> None:
        """Runs every launch of the function, in order. Tensors are changed in place."""
        memory = GlobalMemory([x for x in arguments if isinstance(x, torch.Tensor)])
        for launch in self.launcher.launches(arguments):
            if launch.name not in self._programs:
                self._programs[launch.name] = Program(self._kernels[launch.name])
            order = None if self.seed is None else Order(np.random.default_rng(self.seed), self._apart)
            run_launch(self._programs[launch.name], launch, memory, order)


def run_launch(program: Program, launch: Launch, memory: GlobalMemory, order: Order | None) -> None:
    """All CTAs of a launch, in batches."""
    shared = program.kernel.static_shared_bytes + launch.dynamic_shared_bytes
    geometry = Geometry(launch.grid, launch.block, launch.cluster, shared, launch.parameters)
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise PtxError(f"the grid {launch.grid} is no multiple of the cluster {launch.cluster}")
    clusters = int(np.prod(launch.grid)) // geometry.cluster_ctas
    indices, batch = list(range(clusters)), 1
    if order is None:
        batch = max(1, _MAX_LANES // (geometry.cluster_ctas * geometry.threads))
    else:
        order.rng.shuffle(indices)
    for start in range(0, clusters, batch):
        Machine(program, geometry, memory, indices[start : start + batch], order).run()


@cache
def emulated(
    compile: Callable[..., Any], config: Any, architecture: str = "sm_90a", seed: int | None = None
) -> Emulated:
    """`compile(config, architecture, options)`, as `CompiledKernels` have it, for the CPU; compiled once."""
    with tempfile.TemporaryDirectory() as directory:
        compiled = compile(config, architecture, f"--keep-ptx --dump-dir {directory}")
        ptx = compiled.__ptx__
    kernels = parse(ptx)
    sizes = {name: kernel.parameter_bytes for name, kernel in kernels.items()}
    return Emulated(ptx, HostLauncher(compiled, sizes), kernels, seed)


class EmulatedKernels:
    """In place of an op's `KernelCache`: its launchers run on the CPU, under the schedule of `seed`."""

    def __init__(
        self, kernels: CompiledKernels, architecture: str = "sm_90a", seed: int | None = None
    ) -> None:
        self._kernels, self._architecture, self._seed = kernels, architecture, seed

    def prepare(self, configs: Iterable[Any]) -> None:
        for config in configs:
            self.launcher(config)

    def launcher(self, config: Any) -> Emulated:
        """The configuration's kernel on the CPU."""
        return emulated(self._kernels.compile, config, self._architecture).with_seed(self._seed)
