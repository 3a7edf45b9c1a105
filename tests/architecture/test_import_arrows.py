# SPDX-License-Identifier: Apache-2.0
"""The package's sources keep to the architecture, and each detector finds the violation planted for it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools import arrows
from tools.arrows import Source

ROOT = Path(__file__).resolve().parents[2]

Detector = Callable[[Sequence[Source]], list[str]]

DETECTORS: list[Detector] = [
    arrows.find_forbidden_arrows,
    arrows.find_dodged_circles,
    arrows.find_heavy_imports,
    arrows.find_environment_reads,
    arrows.find_open_keywords,
    arrows.find_defaulted_getattr,
]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return arrows.read_sources(ROOT)


def plant(*modules: tuple[str, str]) -> list[Source]:
    """Sources from (name inside the package, text); a name that ends with a dot is a package."""
    return [
        arrows.parse(f"{arrows.PACKAGE}.{name}".rstrip("."), text, is_package=name.endswith("."))
        for name, text in modules
    ]


@pytest.mark.parametrize("detector", DETECTORS)
def test_package_is_clean(detector: Detector, sources: list[Source]) -> None:
    assert detector(sources) == []


def test_sources_are_the_package(sources: list[Source]) -> None:
    names = {source.name for source in sources}
    assert {"tensorrt_llm", "tensorrt_llm.mapping", "tensorrt_llm._torch.pyexecutor.kv_cache"} <= names


def test_rooms_are_arranged_without_circles() -> None:
    """A room that another may import never may import it back, however long the way."""
    for room, known in arrows.ARROWS.items():
        for other in known - {room}:
            # The two rooms of `modules` are one building: the scheme alone is open to the caches.
            if {room, other} != {"_torch.modules", "_torch.modules.kda.verify_scheme"}:
                assert room not in arrows.ARROWS[other], (room, other)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("runtime.kv_cache_manager_v2.quota", "from tensorrt_llm._torch.pyexecutor import scheduler"),
        ("runtime.kv_cache_manager_v2.pools", "from ..._torch.models import kimi_k3"),
        ("_torch.pyexecutor.kv_cache.create", "import tensorrt_llm._torch.models.kimi_k3"),
        ("_torch.pyexecutor.kv_cache.create", "from tensorrt_llm._torch.modules.mla import Mla"),
        ("_torch.pyexecutor.kv_cache.budget", "from ..llm_request import LlmRequest"),
        ("_torch.modules.moe", "def f():\n    from tensorrt_llm._torch.models import kimi_k3"),
        ("_torch.pyexecutor.scheduler", "from tensorrt_llm.llmapi.llm_args import KvCacheConfig"),
        ("executor.proxy", "if TYPE_CHECKING:\n    from tensorrt_llm.llmapi import LLM"),
        ("llmapi.llm", "from tensorrt_llm.serve import openai_server"),
        ("serve.app", "from tensorrt_llm import commands"),
        ("serve.app", "from tensorrt_llm import LLM"),
        ("envs", "from tensorrt_llm.logger import logger"),
        ("attic", ""),
    ],
)
def test_upward_arrow_is_found(module: str, text: str) -> None:
    others = plant(("commands.", ""), ("_torch.models.kimi_k3", ""), ("_torch.pyexecutor.scheduler", ""))
    assert len(arrows.find_forbidden_arrows([*others, *plant((module, text))])) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("serve.app", "from tensorrt_llm.mapping import Mapping"),
        ("_torch.pyexecutor.kv_cache.create", "from tensorrt_llm._torch.modules.kda import verify_scheme"),
        ("_torch.pyexecutor.kv_cache.create", "from . import budget\nfrom .budget import split"),
        ("_torch.pyexecutor.kv_cache.create", "import torch\nfrom torch import nn"),
        ("_torch.pyexecutor.kv_cache.", "from .create import create"),
    ],
)
def test_downward_arrow_is_allowed(module: str, text: str) -> None:
    others = plant(("_torch.modules.kda.verify_scheme", ""), ("_torch.pyexecutor.kv_cache.budget", ""))
    assert arrows.find_forbidden_arrows([*others, *plant((module, text))]) == []


def test_circle_is_found_at_load_and_in_a_function() -> None:
    a_to_b = ("executor.a", "from tensorrt_llm.executor.b import x")
    b_at_load = ("executor.b", "from tensorrt_llm.executor import a")
    b_in_a_function = ("executor.b", "def f():\n    from . import a")
    b_for_types = ("executor.b", "if TYPE_CHECKING:\n    from . import a")
    assert len(arrows.find_dodged_circles(plant(a_to_b, b_at_load))) == 2
    assert len(arrows.find_dodged_circles(plant(a_to_b, b_in_a_function))) == 1
    assert arrows.find_dodged_circles(plant(a_to_b, b_for_types)) == []


def test_local_import_without_a_circle_is_allowed() -> None:
    modules = plant(("executor.a", ""), ("executor.b", "def f():\n    from . import a"))
    assert arrows.find_dodged_circles(modules) == []


def test_compiler_at_load_is_found() -> None:
    kernel = ("_torch.modules.kda.ops.verify.triton", "import triton")
    misplaced = ("_torch.modules.moe", "import triton.language as tl")
    eager = ("_torch.modules.kda.ops.verify.", "from .triton import verify")
    lazy = ("_torch.modules.kda.ops.verify.", "def verify():\n    from .triton import verify")
    assert len(arrows.find_heavy_imports(plant(misplaced))) == 1
    assert len(arrows.find_heavy_imports(plant(kernel, eager))) == 1
    assert arrows.find_heavy_imports(plant(kernel, lazy)) == []


def test_driver_at_load_is_left_to_the_cuda_pools() -> None:
    core = "runtime.kv_cache_manager_v2"
    driver = "from cuda.bindings import driver"
    eager = (f"{core}.pools", "from .cuda_pools import CudaPool")
    assert len(arrows.find_heavy_imports(plant((f"{core}.pools", driver)))) == 1
    assert arrows.find_heavy_imports(plant((f"{core}.cuda_pools", driver))) == []
    assert len(arrows.find_heavy_imports(plant((f"{core}.cuda_pools", driver), eager))) == 1


@pytest.mark.parametrize(
    "text", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_environment_read_is_found(text: str) -> None:
    assert len(arrows.find_environment_reads(plant(("serve.app", text)))) == 1
    assert arrows.find_environment_reads(plant(("envs", text))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def generate(**options): ...", 1),
        ("class LLM:\n    def __init__(self, **kwargs): ...", 1),
        ("class LLM:\n    async def generate(self, **kwargs): ...", 1),
        ("def _helper(**options): ...", 0),
        ("def decorate(f):\n    def inner(*a, **k): ...\n    return inner", 0),
    ],
)
def test_open_keywords_are_found(text: str, found: int) -> None:
    assert len(arrows.find_open_keywords(plant(("llmapi.llm", text)))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("getattr(config, 'max_draft_len', 0)", 1),
        ("getattr(config, name)", 0),
        ("getattr(backbone, 'kda_token_states', False)", 0),
    ],
)
def test_defaulted_getattr_is_found(text: str, found: int) -> None:
    assert len(arrows.find_defaulted_getattr(plant(("llmapi.llm", text)))) == found
