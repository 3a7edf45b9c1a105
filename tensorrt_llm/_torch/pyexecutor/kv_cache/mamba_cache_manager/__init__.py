# SPDX-License-Identifier: Apache-2.0
"""Managers of requests that have recurrent states as well as attention pages."""

from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import (
    BaseMambaCacheManager as BaseMambaCacheManager,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import (
    ReplayStateUpdateMetadata as ReplayStateUpdateMetadata,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.legacy import (
    MixedMambaHybridCacheManager as MixedMambaHybridCacheManager,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.manager import (
    MambaHybridCacheManagerV2 as MambaHybridCacheManagerV2,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import MambaRole as MambaRole
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.views import (
    SpeculativeState as SpeculativeState,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.views import State as State
