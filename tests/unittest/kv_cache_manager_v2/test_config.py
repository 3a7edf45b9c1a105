# SPDX-License-Identifier: Apache-2.0
"""Configuration values: what is refused, with which words, and that they are values."""

import dataclasses
from collections.abc import Callable

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    AttnLifeCycle,
    BatchDesc,
    BufferConfig,
    CacheTier,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    LayerId,
    MisuseError,
    SsmLayerConfig,
    SsmLifeCycle,
    SwaScratchReuseConfig,
)
from tensorrt_llm.runtime.kv_cache_manager_v2 import config as config_module
from tensorrt_llm.runtime.kv_cache_manager_v2.life_cycle import LifeCycleRegistry

KEY = BufferConfig("key", 1024)
ATTENTION = AttentionLayerConfig(LayerId(0), [KEY])
SSM = SsmLayerConfig(LayerId(1), [BufferConfig("ssm_state", 4096)])
GPU, HOST = GpuCacheTierConfig(1 << 21), HostCacheTierConfig(1 << 21)


def config(**changes: object) -> KVCacheManagerConfig:
    base: dict[str, object] = {"tokens_per_block": 32, "cache_tiers": [GPU], "layers": [ATTENTION]}
    return KVCacheManagerConfig(**{**base, **changes})  # type: ignore[arg-type]


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "quota": (lambda: GpuCacheTierConfig(0), r"quota is 0; give a positive"),
    "quota_in_gib": (lambda: GpuCacheTierConfig(13.2), r"quota is 13.2; give a positive whole number"),  # type: ignore[arg-type]
    "capacity_fraction": (lambda: KVCacheDesc(1.5, 0), r"capacity=1.5.*in whole tokens"),  # type: ignore[arg-type]
    "host_quota": (lambda: HostCacheTierConfig(-1), r"quota is -1"),
    "disk_path": (lambda: DiskCacheTierConfig(1, ""), r"path is empty; name an existing directory"),
    "buffer_size": (lambda: BufferConfig("key", 0), r"size of 'key' is 0"),
    "role": (lambda: BufferConfig("", 8), r"role is empty"),
    "no_buffers": (lambda: AttentionLayerConfig(LayerId(3), []), r"layer 3 has no buffers"),
    "roles": (lambda: AttentionLayerConfig(LayerId(3), [KEY, KEY]), r"layer 3 repeats a role"),
    "window": (lambda: AttentionLayerConfig(LayerId(3), [KEY], 0), r"sliding_window_size of layer 3 is 0"),
    "sink": (lambda: AttentionLayerConfig(LayerId(3), [KEY], None, 4), r"4 sink tokens but no window"),
    "ssm_override": (
        lambda: SsmLayerConfig(LayerId(3), [BufferConfig("ssm_state", 64, 8)]),
        r"layer 3.*tokens_per_block_override; leave it out",
    ),
    "history": (lambda: KVCacheDesc(4, 5), r"history_length=5\) breaks"),
    "capacity": (lambda: KVCacheDesc(2**31, 0), r"capacity=2147483648"),
    "system_prompt": (lambda: BatchDesc([], -1), r"system_prompt_length is -1"),
    "tokens_per_block": (lambda: config(tokens_per_block=0), r"tokens_per_block is 0"),
    "no_tiers": (lambda: config(cache_tiers=[]), r"start it with a GpuCacheTierConfig"),
    "gpu_first": (lambda: config(cache_tiers=[HOST]), r"starts with HOST_MEM"),
    "gpu_once": (lambda: config(cache_tiers=[GPU, GPU]), r"GPU_MEM twice"),
    "tier_order": (
        lambda: config(cache_tiers=[GPU, DiskCacheTierConfig(1, "/tmp"), HOST]),
        r"must go from near to far",
    ),
    "no_layers": (lambda: config(layers=[]), r"layers is empty"),
    "layer_ids": (lambda: config(layers=[ATTENTION, ATTENTION]), r"layer ids \[0, 0\] repeat"),
    "override": (
        lambda: config(layers=[AttentionLayerConfig(LayerId(0), [BufferConfig("key", 1024, 24)])]),
        r"override 24 must divide tokens_per_block 32",
    ),
    "util_zero": (lambda: config(max_util_for_resume=0.0), r"max_util_for_resume is 0.0; give a share in"),
    "util_large": (lambda: config(max_util_for_resume=1.5), r"max_util_for_resume is 1.5"),
    "backoff": (lambda: config(reuse_match_backoff=-1), r"reuse_match_backoff is -1"),
    "ssm_snapshot": (lambda: config(layers=[SSM]), r"need commit_min_snapshot=True"),
    "rewind": (lambda: SwaScratchReuseConfig(-1), r"max_rewind_len is -1; give 0 or more whole tokens"),
    "rewind_part": (lambda: SwaScratchReuseConfig(1.5), r"max_rewind_len is 1.5"),  # type: ignore[arg-type]
    "ratio_sum": (lambda: config(initial_pool_ratio=[0.5, 0.4]), r"sum to 1"),
    "ratio_sign": (lambda: config(initial_pool_ratio=[1.5, -0.5]), r"positive weights"),
    "samples": (lambda: config(rebalance_min_sampled_kv_caches=0), r"rebalance_min_sampled_kv_caches is 0"),
    "cooldown": (lambda: config(rebalance_cooldown_secs=-1), r"rebalance_cooldown_secs is -1"),
    "threshold": (lambda: config(rebalance_ratio_threshold=0.5), r"rebalance_ratio_threshold is 0.5"),
    "decay": (lambda: config(rebalance_moving_average_decay=1.0), r"rebalance_moving_average_decay is 1.0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_value_error_that_names_argument_value_and_remedy(name: str) -> None:
    make, message = MISTAKES[name]
    with pytest.raises(MisuseError, match=message) as raised:
        make()
    assert isinstance(raised.value, ValueError)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="tokens_per_page"):
        config(tokens_per_page=32)


def test_every_configuration_is_a_frozen_slotted_value() -> None:
    values = [one for one in vars(config_module).values() if dataclasses.is_dataclass(one)]
    assert len(values) >= 10
    for value in values:
        assert value.__dataclass_params__.frozen, value  # type: ignore[union-attr]
        assert "__slots__" in vars(value), value


def test_defaults_and_copies() -> None:
    base = config()
    assert (base.max_util_for_resume, base.enable_partial_reuse, base.commit_min_snapshot) == (
        0.97,
        True,
        False,
    )
    assert (base.rebalance_min_sampled_kv_caches, base.rebalance_ratio_threshold) == (2000, 1.25)
    copy = dataclasses.replace(base, layers=[SSM], commit_min_snapshot=True)
    assert copy.layers == (SSM,) and base.layers == (ATTENTION,)
    assert [tier.tier for tier in (GPU, HOST, DiskCacheTierConfig(1, "/tmp"))] == list(CacheTier)


def test_life_cycles_are_numbered_by_first_appearance_and_ssm_layers_share_one() -> None:
    layers = [
        SSM,
        AttentionLayerConfig(LayerId(7), [KEY], 128),
        ATTENTION,
        SsmLayerConfig(LayerId(2), [BufferConfig("conv_state", 8)]),
        AttentionLayerConfig(LayerId(5), [KEY], 128),
        AttentionLayerConfig(LayerId(6), [KEY], 128, 33),
    ]
    registry = LifeCycleRegistry(layers, 32)
    assert tuple(registry) == (
        SsmLifeCycle(),
        AttnLifeCycle(window_size=128),
        AttnLifeCycle(),
        AttnLifeCycle(window_size=128, num_sink_blocks=2),
    )
    assert registry.grouping == ((1, 2), (7, 5), (0,), (6,))
    assert registry.ssm_id == 0


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("sink_blocks", [0, 2])
def test_stale_blocks_are_those_no_later_query_sees(window: int, sink_blocks: int) -> None:
    """Against the definition: the query at position p sees tokens p + 1 - window to p, and the sinks."""
    size = 4
    life_cycle = AttnLifeCycle(window_size=window, num_sink_blocks=sink_blocks)
    for history in range(60):
        first_seen = max(0, history + 1 - window)
        expected = {block for block in range(sink_blocks, 30) if (block + 1) * size <= first_seen}
        assert set(range(*life_cycle.stale_range(history, size))) == expected
    assert AttnLifeCycle().stale_range(1000, size).length == 0
