# SPDX-License-Identifier: Apache-2.0
"""Sizes, addresses and views of a manager on CPU memory, and its end."""

import pytest
import torch

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerId,
    MisuseError,
    PageIndexMode,
    ResourceBusyError,
    SsmLayerConfig,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import cdiv, float32

MIB = 1 << 20


@pytest.fixture
def manager():
    layers = [
        AttentionLayerConfig(LayerId(0), [BufferConfig("key", 512), BufferConfig("value", 512)]),
        SsmLayerConfig(LayerId(1), [BufferConfig("ssm_state", 4096), BufferConfig("conv_state", 96)]),
        AttentionLayerConfig(LayerId(2), [BufferConfig("key", 512), BufferConfig("value", 512)]),
        SsmLayerConfig(LayerId(3), [BufferConfig("ssm_state", 4096), BufferConfig("conv_state", 96)]),
    ]
    config = KVCacheManagerConfig(
        tokens_per_block=8,
        cache_tiers=[GpuCacheTierConfig(16 * MIB)],
        layers=layers,
        max_util_for_resume=0.95,
        commit_min_snapshot=True,
    )
    manager = KVCacheManager(config, device="cpu")
    yield manager
    manager.shutdown()


def test_layer_groups_follow_first_appearance(manager: KVCacheManager) -> None:
    assert manager.layer_grouping == ((0, 2), (1, 3))
    assert [desc.slot_sizes for desc in manager.pool_group_descs] == [(2048,), (8192, 192)]


def test_resume_ratio_reads_back_as_float32(manager: KVCacheManager) -> None:
    assert manager.init_config.max_util_for_resume == float32(0.95) != 0.95


def test_page_index_arithmetic(manager: KVCacheManager) -> None:
    attention, ssm = manager.get_storage_statistics()
    assert manager.get_page_index_scale(LayerId(2), "value") == 4
    assert manager.get_page_index_upper_bound(LayerId(2), "value") == 4 * attention.total - 3
    assert manager.get_page_index_upper_bound(LayerId(3), "ssm_state") == 2 * ssm.total - 1
    assert cdiv(manager.get_page_index_upper_bound(LayerId(3), "ssm_state"), 2) == ssm.total
    assert manager.get_page_stride(LayerId(3), "conv_state") == 96
    shared = manager.get_mem_pool_base_address(LayerId(2), "value", PageIndexMode.SHARED)
    per_layer = manager.get_mem_pool_base_address(LayerId(2), "value", PageIndexMode.PER_LAYER)
    assert shared - per_layer == 3 * 512
    assert manager.get_page_index_converter(LayerId(2), "value")([2, -1]) == [8, -1]
    assert manager.get_page_index_converter(LayerId(2), "value", PageIndexMode.PER_LAYER)([2]) == [11]


def test_buffer_views_are_strided_zero_copy_and_zero(manager: KVCacheManager) -> None:
    view = manager.get_buffer_view(LayerId(3), "ssm_state", torch.float32, (4, 16, 16))
    assert view.shape == (manager.get_storage_statistics()[1].total, 4, 16, 16)
    assert view.stride() == (2 * 1024, 256, 16, 1)
    assert view.data_ptr() == manager.get_mem_pool_base_address(LayerId(3), "ssm_state")
    assert not view.any()
    view[1] = 7.0
    other = manager.get_buffer_view(LayerId(1), "ssm_state", torch.float32, (1024,))
    assert not other.any()
    assert manager.get_buffer_view(LayerId(3), "ssm_state", torch.float32, (1024,))[1].eq(7).all()


def test_key_and_value_of_a_layer_can_be_seen_as_one(manager: KVCacheManager) -> None:
    both = manager.get_buffer_view(LayerId(2), "key", torch.bfloat16, (2, 8, 32))
    both[3, 1] = 5.0
    value = manager.get_buffer_view(LayerId(2), "value", torch.bfloat16, (8, 32))
    assert value[3].eq(5).all() and not value[2].any() and not value[4].any()


@pytest.mark.parametrize("shape", [(8, 31), (3, 8, 32), (4, 8, 32)])
def test_a_view_of_the_wrong_size_is_refused(manager: KVCacheManager, shape: tuple[int, ...]) -> None:
    with pytest.raises(MisuseError, match="bytes"):
        manager.get_buffer_view(LayerId(2), "key", torch.bfloat16, shape)


def test_unknown_buffer_names_what_there_is(manager: KVCacheManager) -> None:
    with pytest.raises(MisuseError, match=r"layer 1 has \['conv_state', 'ssm_state'\]"):
        manager.get_buffer_view(LayerId(1), "key", torch.float32, (1,))
    with pytest.raises(MisuseError, match="no layer 9"):
        manager.get_page_stride(LayerId(9), "key")


def test_shutdown_with_an_open_cache_is_refused(manager: KVCacheManager) -> None:
    cache = manager.create_kv_cache(id="talkative")
    with pytest.raises(ResourceBusyError, match="talkative"):
        manager.shutdown()
    cache.close()
    manager.shutdown()
    manager.shutdown()
    with pytest.raises(MisuseError, match="shut down"):
        manager.create_kv_cache()


def test_unknown_keyword_is_a_type_error(manager: KVCacheManager) -> None:
    with pytest.raises(TypeError, match="lora_id"):
        manager.create_kv_cache(lora_id=3)  # type: ignore[call-arg]
