# SPDX-License-Identifier: Apache-2.0
"""The first generation's mixed manager, by its name and in its simplest form."""

from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.manager import MambaHybridCacheManagerV2


class MixedMambaHybridCacheManager(MambaHybridCacheManagerV2):
    """TensorRT-LLM's manager of attention pages and of states apart, without reuse and without draft records.

    Here it stands on the V2 storage as the other does. Raises ValueError for what it does not have.
    """

    def _open_hybrid(
        self, kv_cache_config: KvCacheConfigLike, sizing: HybridSizing, enable_stats: bool
    ) -> None:
        for name, is_asked_for in (
            ("kv_cache_config.enable_block_reuse=True", sizing.enable_block_reuse),
            ("kda_token_states=True", sizing.reserves_side_bytes),
        ):
            if is_asked_for:
                raise ValueError(
                    f"{name} needs MambaHybridCacheManagerV2: set "
                    "kv_cache_config.use_kv_cache_manager_v2=True"
                )
        super()._open_hybrid(kv_cache_config, sizing, enable_stats)
