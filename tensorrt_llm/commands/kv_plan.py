# SPDX-License-Identifier: Apache-2.0
"""`trtllm-kv-plan MODEL`: what fits before a GPU is bought, from the allocator's own code.

trtllm-kv-plan kimi-k3 --tp 16 --gpu-memory 141GB
trtllm-kv-plan kimi-k3 --gpu-memory 141GB --sweep tp=16,32 drafts=1,3,7 batch=1..64 --csv capacity.csv
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tensorrt_llm import logger
from tensorrt_llm.planning import sweep as sweeping
from tensorrt_llm.planning.models import BUILT_IN, PlannedModel, find_model
from tensorrt_llm.planning.nearest import find_nearest
from tensorrt_llm.planning.plan import SCHEME_NAMES, SchemePlan, plan_scheme
from tensorrt_llm.planning.report import full_report
from tensorrt_llm.planning.request import GpuMemory, PlanRequest
from tensorrt_llm.planning.svg import split_picture
from tensorrt_llm.planning.sweep_svg import sweep_picture
from tensorrt_llm.planning.units import parse_bytes

EXIT_USAGE = 2


class Refusal(click.ClickException):
    """The configuration does not work, or the command line is wrong: one line on stderr."""

    exit_code = EXIT_USAGE


class _PlanCommand(click.Command):
    """Says what is wrong with the command line in one line; MODEL and axes may come in any order."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.UsageError as error:
            raise Refusal(error.format_message()) from None


class _Size(click.ParamType):
    """An amount of memory such as 15.35GiB, in bytes; `least` is 1, or 0 where nothing is an amount too."""

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(str(value), least=self._least)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Where results go beside the terminal."""

    as_json: bool
    svg: Path | None
    csv: Path | None


@click.command(cls=_PlanCommand, context_settings={"show_default": True})
@click.argument("words", nargs=-1, metavar="MODEL [AXIS=VALUES]...")
@click.option("--tp", default=1, help="Tensor parallel ranks, which share heads and experts.")
@click.option("--pp", default=1, help="Pipeline stages, which share layers.")
@click.option("--ep", default=1, help="Of the tensor ranks, how many share whole experts.")
@click.option("--drafts", default=7, help="Drafts of a verify round; 0 is no speculation.")
@click.option("--max-batch-size", default=8, help="Requests that run at once.")
@click.option("--max-seq-len", default=8192, help="Tokens of a request with its output.")
@click.option("--tokens-per-block", default=64, help="Tokens of an attention page.")
@click.option("--max-util", default=0.95, help="Share of the pools in use up to which a request resumes.")
@click.option("--max-tokens", type=int, help="Attention tokens to hold; may lower the quota.")
@click.option("--gpu-quota", type=_Size(), help="The cache's quota itself, such as 15.35GiB.")
@click.option("--gpu-memory", type=_Size(), help="Or a GPU's memory, less weights and workspace.")
@click.option("--free-fraction", default=0.9, help="With --gpu-memory: share of the rest for the cache.")
@click.option(
    "--workspace", type=_Size(0), default="4GB", help="With --gpu-memory: activations and the like."
)
@click.option(
    "--scheme", type=click.Choice([*SCHEME_NAMES, "all"]), default="all", help="How drafts are undone."
)
@click.option(
    "--kda-conv-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Element type of the extended conv windows.",
)
@click.option("--block-reuse", is_flag=True, help="Reuse caches between requests with a common start.")
@click.option(
    "--sweep",
    is_flag=True,
    help=f"Plan all combinations of AXIS=VALUES: {', '.join(sweeping.FIELD_OF_AXIS)}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print numbers as JSON instead of the report.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw the plan or sweep.")
@click.option(
    "--csv", type=click.Path(path_type=Path, dir_okay=False), help="With --sweep: write all points."
)
def main(
    words: tuple[str, ...],
    tp: int,
    pp: int,
    ep: int,
    drafts: int,
    max_batch_size: int,
    max_seq_len: int,
    tokens_per_block: int,
    max_util: float,
    max_tokens: int | None,
    gpu_quota: int | None,
    gpu_memory: int | None,
    free_fraction: float,
    workspace: int,
    scheme: str,
    kda_conv_dtype: str,
    block_reuse: bool,
    sweep: bool,
    as_json: bool,
    svg: Path | None,
    csv: Path | None,
) -> None:
    """Plan a rank's cache for MODEL: kimi-k3, kimi-linear-48b, a config.json or a checkpoint folder."""
    logger.set_level("error")
    outputs = _Outputs(as_json=as_json, svg=svg, csv=csv)
    schemes = SCHEME_NAMES if scheme == "all" else (scheme,)
    gpu = None
    if gpu_memory is not None:
        gpu = GpuMemory(total_bytes=gpu_memory, free_fraction=free_fraction, workspace_bytes=workspace)
    try:
        name, axes = _split_words(words, sweep)
        request = PlanRequest(
            tp=tp,
            pp=pp,
            ep=ep,
            drafts=drafts,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            tokens_per_block=tokens_per_block,
            max_util=max_util,
            block_reuse=block_reuse,
            kda_conv_dtype=kda_conv_dtype,
            gpu_quota_bytes=gpu_quota,
            gpu=gpu,
            max_tokens=max_tokens,
        )
        model = find_model(name)
        if sweep:
            _sweep(model, request, schemes, sweeping.parse_axes(axes), outputs)
        else:
            _plan(model, request, schemes, outputs)
    except ValueError as error:
        raise Refusal(_one_line(str(error))) from None


def _split_words(words: Sequence[str], sweep: bool) -> tuple[str, list[str]]:
    """The model's name and the axes. ValueError where there is not exactly one name."""
    axes = [word for word in " ".join(words).split() if sweep and sweeping.is_axis(word)] if sweep else []
    names = [word for word in words if not (sweep and all(map(sweeping.is_axis, word.split())))]
    if len(names) == 1:
        return names[0], axes
    if not names:
        raise ValueError(
            f"MODEL is missing: give {', '.join(BUILT_IN)}, a config.json or a checkpoint folder"
        )
    hint = "with --sweep, " if sweep else "axes need --sweep; "
    raise ValueError(
        f"{names[1]!r} is one word too many: {hint}an axis is one of "
        f"{', '.join(f'{axis}=' for axis in sweeping.FIELD_OF_AXIS)}"
    )


def _plan(model: PlannedModel, request: PlanRequest, schemes: Sequence[str], outputs: _Outputs) -> None:
    if outputs.csv is not None:
        raise ValueError("--csv lists a sweep: add --sweep with axes, or take --json")
    plans: list[SchemePlan] = []
    refusals: dict[str, str] = {}
    for scheme in schemes:
        try:
            plans.append(plan_scheme(model, request, scheme))
        except ValueError as error:
            refusals[scheme] = str(error)
    if not plans:
        raise ValueError(_with_nearest(model, request, schemes, refusals[schemes[0]]))
    if outputs.as_json:
        click.echo(json.dumps({"schemes": [plan.as_json() for plan in plans]}, indent=2))
    else:
        click.echo(full_report(model, request, plans))
    if outputs.svg is not None:
        _write(outputs.svg, split_picture(model, request, plans))
    if refusals:
        lines = [
            f"{scheme}: {_with_nearest(model, request, [scheme], message)}"
            for scheme, message in refusals.items()
        ]
        raise Refusal("\n".join(map(_one_line, lines)))


def _sweep(
    model: PlannedModel,
    request: PlanRequest,
    schemes: Sequence[str],
    axes: Sequence[sweeping.Axis],
    outputs: _Outputs,
) -> None:
    if outputs.as_json:
        raise ValueError("--json is one configuration's: take --csv FILE with --sweep")
    points = sweeping.run_sweep(model, request, schemes, axes)
    if all(point.plan is None for point in points):
        raise ValueError(f"nothing in this sweep works; its first configuration: {points[0].refusal}")
    click.echo(sweeping.as_table(axes, points))
    if outputs.csv is not None:
        _write(outputs.csv, sweeping.as_csv(axes, points))
    if outputs.svg is not None:
        _write(outputs.svg, sweep_picture(model, request, axes, points))


def _with_nearest(model: PlannedModel, request: PlanRequest, schemes: Sequence[str], message: str) -> str:
    """The runtime's message, and what to change by the least for it to go away."""
    change = find_nearest(model, schemes, request)
    advice = "No single change makes it work" if change is None else f"Nearest that works: {change.text}"
    return f"{message.rstrip('.')}. {advice}."


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    main()
