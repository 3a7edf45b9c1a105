# SPDX-License-Identifier: Apache-2.0
"""Plans as text: what is kept and why, a table of bytes side by side, and bars."""

from collections.abc import Callable, Sequence

from tensorrt_llm.planning.models import PlannedModel
from tensorrt_llm.planning.parts import BESIDE, INSIDE, Part, longest_bar_bytes, part_bytes, used
from tensorrt_llm.planning.plan import SchemePlan
from tensorrt_llm.planning.request import PlanRequest
from tensorrt_llm.planning.units import human

_BAR_WIDTH = 64
_LABEL_WIDTH = 26

_Row = tuple[str, Callable[[SchemePlan], int]]

_PER_SLOT: tuple[_Row, ...] = (
    ("  state, conv window", lambda plan: plan.state_bytes_per_slot),
    ("  records", lambda plan: plan.records_bytes_per_slot),
    ("  replay caches *", lambda plan: plan.replay_cache_bytes_per_slot),
    ("  intermediate states *", lambda plan: plan.intermediate_bytes_per_slot),
    ("  extended conv windows *", lambda plan: plan.conv_cache_bytes_per_slot),
)
_QUOTA: tuple[_Row, ...] = (
    ("  states of all slots", lambda plan: plan.state_bytes),
    ("  records of all slots", lambda plan: plan.records_bytes),
    ("  attention pages", lambda plan: plan.attention_bytes),
    ("  left over", lambda plan: plan.left_over_bytes),
)
_CAPACITY: tuple[_Row, ...] = (
    ("attention pages", lambda plan: plan.attention_pages),
    ("attention tokens", lambda plan: plan.attention_tokens),
    ("  requests resume up to", lambda plan: plan.resumable_tokens),
    ("full-length requests", lambda plan: plan.full_length_requests),
    ("  that the pages hold", lambda plan: plan.page_bound_requests),
)


def full_report(model: PlannedModel, request: PlanRequest, plans: Sequence[SchemePlan]) -> str:
    """Everything about these plans of one request."""
    sections = ("\n".join(_heading(model, request, plans[0])), _why(plans), _table(plans), _bars(plans))
    return "\n\n".join(sections)


def _heading(model: PlannedModel, request: PlanRequest, plan: SchemePlan) -> list[str]:
    ranks = request.tp * request.pp
    place = f"one of {ranks} ranks" if ranks > 1 else "one rank"
    split = f"tp {request.tp}, pp {request.pp}, ep {request.ep}"
    stage = f", stage {plan.stage} of {request.pp}, which holds the fewest tokens" if request.pp > 1 else ""
    kda = model.traits.kda
    assert kda is not None, "a model without KDA layers is refused before"
    lines = [
        f"{model.name} on {place} ({split}{stage})",
        f"{plan.num_kda_layers} KDA layers with {plan.num_heads} of {kda.num_heads} heads, "
        f"{plan.num_attention_layers} attention layers with {plan.attention_bytes_per_token:,} bytes a token",
        f"{request.drafts} drafts, batch {request.max_batch_size}, sequences of {request.max_seq_len:,} "
        f"tokens, pages of {request.tokens_per_block}",
        _weights_line(plan),
    ]
    return [*lines, _gpu_line(request)] if request.gpu is not None else lines


def _weights_line(plan: SchemePlan) -> str:
    weights = plan.weights
    line = (
        f"weights {human(weights.total_bytes)}, {human(weights.routed_expert_bytes)} of them routed experts"
    )
    if weights.replicated_bytes:
        line += f"; {human(weights.replicated_bytes)} are the same on every tensor rank"
    return line


def _gpu_line(request: PlanRequest) -> str:
    gpu = request.gpu
    assert gpu is not None
    return (
        f"GPU {human(gpu.total_bytes)}, workspace {human(gpu.workspace_bytes)}; the cache and what lies "
        f"beside it get {gpu.free_fraction:g} of the rest"
    )


def _why(plans: Sequence[SchemePlan]) -> str:
    """Why so many slots are kept, and what sizes each scheme's state pool."""
    plan = plans[0]
    if not plan.num_kda_layers:
        return "this rank has no KDA layers and keeps no slots"
    dummies = f"{plan.num_dummy_slots} dumm{'y' if plan.num_dummy_slots == 1 else 'ies'}"
    lines = [
        f"slots kept: {plan.slots_kept} = ceil({plan.floor_slots} / {plan.max_util:.9g}). "
        f"{plan.num_resident} requests and {dummies} can be live,",
        f"and a request resumes while at most {plan.max_util:.9g} of the slots are in use.",
    ]
    at_floor = [p.scheme for p in plans if p.is_at_live_floor]
    by_ratio = [p.scheme for p in plans if not p.is_at_live_floor]
    if at_floor:
        lines.append(f"{_listed(at_floor)}: those slots and no more, as whole grains hold them.")
    if by_ratio:
        lines.append(f"{_listed(by_ratio)}: slots and pages share the quota as a typical step uses them.")
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)


def _table(plans: Sequence[SchemePlan]) -> str:
    columns = [_cells(row, plans) for row in _rows(plans)]
    widths = [max(len(cells[i]) for cells in columns) for i in range(len(columns[0]))]
    return "\n".join(
        "".join([cells[0].ljust(max(_LABEL_WIDTH, widths[0]))]
                + [f"  {cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True)]).rstrip()
        for cells in columns
    )  # fmt: skip


def _rows(plans: Sequence[SchemePlan]) -> list[_Row | str]:
    """Rows of numbers, and strings for headings; parts of a slot that no scheme has are left out."""
    return [
        "",
        ("slots allocated", lambda plan: plan.ssm_slots),
        "bytes per slot",
        *(row for row in _PER_SLOT if any(row[1](plan) for plan in plans)),
        ("quota", lambda plan: plan.quota_bytes),
        *(row for row in _QUOTA if any(row[1](plan) for plan in plans)),
        ("* beside the quota", lambda plan: plan.outside_quota_bytes),
        *_CAPACITY,
    ]


def _cells(row: _Row | str, plans: Sequence[SchemePlan]) -> list[str]:
    if isinstance(row, str):
        return [row, *(("" if row else plan.scheme) for plan in plans)]
    label, number = row
    return [label, *(f"{number(plan):,}" if number(plan) else "-" for plan in plans)]


def _bars(plans: Sequence[SchemePlan]) -> str:
    """One bar per scheme on one scale: the quota up to `|`, and then what lies beside it."""
    scale = _BAR_WIDTH / longest_bar_bytes(plans)
    width = max(len(plan.scheme) for plan in plans)
    lines = [
        f"{plan.scheme:<{width}}  {_bar(INSIDE, plan, scale)}|{_bar(BESIDE, plan, scale)}".rstrip()
        for plan in plans
    ]
    lines.append(f"{'':<{width}}  {_legend(used(INSIDE, plans))} | the quota ends")
    beside = used(BESIDE, plans)
    return "\n".join([*lines, f"{'':<{width}}  beside it: {_legend(beside)}"] if beside else lines)


def _legend(parts: Sequence[Part]) -> str:
    return "  ".join(f"{part.symbol} {part.label}" for part in parts)


def _bar(parts: Sequence[Part], plan: SchemePlan, scale: float) -> str:
    """Each part in whole characters, its ends rounded, and at least one where it has any bytes."""
    sizes, bar, end = part_bytes(plan), "", 0.0
    for part in parts:
        end += sizes[part.key] * scale
        wanted = round(end) - len(bar)
        bar += part.symbol * max(wanted, 1 if sizes[part.key] and part.key != "left_over" else 0)
    return bar
