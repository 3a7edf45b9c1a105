# SPDX-License-Identifier: Apache-2.0
"""Times `k3_kda_verify`: python -m benchmarks.kda --out benchmarks/results/kda_h200.json

Method. A CUDA graph holds back-to-back calls over copies of a layer, as many as make 240 MB of distinct bytes
for the copy at that N (283 / 164 / 90 / 48 at N 1 / 2 / 4 / >= 8), so every call finds its states, records,
rows and weights in HBM; slots and pending counts are shared by the layers, as in a model. The graphs of all
arms are replayed in turn; a figure is the median over turns of replay time / calls, the spread the distance
between the quartiles. Every implementation is first compared with float64 and the copy must reach 3.6 TB/s
at N 64; else no figure is printed.

Arms. `records`: the op, from projection rows to gated output. `copy`: the same bytes copied, the best of
several launch shapes. `fla_states`, `fla_replay`: fla-core's fused_recurrent_kda alone (no f_b, convolution
or output norm), keeping the state of every token, or running 7 accepted tokens again before the 8.
`after_predecessor`: us that the op adds behind a kernel that writes its rows, over 12 copies of a layer.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops import packs
from tensorrt_llm._torch.modules.kda.ops.catalog import OPS
from tensorrt_llm._torch.modules.kda.ops.compiled import KernelCache
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    HEAD_DIM,
    VerifyInputs,
    VerifyShape,
    as_float64,
    make_inputs,
    move,
)
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import VerifyConfig
from tensorrt_llm._torch.modules.kda.ops.selection import architecture_of

MIN_COPY_TB_PER_S = 3.6
TURNS = 20
PREDECESSOR_COPIES = 12
SOURCES = (
    "k3_kda_verify/cute.py", "k3_kda_verify/cute_body.py", "k3_kda_verify/cute_primitives.py",
    "k3_kda_verify/launch.py", "k3_kda_verify/triton.py", "k3_kda_verify/reference.py",
)  # fmt: skip
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. p: drafts replayed per request, or "mixed" (3, 4 .. 7, 0 .. in turn)."""

    op: str
    arm: str
    implementation: str
    n: int
    h: int
    t: int
    p: int | str
    us: float
    us_spread: float
    bytes: int
    source_hash: str


def layer_copies(requests: int) -> int:
    """Copies of a layer in a graph: enough for 240 MB of distinct bytes."""
    return {1: 283, 2: 164, 3: 120, 4: 90}.get(requests, 48 if requests >= 8 else 64)


def pending_counts(requests: int, p: int | str) -> list[int]:
    """Drafts to replay per request."""
    return [(3 + i) % 8 for i in range(requests)] if p == "mixed" else [int(p)] * requests


def algorithm_bytes(requests: int, heads: int, tokens: int, p: int | str) -> int:
    """Fewest bytes a call moves: states, rows, outputs, conv columns, records, the layer's weights once."""
    D, K = heads * HEAD_DIM, HEAD_DIM
    state = 2 * heads * K * K * 4
    rows = tokens * (4 * D + K + heads) * 2 + tokens * D * 2
    conv = 3 * D * 4 * (3 + tokens + 2)
    records = 3 * D * 4 * (tokens - 1)
    weights = D * K * 2 + 3 * D * 4 * 4 + D * 4 + heads * 4 + K * 4
    replayed = 3 * D * 4 * sum(pending_counts(requests, p))
    return requests * (state + rows + conv + records) + replayed + weights


def make_layers(shape: VerifyShape, copies: int, p: int | str, device: str = "cuda") -> list[VerifyInputs]:
    """Copies of a layer, drawn on the device; slots and pending counts are one tensor each."""
    first = make_inputs(shape, device=device)
    pending = torch.zeros_like(first.pending)
    pending[first.slots.long()] = torch.tensor(
        pending_counts(shape.requests, p), dtype=torch.int32, device=device
    )
    layers = []
    for _ in range(copies):
        layer = move(first, device)
        fields = {f: getattr(layer, f) for f in VerifyInputs.__dataclass_fields__}
        fields["proj"] = torch.randn_like(layer.proj)
        fields["ssm"] = torch.randn_like(layer.ssm)
        layers.append(VerifyInputs(**{**fields, "slots": first.slots, "pending": pending}))
    return layers


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of the calls in order; they have all run once before."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_interleaved(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, tuple[float, float]]:
    """Median us and quartile distance per call of every graph, replayed in turn."""
    events = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    figures = {}
    for name, pairs in events.items():
        times = [1e3 * start.elapsed_time(end) / calls for start, end in pairs]
        low, median, high = statistics.quantiles(times, n=4)
        figures[name] = (median, high - low)
    return figures


def verify_arms(
    layers: list[VerifyInputs], implementations: dict[str, Callable[..., Any]]
) -> dict[str, list[Call]]:
    return {
        name: [partial(run, *layer.arguments()) for layer in layers] for name, run in implementations.items()
    }


def copy_arms(num_bytes: int, copies: int) -> dict[str, list[Call]]:
    """Copies of num_bytes / 2 from one place to another, in several launch shapes."""
    import triton

    from benchmarks._copy import copy_kernel

    words = -(-num_bytes // 2 // 4 // 4096) * 4096
    source = torch.randn(copies, words, device="cuda")
    target = torch.empty_like(source)
    arms: dict[str, list[Call]] = {
        "copy/torch": [lambda i=i: target[i].copy_(source[i]) for i in range(copies)]
    }
    for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 8)):
        grid = (triton.cdiv(words, block),)
        arms[f"copy/{block}x{warps}"] = [
            lambda i=i, grid=grid, block=block, warps=warps: copy_kernel[grid](
                source[i], target[i], words, BLOCK=block, num_warps=warps
            )
            for i in range(copies)
        ]
    return arms


def fla_arms(shape: VerifyShape, copies: int) -> dict[str, list[Call]]:
    """fla-core's recurrence on activated inputs, states in HBM."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    n, t, h = shape.requests, shape.tokens, shape.heads
    arms: dict[str, list[Call]] = {"fla_states": [], "fla_replay": []}
    for _ in range(copies):
        for name, tokens, states in (("fla_states", t, t), ("fla_replay", t + 7, 1)):
            q, k, v = (torch.randn(1, n * tokens, h, HEAD_DIM, device="cuda").bfloat16() for _ in range(3))
            g = -torch.rand(1, n * tokens, h, HEAD_DIM, device="cuda")
            beta = torch.rand(1, n * tokens, h, device="cuda")
            pool = torch.randn(n * states, h, HEAD_DIM, HEAD_DIM, device="cuda")
            starts = torch.arange(0, n * tokens + 1, tokens, device="cuda", dtype=torch.int32)
            index = torch.arange(n * states, device="cuda", dtype=torch.int32).view(n, states)
            accepted = torch.ones(n, device="cuda", dtype=torch.int32)
            keywords: dict[str, Any] = {
                "cu_seqlens": starts,
                "use_qk_l2norm_in_kernel": True,
                "state_v_first": True,
            }
            if states > 1:
                keywords |= {
                    "ssm_state_indices": index,
                    "num_accepted_tokens": accepted,
                    "inplace_final_state": True,
                }
            else:
                keywords |= {"inplace_final_state": False, "output_final_state": True}
            arms[name].append(
                lambda args=(q, k, v, g, beta), pool=pool, keywords=keywords: fused_recurrent_kda_fwd(
                    *args, initial_state=pool, **keywords
                )
            )
    return arms


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||, infinite for anything not finite."""
    difference = (value.double().cpu() - reference.double().cpu()).norm() / reference.double().cpu().norm()
    return float(difference) if difference.isfinite() else float("inf")


def check(run: Callable[..., Any], shape: VerifyShape) -> dict[str, float]:
    """Errors of one round against the float64 reference."""
    entry = OPS["k3_kda_verify"]
    inputs = make_inputs(shape, device="cuda")
    exact = as_float64(inputs)
    want = entry.reference(*exact.arguments())
    got = run(*inputs.arguments())
    errors = {"output": relative_error(got, want)}
    for name, tensor in inputs.mutable().items():
        errors[name] = relative_error(tensor, exact.mutable()[name])
    return errors


def within_tolerance(errors: dict[str, float]) -> bool:
    tolerance = OPS["k3_kda_verify"].tolerance
    return errors["output"] <= tolerance.output and all(
        error <= tolerance.folded for name, error in errors.items() if name != "output"
    )


def parse_variant(text: str) -> VerifyConfig:
    """split2_late, split1_nopdl, split1_serial."""
    return VerifyConfig(
        split=int(text[5]),
        pdl="nopdl" not in text,
        late_trigger="late" in text,
        chunked="serial" not in text,
    )


def implementations(names: Sequence[str], pack: Path | None) -> dict[str, Callable[..., Any]]:
    """The op's implementations by name; `cute/split4` fixes the launch, `cute/split1_serial` the form too."""
    entry = OPS["k3_kda_verify"]
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        base, _, variant = name.partition("/")
        run = entry.implementation(base).load()
        if base == "cute":
            architecture = architecture_of(torch.device("cuda"))
            opened = packs.open_pack(pack, architecture, entry.name, entry.kernel_sources) if pack else None
            run = run(KernelCache(entry.kernels, opened))
            if variant:
                config = parse_variant(variant)
                run = lambda *args, run=run, config=config: run(*args, config=config)  # noqa: E731
        elif variant == "serial":
            run = lambda *args, run=run: run(*args, chunked=False)  # noqa: E731
        found[name] = run
    return found


def measure(
    n: int, h: int, t: int, p: int | str, runs: dict[str, Callable[..., Any]], fla: bool
) -> list[Row]:
    """Every arm at one size."""
    shape = VerifyShape(requests=n, tokens=t, heads=h)
    copies, size = layer_copies(n), algorithm_bytes(n, h, t, p)
    arms = {
        f"records/{name}": calls for name, calls in verify_arms(make_layers(shape, copies, p), runs).items()
    }
    arms |= copy_arms(size, copies)
    if fla:
        arms |= fla_arms(shape, copies)
    figures = time_interleaved({name: capture(calls) for name, calls in arms.items()}, copies)
    shapes_of_copy = [name for name in figures if name.startswith("copy/")]
    best = min(shapes_of_copy, key=lambda name: figures[name][0])
    digest = packs.source_hash(SOURCES)[:16]
    return [
        Row(
            op="k3_kda_verify", arm=name.split("/")[0], implementation=name.partition("/")[2], n=n, h=h,
            t=t, p=p,
            us=round(us, 3), us_spread=round(spread, 3), bytes=size, source_hash=digest,
        )
        for name, (us, spread) in figures.items()
        if name == best or name not in shapes_of_copy
    ]  # fmt: skip


def after_predecessor(n: int, h: int, t: int, p: int | str, runs: dict[str, Callable[..., Any]]) -> list[Row]:
    """What a layer adds behind a kernel that writes its rows: 12 copies, with less those kernels alone."""
    layers = make_layers(VerifyShape(requests=n, tokens=t, heads=h), PREDECESSOR_COPIES, p)
    sources = [layer.proj.clone() for layer in layers]

    def writers() -> list[Call]:
        return [partial(layer.proj.copy_, source) for layer, source in zip(layers, sources, strict=True)]

    graphs = {"alone": capture(writers())}
    for name, run in runs.items():
        calls = [partial(run, *layer.arguments()) for layer in layers]
        graphs[name] = capture([call for pair in zip(writers(), calls, strict=True) for call in pair])
    figures = time_interleaved(graphs, PREDECESSOR_COPIES)
    alone = figures.pop("alone")[0]
    return [
        Row(
            op="k3_kda_verify", arm="after_predecessor", implementation=name, n=n, h=h, t=t, p=p,
            us=round(us - alone, 3), us_spread=round(spread, 3), bytes=algorithm_bytes(n, h, t, p),
            source_hash=packs.source_hash(SOURCES)[:16],
        )
        for name, (us, spread) in figures.items()
    ]  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """us by N, one column per arm."""
    columns = list(dict.fromkeys(f"{row.arm}/{row.implementation}".rstrip("/") for row in rows))
    columns = list(dict.fromkeys("copy" if name.startswith("copy") else name for name in columns))
    lines = ["| N | H | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for n, h in dict.fromkeys((row.n, row.h) for row in rows):
        cells = []
        for column in columns:
            hits = [
                row for row in rows
                if (row.n, row.h) == (n, h)
                and ("copy" if row.arm == "copy" else f"{row.arm}/{row.implementation}".rstrip("/")) == column
            ]  # fmt: skip
            cells.append(f"{hits[0].us:.2f}" if hits else "")
        lines.append(f"| {n} | {h} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kda", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--pack", type=Path, help="kernel pack; without it the DSL compiles")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--h", type=int, nargs="+", default=[6])
    parser.add_argument("--t", type=int, default=8)
    parser.add_argument("--p", default="mixed")
    parser.add_argument("--implementations", nargs="+", default=["cute", "triton"])
    parser.add_argument("--fla", action="store_true", help="add fla-core's recurrence")
    options = parser.parse_args(argv)
    runs = implementations(options.implementations, options.pack)
    for name, run in runs.items():
        errors = check(run, VerifyShape(requests=5, tokens=options.t, heads=2))
        if not within_tolerance(errors):
            print(f"no figures: {name} is wrong: {errors}", file=sys.stderr)
            return 1
    rows: list[Row] = []
    p: int | str = options.p if options.p == "mixed" else int(options.p)
    for h in options.h:
        for n in options.n:
            rows += measure(n, h, options.t, p, runs, options.fla)
            rows += after_predecessor(n, h, options.t, p, runs)
            torch.cuda.empty_cache()
    for row in rows:
        rate = row.bytes / row.us / 1e6
        if row.arm == "copy" and row.n == 64 and rate < MIN_COPY_TB_PER_S:
            print(f"no figures: the copy at N 64 reaches {rate:.2f} TB/s", file=sys.stderr)
            return 1
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
        options.out.write_text('{"rows": [\n  ' + lines + "\n]}\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
