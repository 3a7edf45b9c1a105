# SPDX-License-Identifier: Apache-2.0
"""What the hybrid manager's constructor refuses, with which words, and in which order."""

import pytest
import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import BlockReuseSettings, CacheType
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm.mapping import Mapping
from tests.unittest._torch.executor.kv_cache.helpers import make_manager, settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_state_layout": "k_q_v"}, "conv_state_layout is 'k_q_v'"),
        ({"use_replay_state_update": True}, "mutually exclusive"),
        ({"with_spec_config": False}, "require speculative decoding"),
        ({"kda_replay_num_spec": 3}, "must match the draft length of spec_config, 2"),
        ({"conv_state_layout": "x_b_c"}, "conv_state_layout='q_k_v'"),
        ({"layer_mask": [False, False, True]}, "layer_mask has 3 entries and mamba_layer_mask 4"),
        ({"kda_verify_scheme": "recrods"}, "kda_verify_scheme='recrods'"),
        ({"kda_verify_scheme": "replay", "kda_token_states": True}, "contradicts"),
        ({"kv_connector_manager": object()}, "kv_connector_manager"),
        ({"max_beam_width": 2}, "max_beam_width is 2"),
        ({"num_heads": 0}, "mamba_num_heads is 0"),
        ({"conv_width": 1}, "mamba_d_conv is 1"),
        ({"ssm_dtype": torch.float16}, "mamba_ssm_cache_dtype is torch.float16"),
        ({"ssm_dtype": "fp32"}, "mamba_ssm_cache_dtype is 'fp32'"),
        ({"conv_dtype": torch.int8}, "mamba_cache_dtype is torch.int8"),
        ({"dtype": "auto"}, "dtype is 'auto'"),
        ({"kv_cache_type": "SELFKONLY"}, "kv_cache_type is 'SELFKONLY'"),
        ({"mapping": Mapping(world_size=3, tp_size=3)}, "mamba_num_heads is 2.*3 ranks"),
        ({"latent_dim": 0}, "head_dim is 0"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1"),
        ({"num_layers": 3}, "num_layers is 3"),
    ],
)
def test_v2_kda_replay_validates_configuration(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_manager(**changes)


@pytest.mark.parametrize("cls", [MambaHybridCacheManagerV2, KVCacheManagerV2])
@pytest.mark.parametrize("turns", [0, 2, 7])
def test_turns_of_a_conversation_are_refused_and_not_ignored(cls: type[KVCacheManagerV2], turns: int) -> None:
    reuse = BlockReuseSettings(policy="per_conversation", max_num_turns=turns)
    config = settings(enable_block_reuse=True, block_reuse_config=reuse)
    with pytest.raises(ValueError, match=f"max_num_turns is {turns}, .*leave it at 1"):
        if cls is MambaHybridCacheManagerV2:
            make_manager(config=config)
        else:
            cls(config, CacheType.SELFKONLY, num_layers=1, num_kv_heads=1, head_dim=4, tokens_per_block=4,
                max_seq_len=64, max_batch_size=2, mapping=Mapping(), device="cpu")  # fmt: skip
    one_turn = settings(enable_block_reuse=True, block_reuse_config=BlockReuseSettings(max_num_turns=1))
    make_manager(config=one_turn).shutdown()


def test_refusals_come_in_the_order_of_the_contract() -> None:
    """Each mistake alone is refused for itself; of two the earlier in the order wins."""
    mistakes: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"model_type": "x"}, TypeError, "model_type"),
        ({"conv_state_layout": "none"}, ValueError, "conv_state_layout is 'none'"),
        ({"kda_replay_num_spec": 3}, ValueError, "must match the draft length"),
        ({"config": {"enable_kv_pool_rebalance": True}}, ValueError, "enable_kv_pool_rebalance"),
        ({"config": {"pool_ratio": (0.5, 0.5)}}, ValueError, "pool_ratio"),
        ({"config": {"max_gpu_total_bytes": 4096}}, ValueError, "too small for live recurrent states"),
    ]
    for first, (_, error, message) in enumerate(mistakes):
        merged: dict[str, object] = {"kda_token_states": True}
        config: dict[str, object] = {}
        for others, _, _ in mistakes[first:]:
            config.update(others.get("config", {}))
            merged.update({k: v for k, v in others.items() if k != "config"})
        with pytest.raises(error, match=message):
            make_manager(config=settings(**config), **merged)
    assert len(mistakes) == 6
