# SPDX-License-Identifier: Apache-2.0
"""For a configuration that does not work, the nearest one that does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tensorrt_llm.planning.models import PlannedModel
from tensorrt_llm.planning.plan import plan_scheme, plan_unfitted
from tensorrt_llm.planning.request import PlanRequest, option

_QUOTA_STEP_BYTES = 1 << 20
_MEMORY_STEP_BYTES = 10**8
_MOST_STEPS = 1 << 30
_MOST_RANKS_AWAY = 16
_WITHOUT_REUSE = "no --block-reuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to change, in options, and the request with it."""

    text: str
    request: PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Looks for requests that work under all of `schemes`."""

    model: PlannedModel
    schemes: Sequence[str]
    request: PlanRequest

    def works(self, request: PlanRequest) -> bool:
        """Whether nothing refuses the request and a full-length sequence fits."""
        try:
            for scheme in self.schemes:
                plan_scheme(self.model, request, scheme)
        except ValueError:
            return False
        return True

    def changed(self, name: str, value: int) -> PlanRequest | None:
        """The request with one number changed; None where that is out of range."""
        try:
            return self.request.with_number(name, value)
        except ValueError:
            return None

    def works_with(self, name: str, value: int) -> bool:
        request = self.changed(name, value)
        return request is not None and self.works(request)

    def smaller_batch(self) -> Change | None:
        asked = self.request.max_batch_size
        if asked == 1 or not self.works_with("max_batch_size", 1):
            return None
        largest = _last_working(1, asked, lambda batch: self.works_with("max_batch_size", batch))
        return self._change("max_batch_size", largest)

    def shorter_sequence(self) -> Change | None:
        """The longest sequence that fits, from above: a pool may shrink with the length it is sized for."""
        length = self.request.max_seq_len
        while length:
            request = replace(self.request, max_seq_len=length)
            try:
                held = min(
                    plan_unfitted(self.model, request, scheme).attention_tokens for scheme in self.schemes
                )
            except ValueError:
                return None
            if held >= length:
                return self._change("max_seq_len", length)
            length = held
        return None

    def more_memory(self) -> Change | None:
        """The smallest quota, or the smallest GPU, in steps of 1 MiB or 0.1 GB."""
        low = self._memory_steps()
        high = low + 1
        while not self.works(self._with_memory(high)):
            low, high = high, 2 * high
            if high > _MOST_STEPS:
                return None
        fails_until = _last_working(low, high, lambda steps: not self.works(self._with_memory(steps)))
        request = self._with_memory(fails_until + 1)
        if request.gpu is not None:
            return Change(text=f"--gpu-memory {request.gpu.total_bytes / 10**9:.1f}GB", request=request)
        return Change(text=f"--gpu-quota {fails_until + 1}MiB", request=request)

    def _memory_steps(self) -> int:
        """The memory asked for in whole steps, rounded down."""
        if self.request.gpu is not None:
            return self.request.gpu.total_bytes // _MEMORY_STEP_BYTES
        return (self.request.gpu_quota_bytes or 0) // _QUOTA_STEP_BYTES

    def _with_memory(self, steps: int) -> PlanRequest:
        gpu = self.request.gpu
        if gpu is None:
            return replace(self.request, gpu_quota_bytes=steps * _QUOTA_STEP_BYTES)
        return replace(self.request, gpu=replace(gpu, total_bytes=steps * _MEMORY_STEP_BYTES))

    def without_reuse(self) -> Change | None:
        request = replace(self.request, block_reuse=False)
        return Change(text=_WITHOUT_REUSE, request=request) if self.works(request) else None

    def other_split(self) -> Change | None:
        """Another number of ranks, the one with the smallest difference."""
        for distance in range(1, _MOST_RANKS_AWAY + 1):
            for name in ("ep", "tp", "pp"):
                asked = getattr(self.request, name)
                for value in (asked - distance, asked + distance):
                    if self.works_with(name, value):
                        return self._change(name, value)
        return None

    def _change(self, name: str, value: int) -> Change:
        return Change(text=f"{option(name)} {value}", request=self.request.with_number(name, value))


def find_nearest(model: PlannedModel, schemes: Sequence[str], request: PlanRequest) -> Change | None:
    """The first that works of: a smaller batch, a shorter sequence, more memory, no block reuse, other ranks.

    `request` does not work under one of `schemes`; the change makes it work under all of them. Where block
    reuse is not all that stands in the way, one of the others comes with it. None where nothing helps.
    """
    search = _Search(model=model, schemes=schemes, request=request)
    change = _first(search.smaller_batch, search.shorter_sequence, search.more_memory)
    if change is not None:
        return change
    if not request.block_reuse:
        return search.other_split()
    return search.without_reuse() or _with_second_change(model, schemes, request)


def _first(*attempts: Callable[[], Change | None]) -> Change | None:
    return next((change for change in (attempt() for attempt in attempts) if change is not None), None)


def _with_second_change(model: PlannedModel, schemes: Sequence[str], request: PlanRequest) -> Change | None:
    second = find_nearest(model, schemes, replace(request, block_reuse=False))
    if second is None:
        return None
    return Change(text=f"{_WITHOUT_REUSE} and {second.text}", request=second.request)


def _last_working(works: int, fails: int, is_working: Callable[[int], bool]) -> int:
    """The last number that works, between one that does and a larger one that does not."""
    while fails - works > 1:
        middle = (works + fails) // 2
        works, fails = (middle, fails) if is_working(middle) else (works, middle)
    return works
