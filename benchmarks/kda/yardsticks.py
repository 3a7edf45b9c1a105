# SPDX-License-Identifier: Apache-2.0
"""What the ops are measured against: copies, a weight read once, fla-core's kernels, a predecessor.

On a CPU each stands in torch, so that the way can be tried without a GPU.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kda.runs import relative_error
from benchmarks.kda.sizes import HEAD_DIM, Size
from benchmarks.kda.timing import Call
from tensorrt_llm._torch.modules.kda.recurrence import KdaTokens, recurrent_kda

COPY_LAUNCHES = ((1024, 4), (2048, 4), (4096, 8), (8192, 8))
READ_LAUNCHES = ((4096, 4, 4), (4096, 8, 8), (8192, 8, 2), (8192, 8, 8))
PREDECESSOR_LAUNCH = (1024, 4)
REPLAYED_DRAFTS = 7
FLA_TOLERANCE = 1e-2


def copy_memory(num_bytes: int, copies: int, device: str) -> tuple[Tensor, Tensor]:
    """Source and target [copies, words] of copies that move num_bytes each, read and write together."""
    words = -(-num_bytes // 2 // 4 // 4096) * 4096
    source = torch.randn(copies, words, device=device)
    return source, torch.zeros_like(source)


def copy_names(device: str) -> list[str]:
    """The launches of `copy_calls`."""
    return ["torch", *(f"{block}x{warps}" for block, warps in COPY_LAUNCHES if device != "cpu")]


def read_names(device: str) -> list[str]:
    """The launches of `read_calls`."""
    shapes = READ_LAUNCHES if device != "cpu" else ()
    return ["torch", *(f"{block}x{warps}x{steps}" for block, warps, steps in shapes)]


def copy_calls(source: Tensor, target: Tensor) -> dict[str, list[Call]]:
    """Copies of source[i] to target[i], by launch."""
    copies, words = source.shape
    found: dict[str, list[Call]] = {"torch": [lambda i=i: target[i].copy_(source[i]) for i in range(copies)]}
    if not source.is_cuda:
        return found
    from benchmarks.kda.yardstick_kernels import copy_kernel

    for block, warps in COPY_LAUNCHES:
        grid = (-(-words // block),)
        found[f"{block}x{warps}"] = [
            lambda i=i, grid=grid, block=block, warps=warps: copy_kernel[grid](
                source[i], target[i], words, BLOCK=block, num_warps=warps
            )
            for i in range(copies)
        ]
    return found


def _read(flat: Tensor, block: int, warps: int, steps: int) -> Tensor:
    from benchmarks.kda.yardstick_kernels import read_kernel

    grid = (-(-flat.numel() // (block * steps)),)
    sums = torch.empty(grid, device=flat.device)
    read_kernel[grid](flat, sums, flat.numel(), BLOCK=block, STEPS=steps, num_warps=warps)
    return sums


def read_calls(weights: Tensor) -> dict[str, list[Call]]:
    """Each of `weights` [copies, ...] read once, by launch; the sums of what was read add up to its sum."""
    rows = [weight.view(-1) for weight in weights]
    found: dict[str, list[Call]] = {"torch": [partial(torch.sum, row, dtype=torch.float32) for row in rows]}
    if weights.is_cuda:
        for block, warps, steps in READ_LAUNCHES:
            found[f"{block}x{warps}x{steps}"] = [partial(_read, row, block, warps, steps) for row in rows]
    return found


def check_yardsticks(device: str) -> None:
    """Every launch copies what a torch copy does, or reads it all; AssertionError names one that does not."""
    source, target = copy_memory(100_000, 1, device)
    for name, calls in copy_calls(source, target).items():
        target.zero_()
        calls[0]()
        assert torch.equal(target, source), f"copy/{name} leaves something out"
    weights = torch.ones(1, 123, 457, device=device, dtype=torch.bfloat16)
    for name, calls in read_calls(weights).items():
        found: Any = calls[0]()
        assert found.sum().item() == weights.numel(), f"weight_pass/{name} leaves something out"
    target.zero_()
    write_rows(source, target)
    assert torch.equal(target, source), "the predecessor leaves something out"


def write_rows(source: Tensor, target: Tensor) -> None:
    """A predecessor: copy rows in a launch that triggers its dependents (programmatic dependent launch)."""
    if not source.is_cuda:
        target.copy_(source)
        return
    from benchmarks.kda.yardstick_kernels import predecessor_kernel

    block, warps = PREDECESSOR_LAUNCH
    predecessor_kernel[(-(-source.numel() // block),)](
        source, target, source.numel(), BLOCK=block, num_warps=warps, launch_pdl=True
    )


def random_tokens(size: Size, tokens: int, device: str) -> tuple[Tensor, ...]:
    """q, k, v bf16, log decays and beta fp32 of N requests in a row, [1, N tokens, H, ...]."""
    shape = (1, size.n * tokens, size.h)
    q, k, v = (torch.randn(*shape, HEAD_DIM, device=device).bfloat16() for _ in range(3))
    return q, k, v, -torch.rand(*shape, HEAD_DIM, device=device), torch.rand(*shape, device=device)


def exact_recurrence(tokens: tuple[Tensor, ...], n: int, states: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last states of N requests in float64; q and k are normalised, q scaled."""
    q, k, v, g, beta = (x[0].unflatten(0, (n, -1)).double().cpu() for x in tokens)
    unit = KdaTokens(F.normalize(q, dim=-1) * HEAD_DIM**-0.5, F.normalize(k, dim=-1), v, g, beta)
    o, last = recurrent_kda(unit, states.double().cpu())
    return o.flatten(0, 1).unsqueeze(0), last


def fla_recurrent_call(size: Size, tokens: int, states: int, device: str) -> Call:
    """fla-core's recurrence over `tokens` per request, keeping `states` of them: each token's or the last."""
    n = size.n
    operands = random_tokens(size, tokens, device)
    pool = torch.randn(n * states, size.h, HEAD_DIM, HEAD_DIM, device=device)
    if device == "cpu":
        return lambda: exact_recurrence(operands, n, pool[::states])
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    keywords: dict[str, Any] = {
        "cu_seqlens": torch.arange(0, n * tokens + 1, tokens, device=device, dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
        "inplace_final_state": states > 1,
    }
    if states > 1:
        keywords["ssm_state_indices"] = torch.arange(n * states, device=device, dtype=torch.int32).view(n, -1)
        keywords["num_accepted_tokens"] = torch.ones(n, device=device, dtype=torch.int32)
    else:
        keywords["output_final_state"] = True
    return lambda: fused_recurrent_kda_fwd(*operands, initial_state=pool, **keywords)


def prompt_logits(size: Size, device: str) -> dict[str, Tensor]:
    """bf16 operands of chunk_kda as a layer has them: gate and beta are logits."""
    shape = (size.n, size.t, size.h)
    names = {"q": (HEAD_DIM,), "k": (HEAD_DIM,), "v": (HEAD_DIM,), "g": (HEAD_DIM,), "beta": ()}
    operands = {name: torch.randn(*shape, *rest, device=device).bfloat16() for name, rest in names.items()}
    bias = torch.randn(size.width, device=device) - 2.0
    return operands | {"A_log": torch.rand(size.h, device=device) - 1.0, "dt_bias": bias}


def exact_prompt(operands: dict[str, Tensor]) -> Tensor:
    """Outputs in float64 of `prompt_logits` from states of zero."""
    x = {name: value.double().cpu() for name, value in operands.items()}
    n, _, h, width = x["q"].shape
    slope = x["A_log"].exp().unsqueeze(-1)
    g = -5.0 * torch.sigmoid(slope * (x["g"] + x["dt_bias"].view(h, width)))
    tokens = tuple(y.flatten(0, 1).unsqueeze(0) for y in (x["q"], x["k"], x["v"], g, x["beta"].sigmoid()))
    o, _ = exact_recurrence(tokens, n, torch.zeros(n, h, width, width))
    return o.view(x["v"].shape)


def fla_chunk_call(operands: dict[str, Tensor]) -> Call:
    """fla-core's chunk_kda over prompts, with everything in its kernels that they take."""
    if not operands["q"].is_cuda:
        return lambda: (exact_prompt(operands), None)
    from fla.ops.kda import chunk_kda

    n, _, h, width = operands["q"].shape
    keywords: dict[str, Any] = {
        "initial_state": torch.zeros(n, h, width, width, device=operands["q"].device),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": -5.0,
        "state_v_first": True,
    }
    return lambda: chunk_kda(**operands, **keywords)


def check_fla(device: str) -> None:
    """Outputs of fla-core's kernels against float64; AssertionError gives the error."""
    size = Size(n=2, h=2, t=70)
    for tokens, states in ((8, 8), (15, 1)):
        torch.manual_seed(0)
        operands = random_tokens(size, tokens, device)
        pool = torch.randn(size.n * states, size.h, HEAD_DIM, HEAD_DIM, device=device)
        want, _ = exact_recurrence(operands, size.n, pool[::states])
        torch.manual_seed(0)
        found: Any = fla_recurrent_call(size, tokens, states, device)()
        _assert_close("fused_recurrent_kda", found[0], want)
    logits = prompt_logits(size, device)
    found = fla_chunk_call(logits)()
    _assert_close("chunk_kda", found[0], exact_prompt(logits))


def _assert_close(name: str, value: Tensor, reference: Tensor) -> None:
    error = relative_error(value.view(reference.shape), reference)
    assert error < FLA_TOLERANCE, f"fla-core's {name} is off by {error:.1e}"
