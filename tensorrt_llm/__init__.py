# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's names for a self-contained slice of it: Kimi-K3-style models with draft records.

Public names load on first use, so that `import tensorrt_llm` costs nothing and the cache and kernels run
where neither pydantic nor fastapi is installed.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING

# At once, since importing the module of the same name would otherwise leave the module under this name.
from tensorrt_llm.logger import logger as logger
from tensorrt_llm.version import __version__ as __version__

if TYPE_CHECKING:
    from tensorrt_llm.llmapi import LLM as LLM
    from tensorrt_llm.llmapi import TorchLlmArgs as TorchLlmArgs
    from tensorrt_llm.mapping import Mapping as Mapping
    from tensorrt_llm.sampling_params import SamplingParams as SamplingParams

_HOME_OF = {
    "LLM": "tensorrt_llm.llmapi",
    "Mapping": "tensorrt_llm.mapping",
    "SamplingParams": "tensorrt_llm.sampling_params",
    "TorchLlmArgs": "tensorrt_llm.llmapi",
}

__all__ = ["LLM", "Mapping", "SamplingParams", "TorchLlmArgs", "__version__", "logger"]


def _refuse_upstream_neighbour() -> None:
    """Raise ImportError if the distribution whose import name we share is installed here too.

    The two would overwrite each other's files, and what an import finds would depend on who came last.
    """
    try:
        upstream = distribution("tensorrt_llm")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"tensorrt-llm-kda and TensorRT-LLM {upstream.version} are both installed here and share the import "
        "name 'tensorrt_llm'. Use an environment of its own for tensorrt-llm-kda: python3 -m venv NEW, then "
        "NEW/bin/pip install tensorrt-llm-kda."
    )


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tensorrt_llm' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_refuse_upstream_neighbour()
