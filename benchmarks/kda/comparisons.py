# SPDX-License-Identifier: Apache-2.0
"""What is measured beside what: the arms of each comparison at a size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.kda import sizes
from benchmarks.kda.inputs import Arguments, Layers, make_layers
from benchmarks.kda.rows import AFTER_PREDECESSOR, YARDSTICKS
from benchmarks.kda.runs import (
    Machine,
    checked_run,
    get_entry,
    implementation_names,
    small_size,
)
from benchmarks.kda.sizes import Size
from benchmarks.kda.timing import Call
from benchmarks.kda.yardsticks import (
    REPLAYED_DRAFTS,
    check_fla,
    copy_calls,
    copy_memory,
    copy_names,
    fla_chunk_call,
    fla_recurrent_call,
    prompt_logits,
    read_calls,
    read_names,
    write_rows,
)

PREDECESSOR_COPIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One sequence of calls to be timed. `make` allocates and warms nothing until it is called.

    copies: the calls that a graph holds, as layers. op: what the rows are filed under. Not captured: launched
    one by one, as prompts are.
    """

    op: str
    name: str
    implementation: str
    make: Callable[[], list[Call]]
    copies: int
    bytes: int
    tokens: int = 0
    is_captured: bool = True

    @property
    def label(self) -> str:
        return f"{self.op} {self.name} {self.implementation}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpArm:
    """An arm that is an op of the catalog: its name, fewest bytes, tokens and inputs' options."""

    name: str
    op: str
    num_bytes: Callable[[Size], int]
    replays_tokens: bool = False
    is_captured: bool = True
    conv_dtype: torch.dtype | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.conv_dtype is None else {"conv_dtype": self.conv_dtype}

    def tokens(self, size: Size) -> int:
        """Tokens computed in a call, those that are computed again included."""
        return size.n * size.t + (size.replayed if self.replays_tokens else 0)


VERIFY_ARMS = (
    OpArm(name="records", op="k3_kda_verify", num_bytes=sizes.records_bytes),
    OpArm(name="replay", op="kda_mtp_decode", num_bytes=sizes.replay_bytes, replays_tokens=True),
    OpArm(name="intermediate", op="kda_intermediate_verify", num_bytes=sizes.intermediate_bytes),
    OpArm(
        name="records_bf16_conv",
        op="k3_kda_verify",
        num_bytes=partial(sizes.records_bytes, conv_bytes=2),
        conv_dtype=torch.bfloat16,
    ),
)
DECODE_ARM = OpArm(name="decode", op="kda_decode", num_bytes=sizes.decode_bytes)
PREFILL_ARM = OpArm(name="prefill", op="kda_prefill", num_bytes=sizes.prefill_bytes, is_captured=False)


def names_of(arm: OpArm, machine: Machine) -> list[str]:
    """The implementations to measure; [""] for an op without any, whose arm then says so."""
    try:
        return implementation_names(arm.op, machine, arm.conv_dtype is torch.bfloat16)
    except ValueError:
        return [""]


def required(op: str, machine: Machine) -> str:
    """The first implementation; ValueError says why there is none."""
    return implementation_names(op, machine)[0]


def op_arms(arm: OpArm, size: Size, copies: int, machine: Machine) -> Iterator[Arm]:
    """The op's implementations over one set of layers, each checked before its calls are made."""
    shared: list[Layers] = []

    def make(name: str) -> list[Call]:
        run = checked_run(
            arm.op, name or required(arm.op, machine), small_size(size), machine, arm.conv_dtype
        )
        if not shared:
            shared.append(make_layers(get_entry(arm.op), size, copies, machine.device, **arm.options))
        calls: list[Call] = [partial(run, *x.values()) for x in shared[0].arguments]
        return [*calls, *promotion(arm, shared[0], size, name, machine)]

    for name in names_of(arm, machine):
        yield Arm(
            op=arm.op, name=arm.name, implementation=name, make=partial(make, name), copies=copies,
            bytes=arm.num_bytes(size), tokens=arm.tokens(size), is_captured=arm.is_captured,
        )  # fmt: skip


def promotion(arm: OpArm, layers: Layers, size: Size, name: str, machine: Machine) -> list[Call]:
    """Behind rounds that keep intermediate states: the accepted one made the state, in all layers at once."""
    if arm.op != "kda_intermediate_verify" or not size.replayed:
        return []
    have = implementation_names("kda_promote", replace(machine, implementations=()))
    base = name.partition("/")[0]
    run = checked_run("kda_promote", base if base in have else have[0], small_size(size), machine)
    counts = torch.tensor(sizes.pending_counts(size.n, size.p), dtype=torch.int32, device=machine.device)
    tensors = [layers.stacked[part] for part in ("ssm", "cs_q", "cs_k", "cs_v", "intermediate")]
    return [partial(run, *tensors, layers.arguments[0]["slots"], counts)]


def predecessor_arms(arm: OpArm, size: Size, machine: Machine) -> Iterator[Arm]:
    """The op behind a kernel that writes its rows; `implementation` "" is that kernel alone."""
    shared: list[Layers] = []

    def make(name: str) -> list[Call]:
        entry = get_entry(arm.op)
        if not shared:
            shared.append(make_layers(entry, size, PREDECESSOR_COPIES, machine.device, **arm.options))
        rows = shared[0].stacked["proj"]
        writers: list[Call] = [partial(write_rows, x.clone(), x) for x in rows]
        if not name:
            return writers
        run = checked_run(arm.op, name, small_size(size), machine, arm.conv_dtype)
        calls = [partial(run, *x.values()) for x in shared[0].arguments]
        return [call for pair in zip(writers, calls, strict=True) for call in pair]

    for name in dict.fromkeys(("", *names_of(arm, machine))):
        yield Arm(
            op=arm.op, name=AFTER_PREDECESSOR, implementation=name, make=partial(make, name),
            copies=PREDECESSOR_COPIES, bytes=arm.num_bytes(size), tokens=arm.tokens(size),
        )  # fmt: skip


def copy_arms(op: str, num_bytes: int, copies: int, device: str) -> Iterator[Arm]:
    """Copies of as many bytes as the op moves, in several launches."""
    memory: list[dict[str, list[Call]]] = []

    def make(name: str) -> list[Call]:
        if not memory:
            memory.append(copy_calls(*copy_memory(num_bytes, copies, device)))
        return memory[0][name]

    for name in copy_names(device):
        yield Arm(
            op=op, name="copy", implementation=name, make=partial(make, name), copies=copies, bytes=num_bytes
        )


def verify_arms(size: Size, machine: Machine) -> Iterator[Arm]:
    copies = machine.copies or sizes.layer_copies(size.n)
    for arm in VERIFY_ARMS:
        yield from op_arms(arm, size, copies, machine)
    for name, tokens, states in (
        ("fla_states", size.t, size.t),
        ("fla_replay", size.t + REPLAYED_DRAFTS, 1),
    ):

        def make(tokens: int = tokens, states: int = states) -> list[Call]:
            check_fla(machine.device)
            return [fla_recurrent_call(size, tokens, states, machine.device) for _ in range(copies)]

        yield Arm(
            op="k3_kda_verify", name=name, implementation="", make=make, copies=copies,
            bytes=size.n * (1 + states) * sizes.state_bytes(size) // 2, tokens=size.n * tokens,
        )  # fmt: skip
    yield from copy_arms("k3_kda_verify", sizes.records_bytes(size), copies, machine.device)
    for arm in VERIFY_ARMS[:3]:
        yield from predecessor_arms(arm, size, machine)


def decode_arms(size: Size, machine: Machine) -> Iterator[Arm]:
    copies = machine.copies or sizes.layer_copies(size.n)
    yield from op_arms(DECODE_ARM, size, copies, machine)
    yield from copy_arms("kda_decode", sizes.decode_bytes(size), copies, machine.device)
    yield from predecessor_arms(DECODE_ARM, size, machine)


def prefill_arms(size: Size, machine: Machine) -> Iterator[Arm]:
    num_bytes = sizes.prefill_bytes(size)
    copies = machine.copies or sizes.copies_of(num_bytes)
    yield from op_arms(PREFILL_ARM, size, copies, machine)

    def make() -> list[Call]:
        check_fla(machine.device)
        return [fla_chunk_call(prompt_logits(size, machine.device)) for _ in range(copies)]

    yield Arm(
        op="kda_prefill", name="fla_core", implementation="", make=make, copies=copies, bytes=num_bytes,
        tokens=size.n * size.t, is_captured=False,
    )  # fmt: skip
    yield from copy_arms("kda_prefill", num_bytes, copies, machine.device)


def attn_arms(size: Size, machine: Machine) -> Iterator[Arm]:
    """The op, its two halves one after the other, and what they cannot go below."""
    op, shared = get_entry("k3_kda_attn").name, list[Layers]()
    hidden, columns = sizes.HIDDEN, sizes.projection_columns(size)
    num_bytes = sizes.projection_bytes(columns, hidden, size.t) + sizes.records_bytes(size)
    copies = machine.copies or sizes.copies_of(num_bytes)
    arm = OpArm(name="attn", op=op, num_bytes=lambda _: num_bytes)
    yield from op_arms(arm, size, copies, machine)

    def layers() -> Layers:
        if not shared:
            shared.append(make_layers(get_entry(op), size, copies, machine.device))
        return shared[0]

    def projection_then_verify(name: str) -> list[Call]:
        run = checked_run("k3_kda_verify", name, small_size(size), machine)
        names = [
            name for name in signature(get_entry("k3_kda_verify").reference).parameters if name != "g_ext"
        ]

        def call(arguments: Arguments) -> object:
            rows = {"proj": F.linear(arguments["x"], arguments["w"])}
            return run(*(rows[name] if name in rows else arguments[name] for name in names))

        return [partial(call, arguments) for arguments in layers().arguments]

    for name in implementation_names("k3_kda_verify", machine):
        yield Arm(
            op=op, name="projection_then_verify", implementation=name, copies=copies, bytes=num_bytes,
            make=partial(projection_then_verify, name), tokens=size.n * size.t,
        )  # fmt: skip
    for name in read_names(machine.device):
        yield Arm(
            op=op, name="weight_pass", implementation=name, copies=copies, bytes=2 * columns * hidden,
            make=lambda name=name: read_calls(layers().stacked["w"])[name],
        )  # fmt: skip
    yield from copy_arms(op, sizes.records_bytes(size), copies, machine.device)


ARM_NAMES = (
    *(arm.name for arm in (*VERIFY_ARMS, DECODE_ARM, PREFILL_ARM)),
    *("attn", "projection_then_verify", "fla_states", "fla_replay", "fla_core"),
    *YARDSTICKS,
    AFTER_PREDECESSOR,
)
COMPARISONS: dict[str, Callable[[Size, Machine], Iterator[Arm]]] = {
    "verify": verify_arms,
    "decode": decode_arms,
    "attn": attn_arms,
    "prefill": prefill_arms,
}
OPS_OF: dict[str, tuple[str, ...]] = {
    "verify": tuple(dict.fromkeys(arm.op for arm in VERIFY_ARMS)),
    "decode": ("kda_decode",),
    "attn": ("k3_kda_attn",),
    "prefill": ("kda_prefill",),
}


def comparison_of(name: str) -> str:
    """The comparison of this name, or the one that measures the op of this name; ValueError names them."""
    for comparison, ops in OPS_OF.items():
        if name == comparison or name in ops:
            return comparison
    known: Sequence[str] = [*OPS_OF, *(op for ops in OPS_OF.values() for op in ops)]
    raise ValueError(f"nothing measures {name!r}: choose from {', '.join(dict.fromkeys(known))}")
