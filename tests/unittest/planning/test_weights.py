# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights per rank against the shapes of the models' published configurations and real tensors."""

from pathlib import Path

import pytest

from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.planning.models import DTYPE, GroupQuantization, find_model
from tensorrt_llm.planning.weights import count_weights
from tests.unittest.planning.helpers import small_config, small_model, write_config


def ranks(tp: int = 1, pp: int = 1, ep: int = 1, stage: int = 0) -> Mapping:
    return Mapping(world_size=tp * pp, rank=stage * tp, tp_size=tp, pp_size=pp, moe_ep_size=ep)


def test_one_rank_holds_the_real_models_tensors(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    real = KimiForCausalLM(model.config, DTYPE)
    weights = count_weights(model, ranks())
    assert weights.total_bytes == sum(tensor.nbytes for tensor in real.state_dict().values())
    assert weights.replicated_bytes == 0


def test_kimi_k3_routed_experts_are_4_25_bits() -> None:
    routed = 92 * 896 * 3 * 3584 * 3072
    for tp, ep in ((1, 1), (16, 1), (16, 16), (32, 8)):
        weights = count_weights(find_model("kimi-k3"), ranks(tp=tp, ep=ep))
        assert weights.routed_expert_bytes == routed * 17 // 32 // tp


def test_kimi_k3_in_full() -> None:
    """2.78 T parameters: all but the routed experts take two bytes each (a few take four)."""
    weights = count_weights(find_model("kimi-k3"), ranks())
    other = weights.total_bytes - weights.routed_expert_bytes
    D, H, hidden, K = 12_288, 96, 7168, 128
    kda = 69 * (5 * D * hidden + D * K + hidden * K + H * hidden)
    mla = 24 * (hidden * (1536 + 576 + D) + 1536 * H * 192 + 512 * H * 256 + D * hidden)
    moe = 92 * (896 * hidden + 2 * hidden * 3584 + 3 * hidden * 6144)
    dense, ends = 3 * hidden * 33_792, 2 * 163_840 * hidden
    assert other == pytest.approx(2 * (kda + mla + moe + dense + ends), rel=1e-3)


def test_kimi_linear_is_48_billion_parameters() -> None:
    weights = count_weights(find_model("kimi-linear-48b"), ranks())
    assert weights.total_bytes / 2 == pytest.approx(49.1e9, rel=1e-3)
    assert weights.routed_expert_bytes == 2 * 26 * 256 * 3 * 2304 * 1024


def test_what_no_head_owns_is_on_every_rank() -> None:
    """Latent projections, MLA's down projections, the router, f_a, norms and residual sites."""
    weights = count_weights(find_model("kimi-k3"), ranks(tp=16))
    hidden = 7168
    latent = 92 * (2 * hidden * 3584 + 896 * hidden + 3584)
    mla = 24 * (hidden * (1536 + 576) + 1536 + 512)
    vectors = 93 * 6 * hidden + 3 * hidden
    kda = 69 * (128 * hidden + 128)
    # The rest are rows of padding, of which 16 ranks have more than one.
    assert weights.replicated_bytes == pytest.approx(2 * (latent + mla + vectors + kda), rel=3e-4)


def test_split_and_replicated_make_the_whole(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    whole = count_weights(model, ranks()).total_bytes
    for tp, ep in ((2, 1), (4, 1), (4, 2), (4, 4)):
        weights = count_weights(model, ranks(tp=tp, ep=ep))
        split = weights.total_bytes - weights.replicated_bytes
        # Padded rows of fused projections and the remainder of a division are all that is not exact.
        assert tp * split + weights.replicated_bytes == pytest.approx(whole, rel=0.02)
        assert weights.routed_expert_bytes * tp == count_weights(model, ranks()).routed_expert_bytes


def test_pipeline_stages_make_the_whole(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    stages = [count_weights(model, ranks(pp=3, stage=stage)).total_bytes for stage in range(3)]
    assert sum(stages) == count_weights(model, ranks()).total_bytes
    assert count_weights(model, ranks(pp=3, tp=2, stage=1)).total_bytes < stages[1]


def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last(tmp_path: Path) -> None:
    small, large = small_model(tmp_path / "small"), small_model(tmp_path / "large", vocab_size=164)
    more = [
        count_weights(large, ranks(pp=3, stage=stage)).total_bytes
        - count_weights(small, ranks(pp=3, stage=stage)).total_bytes
        for stage in range(3)
    ]
    matrix = 100 * 32 * DTYPE.itemsize
    assert more == [matrix, 0, matrix]


def test_the_router_scores_all_experts_on_every_rank(tmp_path: Path) -> None:
    """Experts split whole, or inside: the rank's bytes are the same."""
    model = small_model(tmp_path)
    assert count_weights(model, ranks(tp=4, ep=4)) == count_weights(model, ranks(tp=4, ep=1))


def test_group_quantisation_pads_rows() -> None:
    quantization = GroupQuantization(num_bits=4, group_size=32)
    assert quantization.matrix_bytes(1, 32) == 17
    assert quantization.matrix_bytes(10, 33) == 10 * (17 + 2)


def test_quantisation_shrinks_routed_experts_alone(tmp_path: Path) -> None:
    plain = small_model(tmp_path / "plain")
    form = {"quantization_config": {"format": "mxfp4-pack-quantized"}}
    packed = find_model(str(write_config(tmp_path / "packed", small_config(**form))))
    before, after = count_weights(plain, ranks()), count_weights(packed, ranks())
    # 5 layers of 8 experts: w1 and w3 [16, 24] and w2 [24, 16], a group each row.
    assert after.routed_expert_bytes == 5 * 8 * (32 * (12 + 1) + 24 * (8 + 1))
    saved = before.routed_expert_bytes - after.routed_expert_bytes
    assert before.total_bytes - after.total_bytes == saved


@pytest.mark.parametrize(
    ("change", "tp", "ep", "message"),
    [
        ({"num_attention_heads": 6}, 4, 1, "num_attention_heads is 6, which tp 4 does not divide"),
        ({"intermediate_size": 50}, 4, 1, "intermediate_size is 50, which tp 4 does not divide"),
        ({"num_experts": 6}, 4, 4, "num_experts is 6, which ep 4 does not divide"),
        ({"moe_intermediate_size": 14}, 4, 1, "moe_intermediate_size is 14, which tp / ep 4 does not"),
    ],
)
def test_what_does_not_divide_is_refused(
    tmp_path: Path, change: dict[str, int], tp: int, ep: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        count_weights(small_model(tmp_path, **change), ranks(tp=tp, ep=ep))


def test_a_vocabulary_need_not_divide(tmp_path: Path) -> None:
    even, odd = small_model(tmp_path / "even"), small_model(tmp_path / "odd", vocab_size=65)
    more = count_weights(odd, ranks(tp=4)).total_bytes - count_weights(even, ranks(tp=4)).total_bytes
    assert more == 2 * 32 * DTYPE.itemsize
