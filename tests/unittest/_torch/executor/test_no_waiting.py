# SPDX-License-Identifier: Apache-2.0
"""No step of the loop makes the host wait for the device, but for reading the tokens that it chose.

On a CPU the guard of `no_waiting` stands for the device; the modules that have a form for numbers in host
memory run the other one.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensorrt_llm._torch.modules import moe
from tensorrt_llm._torch.modules.kda import verify_scheme
from tensorrt_llm._torch.pyexecutor import sampler
from tensorrt_llm._torch.pyexecutor.config import VerifySchemeName
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.slot_buffers import SlotBuffers
from tensorrt_llm._torch.pyexecutor.llm_request import SamplingSpec
from tensorrt_llm._torch.pyexecutor.sampler import Sampler
from tests.unittest._torch.executor.no_waiting import READERS_OF_HOST_VALUES, NoWaiting
from tests.unittest._torch.executor.tiny_kimi import (
    VOCAB_SIZE,
    TinyRig,
    make_tiny_rig,
    scripted_speculation,
    tiny_request,
)

SCHEMES: tuple[VerifySchemeName | None, ...] = ("records", "replay", "intermediate", None)
SAMPLINGS = (
    SamplingSpec(),
    SamplingSpec(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=1),
    SamplingSpec(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={3: 1.0}),
    SamplingSpec(min_tokens=4, num_logprobs=2),
)
WARM_STEPS, GUARDED_STEPS = 3, 6


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in READERS_OF_HOST_VALUES:
        monkeypatch.setattr(module, "host_values", lambda tensor: None)


def rig_with_requests(
    scheme: VerifySchemeName | None, device: str = "cpu", for_kernels: bool = False
) -> TinyRig:
    """Four requests that are sampled in different ways; drafts of all lengths, some of them right, or none
    where no scheme is named.
    """
    texts = {i: [(i + j) % VOCAB_SIZE for j in range(60)] for i in range(len(SAMPLINGS))}
    script = [(3, 2), (0, 0), (7, 3), (1, 1), (7, 7)]
    spec = None if scheme is None else scripted_speculation(texts, script)
    rig = make_tiny_rig(scheme=scheme or "replay", spec=spec, device=device, for_kernels=for_kernels)
    for i, sampling in enumerate(SAMPLINGS):
        rig.submit(tiny_request(i, 5 + i, 60, sampling))
    return rig


def run_guarded(rig: TinyRig, num_steps: int) -> NoWaiting:
    for _ in range(WARM_STEPS):
        rig.executor.run_step()
    guard = NoWaiting(reads=(Sampler.sample, sampler.token_logprobs))
    with guard:
        for _ in range(num_steps):
            rig.executor.run_step()
    return guard


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_decode_step_reads_the_chosen_tokens_and_nothing_else(
    scheme: VerifySchemeName | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_device(monkeypatch)
    rig = rig_with_requests(scheme)
    guard = run_guarded(rig, GUARDED_STEPS)
    assert guard.found == []
    # The tokens, and once more for the request that wants log-probabilities.
    assert guard.num_reads == 2 * GUARDED_STEPS
    rig.executor.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_prefill_step_does_not_wait_either(
    scheme: VerifySchemeName | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_device(monkeypatch)
    rig = rig_with_requests(scheme)
    guard = NoWaiting(reads=(Sampler.sample, sampler.token_logprobs))
    with guard:
        rig.executor.run_step()
    assert guard.found == []
    rig.executor.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_forms_of_a_step_give_the_same_text(
    scheme: VerifySchemeName | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = rig_with_requests(scheme).run()
    as_on_a_device(monkeypatch)
    assert rig_with_requests(scheme).run() == texts


def before(function: Callable[..., object], fault: Callable[..., object]) -> Callable[..., object]:
    """The function with a fault put before it, on the same arguments."""

    def faulty(*args: object, **keywords: object) -> object:
        fault(*args)
        return function(*args, **keywords)

    return faulty


def pageable(values: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


FAULTS: dict[str, tuple[object, str, Callable[..., object] | None]] = {
    "a round reads its counts": (verify_scheme, "load_windows", lambda cache, slots, *_: slots.tolist()),
    "a replay reads its counts": (verify_scheme, "_replay", lambda state, counts, *_: int(counts.max())),
    "promotion reads its counts": (
        verify_scheme.IntermediateScheme,
        "promote",
        lambda scheme, layers, slots, counts: [slot for slot, n in zip(slots, counts, strict=True) if n],
    ),
    "experts count their rows": (
        moe.LatentMoE,
        "_run_groups",
        lambda block, rows, ends: torch.bincount(ends),
    ),
    "experts look for their rows": (moe.LatentMoE, "_run_groups", lambda block, rows, ends: ends[ends > 0]),
    "acceptance reads its counts": (
        SlotBuffers,
        "record_acceptance",
        lambda buffers, slots, num_drafts: num_drafts.cpu(),
    ),
    "slots are indexed by a list": (
        SlotBuffers,
        "record_acceptance",
        lambda buffers, slots, num_drafts: buffers.num_accepted[list(slots)],
    ),
    "the sampler copies from pageable memory": (sampler, "to_device", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_put_back_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_device(monkeypatch)
    owner, attribute, fault = FAULTS[name]
    put = pageable if fault is None else before(getattr(owner, attribute), fault)
    monkeypatch.setattr(owner, attribute, put)
    rig = rig_with_requests("intermediate" if "promotion" in name else "replay")
    assert run_guarded(rig, 2).found
    rig.executor.shutdown()


@pytest.mark.cuda
@pytest.mark.parametrize("for_kernels", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loop_does_not_wait_for_the_device(
    scheme: VerifySchemeName | None, for_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on a GPU, where torch itself raises on a wait; reads of the chosen tokens are let through."""
    rig = rig_with_requests(scheme, device="cuda", for_kernels=for_kernels)
    for function in ("sample", "token_logprobs"):
        owner = Sampler if function == "sample" else sampler
        monkeypatch.setattr(owner, function, let_wait(getattr(owner, function)))
    for _ in range(WARM_STEPS):
        rig.executor.run_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(GUARDED_STEPS):
            rig.executor.run_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.executor.shutdown()


def let_wait(function: Callable[..., object]) -> Callable[..., object]:
    """The function with reads of results allowed."""

    def waiting(*args: object) -> object:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    return waiting
