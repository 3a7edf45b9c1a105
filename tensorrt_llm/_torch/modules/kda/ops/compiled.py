# SPDX-License-Identifier: Apache-2.0
"""An op's CuTe DSL kernels on this device: from a pack, or compiled at first use."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tensorrt_llm._torch.modules.kda.ops.packs import Pack
from tensorrt_llm._torch.modules.kda.ops.registry import CompiledKernels


class KernelCache:
    """Launchers by configuration. What `pack` lacks is compiled; the DSL is imported only then."""

    def __init__(self, kernels: CompiledKernels, pack: Pack | None) -> None:
        self._kernels = kernels
        self._pack = pack
        self._launchers: dict[Any, Callable[..., Any]] = {}

    def prepare(self, configs: Iterable[Any]) -> None:
        """Load or compile before the first launch. Raises RuntimeError as `launcher` does."""
        for config in configs:
            self.launcher(config)

    def launcher(self, config: Any) -> Callable[..., Any]:
        """The launcher of a configuration. RuntimeError where it would be compiled inside a capture."""
        launcher = self._launchers.get(config)
        if launcher is None:
            launcher = self._launchers[config] = self._find(config)
        return launcher

    def _find(self, config: Any) -> Callable[..., Any]:
        packed = self._pack.kernel(config.name) if self._pack is not None else None
        if packed is not None:
            return packed
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{config.name} would be compiled inside a CUDA graph capture: run the batch once before "
                "capturing it, or set TRTLLM_KERNEL_PACK"
            )
        compiled: Callable[..., Any] = self._kernels.compile(config, None, "")
        return compiled
