# SPDX-License-Identifier: Apache-2.0
"""Verify rounds under the three schemes against a literal history, and what a round may not touch."""

import random

import pytest
import torch

from tensorrt_llm._torch.modules.kda.recurrence import prepare_tokens, recurrent_kda
from tensorrt_llm._torch.modules.kda.verify_scheme import (
    INTERMEDIATE,
    RECORDS,
    REPLAY,
    SCHEMES,
    KdaGeometry,
    KdaRows,
    VerifyScheme,
    bytes_per_slot_layer,
    decode,
    get_scheme,
)
from tensorrt_llm._torch.modules.kda.windows import sync_window
from tests.unittest._torch.kimi_small import LayerCache, make_layer_cache, random_rows, random_weights

GEOMETRY = KdaGeometry(num_heads=2, head_dim=16, conv_width=4, num_spec=7)
ALL = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def at(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32)


def snapshot(cache: LayerCache) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in cache.tensors().items()}


def concatenate(parts: list[KdaRows]) -> KdaRows:
    names = ("proj", "qkv", "gate", "f", "b")
    return KdaRows(**{name: torch.cat([getattr(p, name) for p in parts]) for name in names})


def float64_state(rows: KdaRows, weights) -> torch.Tensor:  # noqa: ANN001
    history = torch.cat((torch.zeros(3, rows.qkv.shape[1]), rows.qkv)).double()
    tokens = prepare_tokens(history, rows.f.double(), rows.b.double(), weights)
    zero = torch.zeros(2, GEOMETRY.head_dim, GEOMETRY.head_dim, dtype=torch.float64)
    return recurrent_kda(tokens, zero)[1]


@ALL
def test_states_follow_a_float64_history_without_trend(scheme: VerifyScheme) -> None:
    """200 rounds of random length and acceptance: the golden state's error stays below 5e-6, and level."""
    torch.manual_seed(0)
    rng = random.Random(0)
    weights, exact = random_weights(GEOMETRY), None
    torch.manual_seed(0)
    exact = random_weights(GEOMETRY, torch.float64)
    cache = make_layer_cache(GEOMETRY, scheme, 2)
    accepted: list[KdaRows] = []
    errors = []
    for step in range(200):
        T = rng.choice([1, 1, 2, 4, 8, 8])
        rows = random_rows(GEOMETRY, T)
        scheme.verify(rows, weights, cache, at(1), T)
        count = rng.randint(0, T - 1)
        accepted.append(rows.span(slice(0, 1)))
        if step % 10 == 9:
            reference = float64_state(concatenate(accepted), exact)
            errors.append(((cache.temporal[1].double() - reference).norm() / reference.norm()).item())
        accepted.append(rows.span(slice(1, 1 + count)))
        cache.accept(scheme, 1, count)
    assert max(errors) < 5e-6
    assert max(errors[10:]) < 4 * max(errors[:10])


def test_schemes_and_decode_agree_bit_for_bit() -> None:
    torch.manual_seed(1)
    weights = random_weights(GEOMETRY)
    stream = random_rows(GEOMETRY, 40)
    plain = make_layer_cache(GEOMETRY, None, 1)
    outputs = torch.cat([decode(stream.span(slice(i, i + 1)), weights, plain, at(0)) for i in range(40)])
    for scheme in SCHEMES.values():
        cache = make_layer_cache(GEOMETRY, scheme, 1)
        position = 0
        for T, count in ((8, 7), (8, 0), (4, 2), (1, 0), (2, 1), (8, 3), (8, 5)):
            out = scheme.verify(stream.span(slice(position, position + T)), weights, cache, at(0), T)
            assert torch.equal(out, outputs[position : position + T]), (scheme.name, position)
            cache.accept(scheme, 0, count)
            position += 1 + count


@ALL
def test_a_batch_of_rounds_equals_each_alone(scheme: VerifyScheme) -> None:
    """Different pending counts side by side; a slot's result is torch.equal to its own run."""
    torch.manual_seed(2)
    weights = random_weights(GEOMETRY)
    first, second = random_rows(GEOMETRY, 8 * 8), random_rows(GEOMETRY, 8 * 8)
    batch, alone = (make_layer_cache(GEOMETRY, scheme, 8) for _ in range(2))
    slots = (3, 0, 7, 1, 6, 2, 5, 4)
    scheme.verify(first, weights, batch, at(*slots), 8)
    for i, slot in enumerate(slots):
        scheme.verify(first.span(slice(8 * i, 8 * i + 8)), weights, alone, at(slot), 8)
        batch.accept(scheme, slot, i)
        alone.accept(scheme, slot, i)
    together = scheme.verify(second, weights, batch, at(*slots), 8)
    apart = [
        scheme.verify(second.span(slice(8 * i, 8 * i + 8)), weights, alone, at(slot), 8)
        for i, slot in enumerate(slots)
    ]
    assert torch.equal(together, torch.cat(apart))
    for name, tensor in batch.tensors().items():
        assert torch.equal(tensor, alone.tensors()[name]), name


@ALL
@pytest.mark.parametrize("pending", [0, 2, 7])
def test_unread_drafts_may_hold_anything(scheme: VerifyScheme, pending: int) -> None:
    """NaN in what lies beyond the accepted drafts changes no bit of the result."""
    torch.manual_seed(3)
    weights = random_weights(GEOMETRY)
    rows, later = random_rows(GEOMETRY, 8), random_rows(GEOMETRY, 8)
    clean, poisoned = (make_layer_cache(GEOMETRY, scheme, 1) for _ in range(2))
    for cache in (clean, poisoned):
        scheme.verify(rows, weights, cache, at(0), 8)
        if cache is poisoned:
            for name, tensor in cache.tensors().items():
                if name == "kda_state_tok":
                    tensor[:, :, pending:] = torch.nan
                elif name in ("kda_qkg_cache", "kda_v_cache", "kda_beta_cache", "intermediate_ssm"):
                    tensor[:, pending:] = torch.nan
                elif name.startswith("kda_conv"):
                    tensor[:, :, pending + 3 :] = torch.nan
        cache.accept(scheme, 0, pending)
    assert torch.equal(
        scheme.verify(later, weights, clean, at(0), 8), scheme.verify(later, weights, poisoned, at(0), 8)
    )
    assert torch.equal(clean.temporal, poisoned.temporal)


@ALL
@pytest.mark.parametrize("T", [1, 3, 8])
def test_a_round_writes_only_what_it_owns(scheme: VerifyScheme, T: int) -> None:
    """Other slots, drafts T-1.. and conv columns from W-2+T on keep their bits."""
    torch.manual_seed(4)
    cache = make_layer_cache(GEOMETRY, scheme, 3)
    for tensor in cache.tensors().values():
        tensor.copy_(torch.randn(tensor.shape))
    before = snapshot(cache)
    scheme.verify(random_rows(GEOMETRY, T), random_weights(GEOMETRY), cache, at(1), T)
    drafts = {
        "kda_state_tok": 1,
        "kda_qkg_cache": 0,
        "kda_v_cache": 0,
        "kda_beta_cache": 0,
        "intermediate_ssm": 0,
    }
    for name, tensor in cache.tensors().items():
        assert torch.equal(tensor[[0, 2]], before[name][[0, 2]]), name
        if name in drafts:
            rest = slice(T - 1, None)
            axis = drafts[name]
            now, old = tensor[1].movedim(axis, 0), before[name][1].movedim(axis, 0)
            assert torch.equal(now[rest], old[rest]), name
            assert T == 1 or not torch.equal(now[: T - 1], old[: T - 1]), name
        elif name.startswith("kda_conv"):
            assert torch.equal(tensor[1, :, 2 + T :], before[name][1, :, 2 + T :]), name
            assert not torch.equal(tensor[1, :, : 2 + T], before[name][1, :, : 2 + T]), name
    assert torch.equal(cache.conv, before["conv"])


@pytest.mark.parametrize("scheme", [RECORDS, REPLAY, INTERMEDIATE], ids=SCHEMES)
@pytest.mark.parametrize("count", range(8))
def test_commit_equals_the_next_round_s_replay(scheme: VerifyScheme, count: int) -> None:
    torch.manual_seed(5)
    weights = random_weights(GEOMETRY)
    rows, later = random_rows(GEOMETRY, 8), random_rows(GEOMETRY, 1)
    cache, other = (make_layer_cache(GEOMETRY, scheme, 1) for _ in range(2))
    for c in (cache, other):
        scheme.verify(rows, weights, c, at(0), 8)
    scheme.commit(other.as_all_layers(), at(0), at(count))
    sync_window(other, (0,))
    cache.accept(scheme, 0, count)
    assert torch.equal(
        scheme.verify(later, weights, cache, at(0), 1), scheme.verify(later, weights, other, at(0), 1)
    )
    assert torch.equal(cache.temporal, other.temporal)


def test_bytes_of_kimi_k3_on_one_of_16_ranks() -> None:
    k3 = KdaGeometry(num_heads=6, head_dim=128, conv_width=4, num_spec=7)
    records, replay, states = (bytes_per_slot_layer(s, k3) for s in (RECORDS, REPLAY, INTERMEDIATE))
    assert records["kda_state_tok"] * 69 == 4_451_328
    conv = sum(size for name, size in records.items() if name.startswith("kda_conv"))
    assert (conv, conv * 69) == (92_160, 6_359_040)
    assert sum(replay.values()) - conv == 86_240
    assert (sum(replay.values()) - conv) * 69 == 5_950_560
    assert states["intermediate_ssm"] * 69 == 189_923_328


@ALL
def test_buffers_are_laid_out_as_named(scheme: VerifyScheme) -> None:
    geometry = KdaGeometry(num_heads=6, head_dim=8, conv_width=5, num_spec=2)
    for buffer in scheme.slot_buffers(geometry):
        tensor = buffer.allocate(3, 4, "cpu")
        assert tensor.shape == (3, 4, *buffer.shape)
        assert not tensor.any()
        assert tensor.untyped_storage().nbytes() == 12 * buffer.bytes_per_slot_layer
        if buffer.name.startswith("kda_conv"):
            assert buffer.shape == (48, 6)
            assert tensor.stride(2) == 1, "channels lie side by side"
        elif buffer.name == "kda_beta_cache":
            assert tensor.stride()[-2:] == (8, 1), "rows of 6 heads are padded to 16 bytes"
        else:
            assert tensor[0].is_contiguous()


def test_unknown_scheme_names_the_choices() -> None:
    with pytest.raises(
        ValueError, match="kda_verify_scheme='rewind' is unknown.*records, replay, intermediate"
    ):
        get_scheme("rewind")
