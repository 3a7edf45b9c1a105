# SPDX-License-Identifier: Apache-2.0
"""Pictures of plans: the quota's split for several schemes side by side. Plain SVG, light and dark."""

import math
from collections.abc import Collection, Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

from tensorrt_llm.planning.models import PlannedModel
from tensorrt_llm.planning.parts import BESIDE, INSIDE, Part, longest_bar_bytes, part_bytes, used
from tensorrt_llm.planning.plan import SchemePlan
from tensorrt_llm.planning.request import PlanRequest
from tensorrt_llm.planning.units import human

WIDTH = 920
MARGIN = 24
_LABEL_WIDTH = 150
_BAR_LEFT = MARGIN + _LABEL_WIDTH
_BAR_WIDTH = WIDTH - _BAR_LEFT - MARGIN
_BAR_HEIGHT = 34
_ROW_HEIGHT = 66
_TOP = 74
_QUOTA_GAP = 3
_PIXELS_PER_CHARACTER = 6.6
_MOST_TICKS = 8

_STYLE = """
  text { font: 13px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2933; }
  .paper { fill: #ffffff; }
  .title { font-size: 16px; font-weight: 600; }
  .strong { font-weight: 600; }
  .faint { fill: #616e7c; font-size: 12px; }
  .on-dark { fill: #ffffff; font-size: 12px; }
  .end { text-anchor: end; }
  .middle { text-anchor: middle; }
  .line { stroke: #d9dfe5; stroke-width: 1; fill: none; }
  .quota { stroke: #1f2933; stroke-width: 2; }
  .beside { opacity: 0.72; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb; }
    .paper { fill: #10161d; }
    .faint { fill: #9aa5b1; }
    .line { stroke: #2b3744; }
    .quota { stroke: #e4e7eb; }
  }
"""

_COLOURS = {
    "attention": "#2f6fb2",
    "states": "#1d8a7a",
    "records": "#d9822b",
    "left_over": "#b8c2cc",
    "conv": "#7b8794",
    "replay": "#8e5bb5",
    "intermediate": "#c2413b",
}


def document(height: float, title: str, elements: Iterable[str]) -> str:
    """An SVG of the common width; `title` is also what a screen reader says."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img" aria-label={quoteattr(title)}>'
    )
    body = [
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        rect(0, 0, WIDTH, height, "paper", radius=8),
        text(MARGIN, 34, title, "title"),
        *elements,
    ]
    return "\n".join([head, *body, "</svg>"]) + "\n"


def text(x: float, y: float, content: str, css: str = "") -> str:
    """A line of text whose baseline is at y."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}">{escape(content)}</text>'


def rect(
    x: float, y: float, width: float, height: float, css: str = "", *, fill: str = "", radius: int = 0
) -> str:
    """A filled rectangle, coloured by its class or by `fill`."""
    colour = f' fill="{fill}"' if fill else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'class="{css}"{colour}/>'
    )


def line(x0: float, y0: float, x1: float, y1: float, css: str = "line") -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{css}"/>'


def nice_step(largest: float, most: int) -> float:
    """A step of 1, 2 or 5 times a power of ten with which at most `most` steps reach `largest`."""
    power = 10.0 ** math.floor(math.log10(largest / most))
    return next(step * power for step in (1, 2, 5, 10) if largest / (step * power) <= most)


def split_picture(model: PlannedModel, request: PlanRequest, plans: Sequence[SchemePlan]) -> str:
    """What the quota is spent on and what lies beside it, one bar per scheme on one scale."""
    scale = (_BAR_WIDTH - _QUOTA_GAP) / longest_bar_bytes(plans)
    bottom = _TOP + len(plans) * _ROW_HEIGHT
    subtitle = f"{facts(request)}. The quota ends at the line; what is lighter lies beside it."
    elements = [text(MARGIN, 54, subtitle, "faint"), *_axis(longest_bar_bytes(plans), scale, bottom)]
    for row, plan in enumerate(plans):
        elements += _scheme_row(plan, _TOP + row * _ROW_HEIGHT, scale)
    legend, height = _legend(used((*INSIDE, *BESIDE), plans), bottom + 52)
    title = f"{model.name}: the cache on one of {request.tp * request.pp} ranks"
    return document(height, title, [*elements, *legend])


def facts(request: PlanRequest, swept: Collection[str] = ()) -> str:
    """What a picture holds for: the memory, and the request's numbers that are not `swept`."""
    gpu, quota = request.gpu, request.gpu_quota_bytes
    memory = f"A quota of {human(quota or 0)}" if gpu is None else f"A GPU of {human(gpu.total_bytes)}"
    numbers = {
        "tp": f"tp {request.tp}",
        "pp": f"pp {request.pp}" if request.pp > 1 else "",
        "drafts": f"{request.drafts} drafts",
        "max_batch_size": f"batch {request.max_batch_size}",
        "max_seq_len": f"sequences of {request.max_seq_len:,} tokens",
    }
    kept = [words for name, words in numbers.items() if words and name not in swept]
    return ", ".join([memory, *kept])


def _scheme_row(plan: SchemePlan, top: float, scale: float) -> list[str]:
    middle = top + _BAR_HEIGHT / 2
    elements = [
        text(MARGIN, middle - 1, plan.scheme, "strong"),
        text(MARGIN, middle + 15, f"{plan.ssm_slots:,} slots", "faint"),
    ]
    end, inside = _segments(plan, INSIDE, _BAR_LEFT, top, scale)
    beside_end, beside = _segments(plan, BESIDE, end + _QUOTA_GAP, top, scale)
    caption = f"{plan.attention_tokens:,} tokens in pages; {_requests(plan)}; quota {human(plan.quota_bytes)}"
    if plan.outside_quota_bytes:
        caption += f", {human(plan.outside_quota_bytes)} beside it"
    mark = line(end + 1.5, top - 4, end + 1.5, top + _BAR_HEIGHT + 4, "quota")
    return [*elements, *inside, *beside, mark, text(_BAR_LEFT, top + _BAR_HEIGHT + 17, caption, "faint")]


def _requests(plan: SchemePlan) -> str:
    count = plan.full_length_requests
    return f"{count} full-length request{'' if count == 1 else 's'} at once"


def _segments(
    plan: SchemePlan, parts: Sequence[Part], left: float, top: float, scale: float
) -> tuple[float, list[str]]:
    """The parts' rectangles from `left` on, and where the last one ends."""
    sizes, elements = part_bytes(plan), []
    css = "beside" if parts is BESIDE else ""
    for part in parts:
        width = sizes[part.key] * scale
        if width:
            elements.append(rect(left, top, width, _BAR_HEIGHT, css, fill=_COLOURS[part.key]))
            label = f"{part.label} {human(sizes[part.key])}"
            if len(label) * _PIXELS_PER_CHARACTER < width - 12:
                elements.append(text(left + 8, top + _BAR_HEIGHT / 2 + 4, label, "on-dark"))
        left += width
    return left, elements


def _axis(longest: int, scale: float, bottom: float) -> list[str]:
    step = nice_step(longest / 10**9, _MOST_TICKS)
    elements = []
    for tick in range(math.floor(longest / 10**9 / step) + 1):
        x = _BAR_LEFT + tick * step * 10**9 * scale
        elements.append(line(x, _TOP - 8, x, bottom))
        elements.append(text(x, bottom + 16, f"{tick * step:g}", "faint middle"))
    elements.append(text(MARGIN, bottom + 16, "GB", "faint"))
    return elements


def _legend(parts: Sequence[Part], top: float) -> tuple[list[str], float]:
    """Coloured squares with names, in lines as wide as the picture, and the height that they end at."""
    elements, x = [], float(MARGIN)
    for part in parts:
        label = part.label + (" (beside the quota)" if part in BESIDE else "")
        width = 22 + len(label) * _PIXELS_PER_CHARACTER + 14
        if x + width > WIDTH - MARGIN:
            x, top = float(MARGIN), top + 22
        elements.append(
            rect(x, top - 10, 12, 12, "beside" if part in BESIDE else "", fill=_COLOURS[part.key])
        )
        elements.append(text(x + 18, top, label, "faint"))
        x += width
    return elements, top + 20
