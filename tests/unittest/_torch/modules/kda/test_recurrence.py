# SPDX-License-Identifier: Apache-2.0
"""The recurrence, its chunked form, and the arithmetic both rest on."""

import pytest
import torch

from tensorrt_llm._torch.modules.kda.chunk import chunk_kda
from tensorrt_llm._torch.modules.kda.recurrence import (
    KdaRecord,
    KdaTokens,
    apply_record,
    fma,
    make_record,
    recurrent_kda,
    short_conv,
)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


def random_tokens(T: int, bound: float, shift: float, H: int = 2, K: int = 32) -> KdaTokens:
    """float64 operands with log-decays in (bound, 0); a large shift makes decays strong."""
    q, k, v, g = torch.randn(4, T, H, K, dtype=torch.float64)
    unit = torch.nn.functional.normalize
    log_decay = bound * torch.sigmoid(3 * g + shift)
    return KdaTokens(unit(q, dim=-1), unit(k, dim=-1), v, log_decay, torch.rand(T, H, dtype=torch.float64))


def as_float(tokens: KdaTokens) -> KdaTokens:
    return KdaTokens(*(x.float() for x in tokens))


def test_fma_rounds_once() -> None:
    torch.manual_seed(0)
    decay, state, product = torch.rand(3, 1, 40), torch.randn(3, 24, 40), torch.randn(3, 24, 40)
    once = (decay.double() * state.double() + product.double()).float()
    assert torch.equal(fma(decay, state, product), once)
    assert not torch.equal(decay * state + product, once), (
        "the case must be able to tell two roundings from one"
    )


def test_recurrence_matches_the_textbook_form() -> None:
    """S diag(d), then beta (v - S k) k^T, then S q: the paper's order, in float64."""
    torch.manual_seed(1)
    tokens = random_tokens(9, -5.0, 0.0)
    state = torch.randn(2, 32, 32, dtype=torch.float64)
    o, last = recurrent_kda(tokens, state)
    S = state.clone()
    for t in range(9):
        S = S * tokens.log_decay[t].exp().unsqueeze(1)
        error = tokens.v[t] - torch.einsum("hvk,hk->hv", S, tokens.k[t])
        S = S + torch.einsum("h,hv,hk->hvk", tokens.beta[t], error, tokens.k[t])
        torch.testing.assert_close(o[t], torch.einsum("hvk,hk->hv", S, tokens.q[t]), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(last, S, rtol=1e-11, atol=1e-12)


def test_a_record_redoes_its_token_bit_for_bit() -> None:
    torch.manual_seed(2)
    tokens = as_float(random_tokens(1, -5.0, 0.0))
    state = torch.randn(2, 32, 32)
    record = make_record(state, tokens.k[0], tokens.v[0], tokens.log_decay[0], tokens.beta[0])
    _, expected = recurrent_kda(tokens, state)
    copy = KdaRecord(*(x.clone() for x in record))
    assert torch.equal(apply_record(state, copy), expected)


@pytest.mark.parametrize("bound", [-5.0, -30.0], ids=["factored", "pairwise"])
@pytest.mark.parametrize("shift", [-2.0, 4.0], ids=["slow_decay", "fast_decay"])
@pytest.mark.parametrize("T", [1, 5, 16, 64, 131])
def test_chunked_form_matches_the_recurrence(T: int, bound: float, shift: float) -> None:
    torch.manual_seed(T)
    tokens = random_tokens(T, bound, shift)
    state = torch.randn(2, 32, 32, dtype=torch.float64)
    o, last = recurrent_kda(tokens, state)
    chunked, chunked_last = chunk_kda(as_float(tokens), state.float(), bound)
    assert relative(chunked, o) < 1e-5
    assert relative(chunked_last, last) < 1e-5


def test_chunked_form_bears_a_gate_without_bound() -> None:
    """Log-decays of -60 a token: exp of the cumulative sum and of its negative both leave fp32."""
    torch.manual_seed(3)
    tokens = random_tokens(48, -60.0, 2.0)
    o, last = recurrent_kda(tokens, torch.ones(2, 32, 32, dtype=torch.float64))
    chunked, chunked_last = chunk_kda(as_float(tokens), torch.ones(2, 32, 32), None)
    assert relative(chunked, o) < 1e-5
    assert relative(chunked_last, last) < 1e-5


def test_chunked_form_splits_anywhere() -> None:
    torch.manual_seed(4)
    tokens = random_tokens(40, -5.0, 0.0)
    zero = torch.zeros(2, 32, 32, dtype=torch.float64)
    whole, last = chunk_kda(tokens, zero, -5.0)
    for cut in (1, 16, 23, 39):
        head, state = chunk_kda(KdaTokens(*(x[:cut] for x in tokens)), zero, -5.0)
        tail, end = chunk_kda(KdaTokens(*(x[cut:] for x in tokens)), state, -5.0)
        torch.testing.assert_close(torch.cat((head, tail)), whole, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(end, last, rtol=1e-10, atol=1e-12)


def test_chunked_form_has_the_recurrence_s_gradients() -> None:
    torch.manual_seed(5)
    tokens = random_tokens(20, -5.0, 0.0, H=1, K=8)
    grads = []
    for form in (lambda t, s: recurrent_kda(t, s), lambda t, s: chunk_kda(t, s, -5.0)):
        leaves = [x.clone().requires_grad_() for x in tokens]
        state = torch.ones(1, 8, 8, dtype=torch.float64, requires_grad=True)
        o, last = form(KdaTokens(*leaves), state)
        (o.square().sum() + last.sum()).backward()
        grads.append([x.grad for x in (*leaves, state)])
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(second, first, rtol=1e-8, atol=1e-9)


def test_short_conv_is_the_causal_depthwise_convolution() -> None:
    torch.manual_seed(6)
    x, taps = torch.randn(3 + 7, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    expected = torch.nn.functional.conv1d(x.T.unsqueeze(0), taps.T.unsqueeze(1), groups=5)[0].T
    torch.testing.assert_close(short_conv(x, taps), torch.nn.functional.silu(expected))
