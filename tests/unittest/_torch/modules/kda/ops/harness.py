# SPDX-License-Identifier: Apache-2.0
"""What the tests of the KDA ops share: implementations, errors, a float64 twin of a chain of rounds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    Inputs,
    RoundInputs,
    VerifyInputs,
    VerifyShape,
    as_float64,
    make_inputs,
    make_rows,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig
from tensorrt_llm._torch.modules.kda.ops.registry import CUTE_ARCHITECTURES
from tensorrt_llm._torch.modules.kda.ops.selection import architecture_of
from tensorrt_llm.envs import kernel_pack

VERIFY = OPS["k3_kda_verify"]
TOLERANCE = VERIFY.tolerance
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates where a GPU rounds to bf16.
OUTPUT_TOLERANCE = TOLERANCE.output * (1 if DEVICE == "cuda" else 2)
CUTE_LAUNCHES = tuple(VerifyConfig(split=split) for split in (1, 2, 4, 8))

Run = Callable[..., Tensor]


def verify_runs() -> list[Any]:
    """pytest parameters: what can run here, named. On a GPU the CuTe kernel comes in every launch."""
    names = ["torch", "triton"]
    if DEVICE == "cuda" and architecture_of(torch.device("cuda")) in CUTE_ARCHITECTURES:
        names = ["triton", *(f"cute-split{config.split}" for config in CUTE_LAUNCHES)]
    return [pytest.param(name, id=name) for name in names]


def load_run(name: str) -> Run:
    """The callable behind a name of `verify_runs`."""
    base, _, launch = name.partition("-")
    run = VERIFY.implementation(base).load()
    if base != "cute":
        return run
    directory = kernel_pack()
    architecture = architecture_of(torch.device("cuda"))
    pack = packs.open_pack(directory, architecture, VERIFY.name, VERIFY.kernel_sources) if directory else None
    compiled = run(KernelCache(VERIFY.kernels, pack))
    base_config = VerifyConfig(split=int(launch[5]))

    def call(*arguments: Any) -> Tensor:
        external = len(arguments) > 19 and arguments[19] is not None
        return compiled(*arguments, config=replace(base_config, external_gate=external))

    return call


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||; anything not finite is infinitely wrong."""
    wanted = reference.detach().double().cpu()
    difference = (value.detach().double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float(difference) if difference.isfinite() else float("inf")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def output_error(value: Tensor, reference: Tensor) -> float:
    """Error of an output against float64 rounded to the output's dtype, so that rounding mostly cancels."""
    return relative_error(value, reference.to(value.dtype))


def shape_of(requests: int, tokens: int, heads: int = 2, **sizes: int) -> VerifyShape:
    return VerifyShape(requests=requests, tokens=tokens, heads=heads, **sizes)


def with_gate(inputs: Inputs, exact: Inputs) -> Inputs:
    """The inputs with the twin's f_b product, so that its rounding is the same on both sides."""
    assert exact.g_ext is not None
    return replace(inputs, g_ext=exact.g_ext.to(inputs.proj.dtype).to(inputs.proj.device))


def assert_close(
    inputs: RoundInputs, output: Tensor, exact: RoundInputs, want: Tensor, *, state: float
) -> None:
    """Outputs, states and drafts within tolerance; conv columns, copies of inputs, exactly."""
    assert output_error(output, want) <= OUTPUT_TOLERANCE
    used = inputs.slots[inputs.slots >= 0].long().cpu()
    assert relative_error(inputs.ssm.cpu()[used], exact.ssm[used]) <= state
    for name, tensor in inputs.mutable().items():
        if name in inputs.DRAFTS:
            assert relative_error(tensor.cpu()[used], getattr(exact, name)[used]) <= 10 * state, name
        elif name != "ssm":
            assert relative_error(tensor, getattr(exact, name)) == 0.0, name


@dataclass
class Chain:
    """Rounds of one implementation and of its float64 twin, on the same rows, with the same acceptances."""

    run: Run
    inputs: VerifyInputs
    exact: VerifyInputs
    generator: torch.Generator

    @classmethod
    def start(cls, run: Run, shape: VerifyShape, seed: int = 0) -> "Chain":
        inputs = make_inputs(shape, seed=seed, device=DEVICE)
        inputs.pending.zero_()
        return cls(run, inputs, as_float64(inputs), torch.Generator().manual_seed(seed + 1))

    def round(self, tokens: int) -> tuple[Tensor, Tensor]:
        """One round of `tokens` for every request on fresh rows; (output, float64 output)."""
        requests = self.inputs.slots.shape[0]
        shape = VerifyShape(requests=requests, tokens=tokens, heads=self.inputs.a_log.shape[0])
        rows = make_rows(shape, self.generator)
        inputs = replace(self.inputs, proj=rows.to(DEVICE), g_ext=None)
        exact = as_float64(replace(inputs, proj=rows))
        # The twin keeps its own pools; only rows, gate and counts come from the round.
        exact = replace(exact, **self.exact.mutable())
        want = VERIFY.reference(*exact.arguments())
        return self.run(*with_gate(inputs, exact).arguments()), want

    def accept(self, counts: list[int]) -> None:
        """Store the accepted drafts of every request."""
        slots = self.inputs.slots.long()
        self.inputs.pending[slots] = torch.tensor(counts, dtype=torch.int32, device=slots.device)

    def state_error(self) -> float:
        used = self.inputs.slots.long().cpu()
        return relative_error(self.inputs.ssm.cpu()[used], self.exact.ssm[used])


def chain_schedule(requests: int, lengths: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
    """(T, acceptances) of each round: requests differ, and over the rounds every count comes."""
    for index, tokens in enumerate(lengths):
        yield tokens, [(index + request) % tokens for request in range(requests)]
