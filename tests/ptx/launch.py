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
from tests.ptx.races import RaceLog, Shadow

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
        self._run(arguments, check=False)

    def races(self, *arguments: Any) -> list[str]:
        """Runs it, slower, and returns the races found, in words; accesses of two launches do not race."""
        return self._run(arguments, check=True)

    def _run(self, arguments: tuple[Any, ...], check: bool) -> list[str]:
        memory = GlobalMemory([x for x in arguments if isinstance(x, torch.Tensor)])
        found = []
        for launch in self.launcher.launches(arguments):
            if launch.name not in self._programs:
                self._programs[launch.name] = Program(self._kernels[launch.name])
            program = self._programs[launch.name]
            order = None if self.seed is None else Order(np.random.default_rng(self.seed), self._apart)
            log = RaceLog(Shadow(memory.size, program.unit)) if check else None
            run_launch(program, launch, memory, order, log)
            found += log.messages(program.kernel.instructions) if log is not None else []
        return found


def run_launch(
    program: Program,
    launch: Launch,
    memory: GlobalMemory,
    order: Order | None = None,
    log: RaceLog | None = None,
) -> None:
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
        Machine(program, geometry, memory, indices[start : start + batch], order, log).run()


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
    """In place of an op's `KernelCache`: its launchers run on the CPU.

    `seed`: the schedule. `check_races`: calls raise PtxError for the races that they find.
    """

    def __init__(
        self,
        kernels: CompiledKernels,
        architecture: str = "sm_90a",
        seed: int | None = None,
        check_races: bool = False,
    ) -> None:
        self._kernels, self._architecture, self._seed = kernels, architecture, seed
        self._check = check_races

    def prepare(self, configs: Iterable[Any]) -> None:
        for config in configs:
            self.launcher(config)

    def launcher(self, config: Any) -> Callable[..., None]:
        """The configuration's kernel on the CPU."""
        run = emulated(self._kernels.compile, config, self._architecture).with_seed(self._seed)
        if not self._check:
            return run

        def checked(*arguments: Any) -> None:
            if races := run.races(*arguments):
                raise PtxError(f"{len(races)} races: " + "; ".join(races))

        return checked
