# SPDX-License-Identifier: Apache-2.0
"""The first generation's mixed manager: attention pages, and as many state slots as live requests can need."""

from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.manager import MambaHybridCacheManagerV2


class MixedMambaHybridCacheManager(MambaHybridCacheManagerV2):
    """TensorRT-LLM's name for a manager without reuse of states and without draft records.

    It stands on the same storage: the classes differ in what they allow.
    """
