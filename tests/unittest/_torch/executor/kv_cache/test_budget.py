# SPDX-License-Identifier: Apache-2.0
"""`KvCacheCreator`: the lowest of three limits, one budget for target and drafter, side buffers counted."""

from dataclasses import dataclass, field, replace

import pytest

from tensorrt_llm._torch.pyexecutor.kv_cache.budget import (
    KvCacheCreator,
    Managers,
    split_budget,
    with_quota,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.config import SpecSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import CacheCost
from tensorrt_llm.mapping import Mapping
from tests.unittest._torch.executor.kv_cache.helpers import MIB, Traits, settings


@dataclass
class Memory:
    """A device of 256 MiB where a step uses 40 MiB beside pools and side buffers."""

    total: int = 256 * MIB
    step: int = 40 * MIB
    managers: Managers | None = None
    log: list[str] = field(default_factory=list)

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.total

    def start_measuring(self) -> None:
        self.log.append("start")

    def peak_bytes(self) -> int:
        assert self.managers is not None
        self.log.append("peak")
        built = [manager for manager in self.managers if manager is not None]
        return self.step + sum(manager.allocated_bytes + manager.side_bytes for manager in built)


def plan(**config: object) -> CachePlan:
    return CachePlan(
        traits=Traits(),
        mapping=Mapping(),
        kv_cache_config=settings(**{"max_gpu_total_bytes": 0, **config}),
        tokens_per_block=4,
        max_seq_len=64,
        max_batch_size=2,
        max_num_tokens=128,
        spec_config=SpecSettings(max_draft_len=2),
        kda_token_states=True,
    )


def measured(creator: KvCacheCreator, memory: Memory) -> int:
    """The side bytes that were counted in the peak and that no quota pays for."""
    seen: list[int] = []

    def run_step(managers: Managers) -> None:
        memory.managers = managers
        seen.append(sum(m.side_bytes - m.side_bytes_in_quota for m in managers if m is not None))

    creator.configure_kv_cache_capacity(run_step)
    return seen[0]


@pytest.mark.parametrize(
    ("limits", "quota_mib"),
    [
        ({"free_gpu_memory_fraction": None, "max_gpu_total_bytes": 24 * MIB}, 24),
        ({"free_gpu_memory_fraction": 0.125}, 32),
        ({"free_gpu_memory_fraction": 0.5, "max_gpu_total_bytes": 24 * MIB}, 24),
        ({"free_gpu_memory_fraction": 0.125, "max_gpu_total_bytes": 64 * MIB}, 32),
    ],
)
def test_the_lowest_limit_wins(limits: dict[str, object], quota_mib: int) -> None:
    creator = KvCacheCreator(plan(**limits), device="cpu", memory=Memory())
    assert creator.try_prepare_estimation() is False
    assert creator.max_gpu_total_bytes == quota_mib * MIB
    target, draft = creator.build_managers()
    assert draft is None
    # Where the memory was looked at, what lies beside the quota has to fit as well.
    fits_beside = limits["free_gpu_memory_fraction"] == 0.125
    side = target.side_bytes if fits_beside else target.side_bytes_in_quota
    left = quota_mib * MIB - target.impl.get_quota() - side
    assert 0 <= left < 2 * MIB
    target.shutdown()


def test_max_tokens_may_be_the_lowest_limit() -> None:
    creator = KvCacheCreator(
        plan(max_tokens=256, max_gpu_total_bytes=200 * MIB), device="cpu", memory=Memory()
    )
    creator.try_prepare_estimation()
    target, _ = creator.build_managers()
    assert target.impl.get_quota() < 64 * MIB
    assert target.kv_cache_config.max_tokens == 256
    target.shutdown()


def test_side_buffers_count_in_the_measured_peak() -> None:
    memory = Memory()
    creator = KvCacheCreator(plan(free_gpu_memory_fraction=0.5), device="cpu", memory=memory)
    beside = measured(creator, memory)
    assert beside > 0 and memory.log == ["start", "peak"]
    assert creator.max_gpu_total_bytes == (memory.total - memory.step - beside) // 2


def test_the_estimation_keeps_records_and_drops_what_only_sizes_pools() -> None:
    memory = Memory()
    base = plan(free_gpu_memory_fraction=0.5, avg_seq_len=32, max_gpu_total_bytes=64 * MIB)
    creator = KvCacheCreator(base, device="cpu", memory=memory)

    def check(managers: Managers) -> None:
        memory.managers = managers
        target = managers.target
        assert target.is_estimating_kv_cache and target.keeps_kda_token_states
        assert target.kv_cache_config.max_tokens == 128 + 2 * 4
        assert target.kv_cache_config.avg_seq_len is None
        assert target.kv_cache_config.max_gpu_total_bytes == 0

    creator.configure_kv_cache_capacity(check)
    assert creator.max_gpu_total_bytes == 64 * MIB
    target, _ = creator.build_managers()
    assert target.kv_cache_config.avg_seq_len == 32 and target.kv_cache_config.max_tokens is None
    target.shutdown()


def test_a_failing_step_leaves_nothing_behind() -> None:
    creator = KvCacheCreator(plan(free_gpu_memory_fraction=0.5), device="cpu", memory=Memory())
    built: list[Managers] = []

    def fail(managers: Managers) -> None:
        built.append(managers)
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        creator.configure_kv_cache_capacity(fail)
    assert built[0].target.kv_cache_map == {} and built[0].target.num_state_slots == 0


def test_one_budget_for_target_and_drafter() -> None:
    target, draft = (
        CacheCost(slope_bytes=300, intercept_bytes=1_000),
        CacheCost(slope_bytes=100, intercept_bytes=500),
    )
    split = split_budget(41_500, target, draft)
    assert (split.target_bytes, split.draft_bytes) == (31_000, 10_500)
    with pytest.raises(ValueError, match="need 1500 bytes before the first token, but their budget is 1499"):
        split_budget(1_499, target, draft)


def test_target_and_drafter_share_the_budget_and_the_drafter_keeps_no_records() -> None:
    draft = replace(
        plan(),
        traits=Traits(num_layers=1, attention_layers=(0,), kda_layers=(), kda=None),
        is_draft=True,
    )
    base = plan(max_gpu_total_bytes=96 * MIB, free_gpu_memory_fraction=None)
    managers = KvCacheCreator(base, draft_plan=draft, device="cpu", memory=Memory()).build_managers()
    assert managers.draft is not None
    quotas = [manager.kv_cache_config.max_gpu_total_bytes for manager in managers if manager is not None]
    assert sum(quotas) == 96 * MIB
    assert managers.target.keeps_kda_token_states
    tokens = [m.num_attention_pages * m.tokens_per_block for m in managers if m is not None]
    assert abs(tokens[0] - tokens[1]) < 0.1 * tokens[0]
    for manager in managers:
        assert manager is not None
        manager.shutdown()


def test_with_quota_changes_what_it_says() -> None:
    config = settings(max_tokens=5, pool_ratio=(0.5, 0.5), avg_seq_len=7)
    changed = with_quota(config, 9, max_tokens=6, keeps_ratio=False)
    assert changed == replace(config, max_gpu_total_bytes=9, max_tokens=6, pool_ratio=None, avg_seq_len=None)
    assert with_quota(config, 3) == replace(config, max_gpu_total_bytes=3)


def test_side_buffers_of_more_slots_than_were_measured_come_off_the_quota() -> None:
    """Off the floor the final manager has many more slots than the one that was measured."""
    memory = Memory(total=512 * MIB)
    base = replace(plan(free_gpu_memory_fraction=1.0), kda_token_states=False)
    creator = KvCacheCreator(base, device="cpu", memory=memory)
    side = measured(creator, memory)
    budget = memory.total - memory.step - side
    target, _ = creator.build_managers()
    used = target.impl.get_quota() + target.side_bytes - side
    assert budget - 2 * MIB < used <= budget
    assert target.side_bytes > 20 * side
    target.shutdown()


def test_records_are_paid_once() -> None:
    """By the quota, and not by the measured peak as well: pools and side buffers fill what a step leaves."""
    memory = Memory()
    creator = KvCacheCreator(plan(free_gpu_memory_fraction=1.0), device="cpu", memory=memory)
    measured(creator, memory)
    target, _ = creator.build_managers()
    assert target.side_bytes_in_quota > 0
    used = target.impl.get_quota() + target.side_bytes
    assert 0 <= memory.total - memory.step - used < MIB < target.side_bytes_in_quota
    target.shutdown()


def by_ratio(total: int, scheme: str = "intermediate") -> tuple[KvCacheCreator, int]:
    """A creator that has measured a step on a device of this size, and its budget."""
    base = replace(plan(free_gpu_memory_fraction=1.0), kda_token_states=False, kda_verify_scheme=scheme)
    memory = Memory(total=total)
    creator = KvCacheCreator(base, device="cpu", memory=memory)
    beside = measured(creator, memory)
    return creator, total - memory.step - beside


def test_side_buffers_larger_than_the_quota_leave_it_what_fits() -> None:
    """The search for a quota starts at the smallest that works, never below."""
    for total in (48 * MIB, 56 * MIB, 64 * MIB, 96 * MIB, 256 * MIB, 1024 * MIB):
        creator, budget = by_ratio(total)
        (measured_slots,) = creator._num_measured_slots
        target, _ = creator.build_managers()
        free = target._sizing.free_side_bytes_per_slot
        used = target.impl.get_quota() + max(0, target.num_state_slots - measured_slots) * free
        assert target.impl.get_quota() >= target._sizing.minimum_quota()
        assert used <= budget
        outweighs = target.side_bytes > target.impl.get_quota()
        target.shutdown()
    assert outweighs


def test_side_buffers_that_leave_less_than_the_live_states_need_are_refused() -> None:
    """A measured cache with no slots stands for one that was smaller than the smallest."""
    creator, _ = by_ratio(256 * MIB)
    creator._num_measured_slots, creator._budget_bytes = (), creator._plan.sizing().minimum_quota() + 1
    with pytest.raises(ValueError, match="budget is .* buffers beside its state slots.*max_batch_size"):
        creator.build_managers()


@pytest.mark.parametrize("max_tokens", [None, 64])
def test_a_budget_of_nothing_is_not_no_bound(max_tokens: int | None) -> None:
    memory = Memory()
    creator = KvCacheCreator(
        plan(free_gpu_memory_fraction=0.5, max_tokens=max_tokens), device="cpu", memory=memory
    )
    memory.step = memory.total
    measured(creator, memory)
    assert creator.max_gpu_total_bytes == 0
    with pytest.raises(ValueError, match="free_gpu_memory_fraction is 0.5.*0 bytes.*lower max_num_tokens"):
        creator.build_managers()


def drafter(**changes: object) -> CachePlan:
    """A drafter of two attention layers, or with KDA layers of its own."""
    traits = Traits(num_layers=2, attention_layers=(0, 1), kda_layers=(), kda=None)
    return replace(plan(), **{"traits": traits, "is_draft": True, **changes})


@pytest.mark.parametrize("total", [96 * MIB, 256 * MIB, 1024 * MIB])
@pytest.mark.parametrize("draft", [drafter(), drafter(traits=Traits())], ids=["attention", "hybrid"])
def test_side_buffers_come_off_the_budget_that_target_and_drafter_share(total: int, draft: CachePlan) -> None:
    """The target's share decides how many slots it has, and each manager's slots their side buffers."""
    memory = Memory(total=total)
    base = replace(plan(free_gpu_memory_fraction=1.0), kda_token_states=False)
    creator = KvCacheCreator(base, draft_plan=draft, device="cpu", memory=memory)
    side = measured(creator, memory)
    budget = total - memory.step - side
    managers = creator.build_managers()
    built = [manager for manager in managers if manager is not None]
    assert len(built) == 2
    quotas = sum(manager.impl.get_quota() for manager in built)
    unmeasured = sum(manager.side_bytes for manager in built) - side
    # Each pool is rounded to grains of 2 MiB and the search stops at one MiB.
    assert budget - 8 * MIB < quotas + unmeasured <= budget + 2 * 2 * MIB
    assert unmeasured > 0
    for manager in built:
        manager.shutdown()


def test_a_drafter_takes_slots_from_the_target_and_with_them_side_buffers() -> None:
    """With figures: of one budget, what the target alone and what it beside a drafter leaves unmeasured."""
    found = []
    for draft in (None, drafter()):
        memory = Memory(total=256 * MIB)
        base = replace(plan(free_gpu_memory_fraction=1.0), kda_token_states=False)
        creator = KvCacheCreator(base, draft_plan=draft, device="cpu", memory=memory)
        measured(creator, memory)
        managers = creator.build_managers()
        target = managers.target
        found.append((target.kv_cache_config.max_gpu_total_bytes // MIB, target.num_state_slots))
        print(f"target: {found[-1][0]} MiB of quota, {found[-1][1]} state slots")
        for manager in managers:
            if manager is not None:
                manager.shutdown()
    assert found == [(111, 23_210), (54, 12_136)]
