# SPDX-License-Identifier: Apache-2.0
"""The names by which TensorRT-LLM's users find the choice, the size and the making of a cache manager."""

from tensorrt_llm._torch.pyexecutor.kv_cache.budget import KvCacheCreator as KvCacheCreator
from tensorrt_llm._torch.pyexecutor.kv_cache.create import (
    _create_kv_cache_manager as _create_kv_cache_manager,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.select import (
    get_kv_cache_manager_cls as get_kv_cache_manager_cls,
)

__all__ = ["KvCacheCreator", "_create_kv_cache_manager", "get_kv_cache_manager_cls"]
