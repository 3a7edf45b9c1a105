# SPDX-License-Identifier: Apache-2.0
"""The first generation's mixed manager, by its name and in its simplest form."""

from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.manager import MambaHybridCacheManagerV2


class MixedMambaHybridCacheManager(MambaHybridCacheManagerV2):
    """TensorRT-LLM's manager of attention pages and of states apart, without reuse or draft records.

    Here it stands on the V2 storage as the other does; `create_manager` gives it neither reuse nor records.
    """
