# SPDX-License-Identifier: Apache-2.0
"""What is planned is what the managers allocate on a CPU, byte for byte, or refuse, word for word."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from tensorrt_llm._torch.modules.kda.verify_scheme import SCHEMES
from tensorrt_llm._torch.pyexecutor.kv_cache.budget import KvCacheCreator, Managers
from tensorrt_llm._torch.pyexecutor.kv_cache.create import create_manager
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.select import get_kv_cache_manager_cls
from tensorrt_llm.planning.models import PlannedModel
from tensorrt_llm.planning.plan import SCHEME_NAMES, SchemePlan, plan_scheme, plan_unfitted
from tensorrt_llm.planning.request import GpuMemory, PlanRequest
from tensorrt_llm.planning.weights import count_weights
from tensorrt_llm.runtime.kv_cache_manager_v2._math import round_up
from tests.unittest.planning.helpers import MIB, gpu, random_models, random_request, small_model


def build(plan: CachePlan) -> MambaHybridCacheManagerV2:
    cls = get_kv_cache_manager_cls(plan.traits, plan.kv_cache_config)
    manager = create_manager(plan, cls, device="cpu")
    assert isinstance(manager, MambaHybridCacheManagerV2)
    return manager


def buffer_bytes(manager: MambaHybridCacheManagerV2, *names: str) -> int:
    """Bytes of memory, padding included, behind the side buffers of these names."""
    found = [manager.side_buffer(name) for name in names]
    return sum(tensor.untyped_storage().nbytes() for tensor in found if tensor is not None)


def state_bytes(manager: MambaHybridCacheManagerV2) -> int:
    views = [
        view
        for layer in manager.mamba_layer_offsets
        for view in (manager.get_ssm_states(layer), manager.get_conv_states(layer))
    ]
    return sum(view.nbytes for view in views)


def assert_planned(plan: SchemePlan, manager: MambaHybridCacheManagerV2) -> None:
    """Every number of the plan, read off the manager's tensors."""
    slots = manager.num_state_slots
    assert plan.ssm_slots == slots
    assert plan.attention_pages == manager.num_attention_pages
    assert plan.attention_tokens == manager.num_attention_pages * manager.tokens_per_block
    pages = [
        manager.get_buffers(layer).nbytes
        for layer, shape in zip(manager.pp_layers, manager.layers.shapes, strict=True)
        if shape.num_kv_heads
    ]
    assert plan.attention_bytes == sum(pages)
    assert plan.state_bytes == state_bytes(manager)
    assert plan.state_bytes + plan.attention_bytes == manager.allocated_bytes
    assert plan.records_bytes == buffer_bytes(manager, "kda_state_tok") == manager.side_bytes_in_quota
    assert slots * plan.replay_cache_bytes_per_slot == buffer_bytes(
        manager, "kda_qkg_cache", "kda_v_cache", "kda_beta_cache"
    )
    assert slots * plan.intermediate_bytes_per_slot == buffer_bytes(manager, "intermediate_ssm")
    assert plan.conv_cache_bytes == buffer_bytes(manager, "kda_conv_q", "kda_conv_k", "kda_conv_v")
    assert plan.outside_quota_bytes == manager.side_bytes - manager.side_bytes_in_quota
    statistics = manager.impl.get_storage_statistics()
    grains = [
        round_up(group.total * size, plan.grain_bytes) for group in statistics for size in group.slot_sizes
    ]
    assert plan.pool_bytes == sum(grains)


@contextmanager
def warnings_of(logger_name: str) -> Iterator[list[str]]:
    """Warnings logged inside."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(logger_name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


MOST_SIDE_BYTES = 16 * MIB
"""Zeroing more than this beside the pools only takes time; pools cost nothing until they are touched."""


def planned(model: PlannedModel, request: PlanRequest, scheme: str) -> SchemePlan | str:
    """The plan, or why there is none."""
    try:
        return plan_unfitted(model, request, scheme)
    except ValueError as error:
        return str(error)


def test_200_random_configurations(tmp_path: Path) -> None:
    """Of those that are refused or too long, the message is the runtime's."""
    rng, compared, refused, reduced = random.Random(6), 0, 0, 0
    models = random_models(rng, tmp_path)
    while compared < 200:
        model, request, scheme = rng.choice(models), random_request(rng), rng.choice(SCHEME_NAMES)
        plan = planned(model, request, scheme)
        if isinstance(plan, SchemePlan) and plan.outside_quota_bytes > MOST_SIDE_BYTES:
            continue
        with warnings_of("tensorrt_llm") as warnings:
            try:
                manager = build(request.cache_plan(model, scheme, 0))
            except ValueError as error:
                assert plan == str(error)
                refused += 1
                continue
        assert isinstance(plan, SchemePlan), plan
        assert_planned(plan, manager)
        compared += 1
        if manager.max_seq_len < request.max_seq_len:
            with pytest.raises(ValueError) as too_long:
                plan_scheme(model, request, scheme)
            assert str(too_long.value) in warnings
            reduced += 1
        else:
            plan_scheme(model, request, scheme)
        manager.shutdown()
    assert refused > 10 and reduced > 10


def test_the_environment_is_refused_as_the_factory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(tmp_path)
    request = PlanRequest(gpu_quota_bytes=16 * MIB, max_seq_len=64)
    monkeypatch.setenv("TRTLLM_USE_PY_MAMBA", "1")
    with pytest.raises(ValueError, match="TRTLLM_USE_PY_MAMBA=1 contradicts") as refused:
        build(request.cache_plan(model, "records", 0))
    assert planned(model, request, "records") == str(refused.value)


class MeasuredMemory:
    """A GPU as a creator sees it while real managers are measured on the CPU."""

    def __init__(self, memory: GpuMemory, weights_bytes: int) -> None:
        self.memory, self.occupied, self.cache = memory, weights_bytes + memory.workspace_bytes, 0

    def total_bytes(self) -> int:
        return self.memory.total_bytes

    def free_bytes(self) -> int:
        return self.memory.total_bytes - self.occupied

    def start_measuring(self) -> None:
        """The managers are counted in `run_step`."""

    def run_step(self, managers: Managers) -> None:
        self.cache = managers.target.allocated_bytes + managers.target.side_bytes

    def peak_bytes(self) -> int:
        return self.occupied + self.cache


def create_for_real(model: PlannedModel, request: PlanRequest, scheme: str) -> MambaHybridCacheManagerV2:
    """A manager within a GPU's memory, measured and built by the runtime's creator."""
    assert request.gpu is not None
    cache = request.cache_plan(model, scheme, 0)
    memory = MeasuredMemory(request.gpu, count_weights(model, cache.mapping).total_bytes)
    creator = KvCacheCreator(cache, device="cpu", memory=memory)
    creator.configure_kv_cache_capacity(memory.run_step)
    if not creator.max_gpu_total_bytes:
        raise ValueError("the measured cache's side buffers are more than the GPU has left")
    manager = creator.build_managers().target
    assert isinstance(manager, MambaHybridCacheManagerV2)
    return manager


def test_random_gpus(tmp_path: Path) -> None:
    """The quota that the creator finds by measuring, and what is built within it."""
    rng, compared = random.Random(7), 0
    models = random_models(rng, tmp_path)
    while compared < 40:
        model = rng.choice(models)
        memory = gpu(rng.randrange(6 * MIB, 20 * MIB), rng.choice((0.5, 0.9, 1.0)))
        request = random_request(rng, gpu_quota_bytes=None, gpu=memory, block_reuse=False)
        scheme = rng.choice(SCHEME_NAMES)
        plan = planned(model, request, scheme)
        if isinstance(plan, SchemePlan) and plan.outside_quota_bytes > MOST_SIDE_BYTES:
            continue
        try:
            manager = create_for_real(model, request, scheme)
        except ValueError:
            continue
        assert isinstance(plan, SchemePlan), plan
        assert_planned(plan, manager)
        assert plan.quota_bytes == manager.impl.get_quota() + plan.records_bytes or not plan.is_at_live_floor
        manager.shutdown()
        compared += 1


def test_side_buffers_larger_than_the_quota_still_leave_room(tmp_path: Path) -> None:
    """Sized by ratio, states after each draft outweigh the pools; quota and side buffers share the budget."""
    model = small_model(tmp_path)
    memory = gpu(256 * MIB, 1.0)
    request = PlanRequest(drafts=5, max_seq_len=64, tokens_per_block=4, gpu=memory)
    plan = plan_scheme(model, request, "intermediate")
    assert plan.outside_quota_bytes > plan.quota_bytes
    budget = memory.total_bytes - memory.workspace_bytes - plan.weights.total_bytes
    assert 0 <= budget - plan.quota_bytes - plan.outside_quota_bytes < 12 * MIB


class Collective:
    """`all_reduce` of ranks that run one after another: the first round collects, the second gives minima."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.collects = True
        self.call = 0

    def start_rank(self) -> None:
        self.call = 0

    def all_reduce(self, tensor: torch.Tensor, op: object) -> None:
        if self.collects:
            self.values += [[]] if self.call == len(self.values) else []
            self.values[self.call].append(int(tensor))
        else:
            tensor.fill_(min(self.values[self.call]))
        self.call += 1

    @contextmanager
    def in_force(self) -> Iterator[None]:
        with (
            mock.patch.object(torch.distributed, "is_initialized", lambda: True),
            mock.patch.object(torch.distributed, "get_backend", lambda: "gloo"),
            mock.patch.object(torch.distributed, "all_reduce", self.all_reduce),
        ):
            yield


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_pipeline_stages_agree_as_ranks_do(tmp_path: Path, scheme: str) -> None:
    rng, compared = random.Random(8), 0
    models = random_models(rng, tmp_path)
    while compared < 12:
        model = rng.choice(models)
        request = random_request(rng, pp=2, block_reuse=False, max_tokens=None, max_seq_len=16)
        caches = [request.cache_plan(model, scheme, stage) for stage in range(2)]
        try:
            managers = build_together(caches)
        except ValueError:
            continue
        plan = plan_unfitted(model, request, scheme)
        assert_planned(plan, managers[plan.stage])
        attending = [m for m in managers if m.num_attention_pages]
        assert plan.attention_pages == min(m.num_attention_pages for m in attending)
        compared += 1


def build_together(caches: list[CachePlan]) -> list[MambaHybridCacheManagerV2]:
    """The managers of all ranks, which agree on the quota before they build."""
    collective = Collective()
    with collective.in_force():
        for cache in caches:
            collective.start_rank()
            build(cache).shutdown()
        collective.collects = False
        managers = []
        for cache in caches:
            collective.start_rank()
            managers.append(build(cache))
    return managers


def test_every_buffer_of_every_scheme_is_counted(tmp_path: Path) -> None:
    """A buffer that a scheme gains must not be taken for another's."""
    known = {"kda_state_tok", "kda_qkg_cache", "kda_v_cache", "kda_beta_cache", "intermediate_ssm"}
    model = small_model(tmp_path)
    verify = PlanRequest(gpu_quota_bytes=16 * MIB).cache_plan(model, "records", 0).sizing().verify
    for scheme in SCHEMES.values():
        names = {buffer.name for buffer in scheme.slot_buffers(verify.geometry)}
        assert {name for name in names if not name.startswith("kda_conv_")} <= known
