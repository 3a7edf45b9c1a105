# SPDX-License-Identifier: Apache-2.0
"""Who may hold cache pages when requests want more than there are: two policies, as values.

A policy decides and changes nothing; the scheduler carries out what it says. Running requests are given from
the oldest to the youngest. Paused ones are younger than all running ones, and waiting ones younger still,
because the youngest is paused first, the oldest resumes first, and nobody new enters while one is paused. So
the oldest request always runs, and every request becomes the oldest in time.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest


class CapacitySchedulerPolicy(StrEnum):
    """TensorRT-LLM's names of the policies.

    GUARANTEED_NO_EVICT admits a request when the pages of its whole life are free, so that none is ever
    paused. MAX_UTILIZATION admits by what is needed now, and pauses the youngest when pages run out.
    """

    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"


class Relief(NamedTuple):
    """What is to give way: `request` is suspended with its state, or its cache is given up and computed
    again.
    """

    request: LlmRequest
    keeps_state: bool


class CapacityPolicy(Protocol):
    """How admission, resumption and a lack of pages are decided."""

    def promised_pages(self, req: LlmRequest, limits: SchedulerLimits) -> int:
        """Pages set aside for the request from its admission to its end."""
        ...

    def may_admit(
        self, req: LlmRequest, running: Collection[LlmRequest], promised: int, limits: SchedulerLimits
    ) -> bool:
        """Whether a waiting request may join; `promised` pages are set aside for the running ones."""
        ...

    def may_resume(
        self,
        req: LlmRequest,
        running: Collection[LlmRequest],
        paused: Sequence[LlmRequest],
        limits: SchedulerLimits,
    ) -> bool:
        """Whether the oldest paused request may run again."""
        ...

    def relieve(
        self, needy: LlmRequest, running: Sequence[LlmRequest], paused: Sequence[LlmRequest]
    ) -> Relief | None:
        """What gives way when `needy`, running or about to resume, finds no capacity; None: nothing can.

        `running` goes from old to young, `paused` from young to old.
        """
        ...


@dataclass(frozen=True, slots=True)
class GuaranteedNoEvict:
    """Every admitted request can finish without another one giving anything up."""

    def promised_pages(self, req: LlmRequest, limits: SchedulerLimits) -> int:
        return limits.pages_for_life(req)

    def may_admit(
        self, req: LlmRequest, running: Collection[LlmRequest], promised: int, limits: SchedulerLimits
    ) -> bool:
        return promised + limits.pages_for_life(req) <= limits.max_pages

    def may_resume(
        self,
        req: LlmRequest,
        running: Collection[LlmRequest],
        paused: Sequence[LlmRequest],
        limits: SchedulerLimits,
    ) -> bool:
        raise AssertionError(f"request {req.py_request_id} is paused, which this policy never asks for")

    def relieve(
        self, needy: LlmRequest, running: Sequence[LlmRequest], paused: Sequence[LlmRequest]
    ) -> Relief | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxUtilization:
    """As many requests as have pages now; the youngest gives way.

    `offloads`: a tier below the GPU's takes the pages of suspended requests. Where there is none, or it is
    full, suspended pages stay where they are, and what frees them is to give a cache up.
    """

    offloads: bool

    def promised_pages(self, req: LlmRequest, limits: SchedulerLimits) -> int:
        return 0

    def may_admit(
        self, req: LlmRequest, running: Collection[LlmRequest], promised: int, limits: SchedulerLimits
    ) -> bool:
        return _pages(running, limits) + limits.pages_for_step(req) <= limits.max_pages

    def may_resume(
        self,
        req: LlmRequest,
        running: Collection[LlmRequest],
        paused: Sequence[LlmRequest],
        limits: SchedulerLimits,
    ) -> bool:
        """With a page of growth for each request, so that a resumed one is not suspended at once again."""
        if not running:
            return True
        held = () if self.offloads else [other for other in paused if other.holds_cache and other is not req]
        used = _pages(running, limits) + _pages(held, limits)
        return used + limits.pages_for_step(req) + len(running) + 1 <= limits.max_pages

    def relieve(
        self, needy: LlmRequest, running: Sequence[LlmRequest], paused: Sequence[LlmRequest]
    ) -> Relief | None:
        """The youngest that runs is suspended, unless it runs alone; then suspended caches are given up.

        Without offloading a suspended cache frees nothing: only the needy one itself waits that way.
        """
        youngest = running[-1] if len(running) > 1 else None
        if youngest is not None and (self.offloads or youngest is needy):
            return Relief(youngest, keeps_state=True)
        held = next((req for req in paused if req.holds_cache and req is not needy), youngest)
        return None if held is None else Relief(held, keeps_state=False)


def create_capacity_policy(name: CapacitySchedulerPolicy, *, offloads: bool) -> CapacityPolicy:
    """The policy of this name; `offloads`: see `MaxUtilization`."""
    if name is CapacitySchedulerPolicy.MAX_UTILIZATION:
        return MaxUtilization(offloads=offloads)
    return GuaranteedNoEvict()


def _pages(requests: Collection[LlmRequest], limits: SchedulerLimits) -> int:
    return sum(map(limits.pages_for_step, requests))
