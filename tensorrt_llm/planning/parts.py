# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a plan go, as parts that a bar can show."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorrt_llm.planning.plan import SchemePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One use of memory; `symbol` fills it in a terminal."""

    key: str
    label: str
    symbol: str


INSIDE = (
    Part(key="attention", label="attention pages", symbol="█"),
    Part(key="states", label="recurrent states", symbol="▓"),
    Part(key="records", label="draft records", symbol="▒"),
    Part(key="left_over", label="left over", symbol="·"),
)
"""Uses of the quota, in the order of a bar."""

BESIDE = (
    Part(key="conv", label="conv windows", symbol="c"),
    Part(key="replay", label="replay caches", symbol="r"),
    Part(key="intermediate", label="intermediate states", symbol="i"),
)
"""What lies beside the quota."""


def part_bytes(plan: SchemePlan) -> dict[str, int]:
    """Bytes of each part by key; the drafts' counts, 4 bytes a slot, are with the windows."""
    replay = plan.ssm_slots * plan.replay_cache_bytes_per_slot
    intermediate = plan.ssm_slots * plan.intermediate_bytes_per_slot
    return {
        "attention": plan.attention_bytes,
        "states": plan.state_bytes,
        "records": plan.records_bytes,
        "left_over": max(0, plan.left_over_bytes),
        "conv": plan.outside_quota_bytes - replay - intermediate,
        "replay": replay,
        "intermediate": intermediate,
    }


def used(parts: Sequence[Part], plans: Sequence[SchemePlan]) -> list[Part]:
    """Those of `parts` that some plan has bytes in."""
    return [part for part in parts if any(part_bytes(plan)[part.key] for plan in plans)]


def longest_bar_bytes(plans: Sequence[SchemePlan]) -> int:
    """Bytes of the longest bar: a quota and what lies beside it."""
    return max(sum(part_bytes(plan).values()) for plan in plans)
