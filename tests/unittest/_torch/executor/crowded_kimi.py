# SPDX-License-Identifier: Apache-2.0
"""The tiny model's executor with a cache that is nearly full of dummies.

Pools come in grains, far larger than what a test can fill with requests.
"""

from dataclasses import dataclass, field, replace

from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy
from tensorrt_llm._torch.pyexecutor.config import VerifySchemeName
from tensorrt_llm._torch.pyexecutor.kv_cache.requests import DummyRequest
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.tiny_kimi import TinyRig, make_tiny_rig

HOST_BYTES = 32 << 20


@dataclass(slots=True, kw_only=True)
class CrowdedRig(TinyRig):
    """Under MAX_UTILIZATION, with few attention pages free, and no state slot beyond a full batch.

    When a request is suspended a dummy takes a slot, so that in a full batch the request's state moves to the
    host and comes back to another slot; `num_moved` counts those that did.
    """

    last_dummy_id: int = -1000
    dummies: list[DummyRequest] = field(default_factory=list)
    left_slots: dict[int, int] = field(default_factory=dict)
    num_suspended: int = 0
    num_resumed: int = 0
    num_moved: int = 0

    def take_slot(self, num_pages: int = 0) -> bool:
        """Give a slot and pages to a dummy; False if there is none."""
        self.last_dummy_id -= 1
        num_tokens = num_pages * self.manager.tokens_per_block
        dummies = self.manager.add_dummy_requests([self.last_dummy_id], [num_tokens])
        self.dummies += dummies or []
        return bool(dummies)

    def free_slot(self) -> None:
        self.manager.free_resources(self.dummies.pop())

    def crowd(self, num_pages: int) -> None:
        """Leave `num_pages` pages and the slots of a full batch."""
        executor, manager = self.executor, self.manager
        assert self.take_slot(manager.num_attention_pages - num_pages)
        for _ in range(manager.num_state_slots - 1 - executor.description.max_batch_size):
            assert self.take_slot()
        executor._limits = executor._scheduler.limits = replace(executor._limits, max_pages=num_pages)

    def watch(self) -> None:
        """Move what is suspended, and count."""
        manager = self.manager
        suspend, resume = manager.suspend_request, manager.resume_request

        def suspend_request(req: LlmRequest) -> None:
            self.left_slots[req.py_request_id] = manager._slot_of(req.py_request_id)
            suspend(req)
            self.num_suspended += 1
            assert self.take_slot()

        def resume_request(req: LlmRequest) -> bool:
            self.free_slot()
            if not resume(req):
                assert self.take_slot()
                return False
            self.num_resumed += 1
            self.num_moved += manager._slot_of(req.py_request_id) != self.left_slots.pop(req.py_request_id)
            return True

        manager.suspend_request = suspend_request  # type: ignore[method-assign, assignment]
        manager.resume_request = resume_request  # type: ignore[method-assign, assignment]

    def step(self) -> bool:
        """One iteration, after which the cache is whole, if somebody came or went."""
        scheduler, cache_ids = self.executor._scheduler, set(self.manager.kv_cache_map)
        num_paused = len(scheduler.paused)
        busy = self.executor.run_step()
        if len(scheduler.paused) != num_paused or self.manager.kv_cache_map.keys() != cache_ids:
            self.manager.check_integrity()
        return busy

    def run(self, max_steps: int = 3000) -> dict[int, list[int]]:
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"still busy after {max_steps} steps")
        assert self.manager.kv_cache_map.keys() == {dummy.py_request_id for dummy in self.dummies}
        self.executor.shutdown()
        assert all(answer.is_final for answer in self.answers.values())
        return {request_id: answer.token_ids for request_id, answer in self.answers.items()}


def make_crowded_rig(
    *,
    num_pages: int,
    has_host: bool = True,
    scheme: VerifySchemeName = "records",
    spec: SpeculationSpec | None = None,
    max_batch_size: int = 4,
    max_num_tokens: int = 512,
    enable_chunked_prefill: bool = True,
    snapshot_interval: int | None = None,
    device: str = "cpu",
) -> CrowdedRig:
    """A rig of `num_pages` pages of 64 tokens; suspended requests move where it `has_host`."""
    rig = make_tiny_rig(
        scheme=scheme,
        spec=spec,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        snapshot_interval=snapshot_interval,
        policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
        host_cache_size=HOST_BYTES if has_host else 0,
        # The dummies use nearly all of the pages, which would veto every resumption.
        max_util_for_resume=1.0,
        device=device,
    )
    crowded = CrowdedRig(executor=rig.executor, manager=rig.manager)
    crowded.crowd(num_pages)
    if has_host:
        crowded.watch()
    return crowded
