# SPDX-License-Identifier: Apache-2.0
"""A failure at every allocation and copy in turn: nothing leaks, nothing is half done, a retry works."""

from collections.abc import Callable

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    CacheLevel,
    DiskCacheTierConfig,
    HostOOMError,
    KVCacheManager,
    pools,
)
from tests.unittest.kv_cache_manager_v2.builders import (
    MIB,
    PAGE_BYTES,
    attention,
    make_config,
    make_manager,
    run_prompt,
    slots,
    ssm,
)
from tests.unittest.kv_cache_manager_v2.literal_model import VARIANTS, InjectedFailure, Machine, Variant

TEXT = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1]


def script(machine: Machine) -> list[Callable[[], None]]:
    """A life with everything in it: growth, commits, forks, eviction down all tiers, resumes, resizes."""

    def both(step: Callable[[int], None]) -> list[Callable[[], None]]:
        return [lambda: step(0), lambda: step(1)]

    return [
        lambda: machine.create(None, TEXT),
        lambda: machine.create(None, [1, *TEXT]),
        *both(machine.resume),
        lambda: machine.compute(0, 12, 2),
        lambda: machine.commit(0, False),
        lambda: machine.compute(1, 10, 3),
        lambda: machine.commit(1, False),
        lambda: machine.compute(0, 9, 4),
        lambda: machine.commit(0, False),
        lambda: machine.fork(1, 0, [0, 1]),
        lambda: machine.resume(0),
        lambda: machine.compute(2, 7, 0),
        *both(machine.suspend),
        lambda: machine.create("other", TEXT),
        lambda: machine.resume(2),
        lambda: machine.compute(1, 12, 0),
        lambda: machine.compute(1, 12, 0),
        lambda: machine.commit(1, True),
        lambda: machine.prefetch(0, 1),
        lambda: machine.close(3),
        *both(machine.resume),
        lambda: machine.compute(0, 12, 1),
        lambda: machine.rebalance(),
        lambda: machine.resize_tier(1, 9),
        lambda: machine.resume(0),
        lambda: machine.compute(0, 5, 0),
        lambda: machine.close(0),
        lambda: machine.fork(3, 0, [1]),
        lambda: machine.resume(0),
    ]


def play(machine: Machine, fault_at: int | None) -> bool:
    """Play the script; returns whether the failure came. Its step is checked, then played again."""
    machine.faults.countdown = fault_at
    came = False
    for step in script(machine):
        try:
            step()
        except InjectedFailure:
            came = True
            machine.check()
            step()
        machine.check()
    return came


# Host; host and disk; windows; shared slots with a host tier; shared slots and a codec down to the disk.
FAULTY = [VARIANTS[2], VARIANTS[3], VARIANTS[5], VARIANTS[-4], VARIANTS[-1]]


@pytest.mark.parametrize("variant", FAULTY)
def test_every_allocation_and_copy_may_fail(variant: Variant) -> None:
    whole = Machine(variant)
    assert not play(whole, None)
    num_calls = whole.faults.num_calls
    whole.end()
    assert num_calls > 25
    for fault_at in range(num_calls):
        machine = Machine(variant)
        assert play(machine, fault_at)
        machine.end()


@pytest.mark.parametrize("fails_at", range(6))
def test_memory_refused_at_construction_leaves_nothing(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[pools.Pool] = []
    real = pools.make_cold_or_cpu_pool

    def make(*args: object) -> pools.Pool:
        if len(made) == fails_at:
            raise HostOOMError("no memory")
        made.append(real(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(pools, "make_cold_or_cpu_pool", make)
    config = make_config([attention(), attention(window=4, layer=1), ssm()], num_host_pages=40)
    if fails_at < 4:
        with pytest.raises(HostOOMError):
            KVCacheManager(config, device="cpu")
        assert len(made) == fails_at
        assert all(pool.num_slots == 0 for pool in made)
    else:
        KVCacheManager(config, device="cpu").shutdown()
        assert all(pool.num_slots == 0 for pool in made)


@pytest.mark.parametrize("fails_at", range(3))
def test_memory_refused_while_growing_keeps_sizes_and_contents(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager([attention(), ssm()], num_grains=3, num_states=4)
    run_prompt(manager, TEXT).close()
    before = slots(manager)
    num_calls = 0
    real = pools.CpuPool.resize

    def resize(pool: pools.CpuPool, num_slots: int) -> None:
        nonlocal num_calls
        num_calls += num_slots > pool.num_slots
        if num_calls == fails_at + 1:
            num_calls += 1
            raise HostOOMError("no memory")
        real(pool, num_slots)

    monkeypatch.setattr(pools.CpuPool, "resize", resize)
    if fails_at < 2:
        assert manager.resize(CacheLevel(0), 40 * MIB) is False
        assert slots(manager) == before
        assert manager.get_quota() == 6 * MIB
    else:
        assert manager.resize(CacheLevel(0), 40 * MIB)
    monkeypatch.undo()
    assert manager.probe_reuse(None, [*TEXT, 1]) == len(TEXT)
    manager.check_integrity()
    manager.shutdown()


def test_a_full_disk_does_not_keep_cached_prefixes_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    manager = make_manager([attention()], cold_tiers=[DiskCacheTierConfig(2 * MIB, str(tmp_path))])
    run_prompt(manager, TEXT).close()
    monkeypatch.setattr(pools.os, "pwrite", lambda *args: PAGE_BYTES // 2)
    taker = manager.create_kv_cache()
    assert taker.resume() and taker.resize(16 * 4)
    assert manager.probe_reuse(None, [*TEXT, 1]) == 0
    manager.check_integrity()
    taker.close()
    manager.shutdown()


def test_a_full_disk_is_a_lack_of_capacity(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    disk = DiskCacheTierConfig(2 * MIB, str(tmp_path))
    manager = make_manager([attention()], cold_tiers=[disk])
    parked = run_prompt(manager, TEXT)
    parked.suspend()
    monkeypatch.setattr(pools.os, "pwrite", lambda *args: PAGE_BYTES // 2)
    taker = manager.create_kv_cache()
    assert taker.resume()
    assert taker.resize(16 * 4) is False
    assert (taker.capacity, slots(manager, 1)) == (0, [(16, 0, 16)])
    manager.check_integrity()
    monkeypatch.undo()
    assert taker.resize(16 * 4)
    taker.close()
    parked.close()
    manager.shutdown()
