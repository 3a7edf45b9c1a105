# SPDX-License-Identifier: Apache-2.0
"""What an op is made of: its reference, its implementations, its inputs, shapes and tolerances.

`catalog.OPS` lists the ops; nothing here imports a kernel module.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Name = Literal["torch", "fla", "triton", "cute"]

# Targets of the CuTe DSL kernels. `a`: the code runs on exactly that architecture.
CUTE_ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest ||x - ref|| / ||ref|| against float64, and why it is not smaller.

    output: beyond what rounding the result to bf16 costs. state: after one round. chained: after 500 rounds.
    folded: states when f_b is folded in, whose bf16 rounding may fall the other way for a few channels.
    """

    output: float
    state: float
    chained: float
    folded: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to run an op. `load` imports it and returns a callable with the op's arguments.

    For "cute" it returns what makes that callable from the op's `compiled.KernelCache`.
    architectures: where it runs; "cpu", "cuda" (any CUDA device) or names of CUDA architectures.
    sources: the files whose text decides what it computes, relative to this package.
    """

    name: Name
    architectures: tuple[str, ...]
    load: Callable[[], Callable[..., Any]]
    sources: tuple[str, ...]

    def runs_on(self, architecture: str) -> bool:
        any_cuda = architecture != "cpu" and "cuda" in self.architectures
        return any_cuda or architecture in self.architectures


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernels:
    """What `trtllm-kernels` builds of an op.

    configs(measurements) -> what kernels are specialised for: frozen dataclasses with a `name` that is the
    kernel's symbol; with `measurements`, those that only benchmarks run too.
    compile(config, arch, options) -> the launcher, for `arch` (None: this machine's GPU); imports the DSL.
    """

    configs: Callable[[bool], Iterable[Any]]
    compile: Callable[[Any, str | None, str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEntry:
    """An op: `implementations` run from the fastest to the one that runs everywhere, the reference.

    make_inputs(shape, seed=, device=) -> inputs with `arguments()` in the op's order and `mutable()`.
    `shapes`: the ones that tests and receipts must cover. `kernels`: of the "cute" implementation.
    """

    name: str
    reference: Callable[..., Any]
    implementations: tuple[Implementation, ...]
    make_inputs: Callable[..., Any]
    shapes: tuple[Any, ...]
    tolerance: Tolerance
    kernels: CompiledKernels | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Every implementation's."""
        return tuple(sorted({source for found in self.implementations for source in found.sources}))

    @property
    def kernel_sources(self) -> tuple[str, ...]:
        """What a pack of this op is compiled from; () for an op without kernels."""
        return self.implementation("cute").sources if self.kernels is not None else ()

    def implementation(self, name: str) -> Implementation:
        """The implementation of this name; ValueError names those there are."""
        for candidate in self.implementations:
            if candidate.name == name:
                return candidate
        known = ", ".join(candidate.name for candidate in self.implementations)
        raise ValueError(f"{self.name} has no implementation {name!r}: choose one of {known}")
