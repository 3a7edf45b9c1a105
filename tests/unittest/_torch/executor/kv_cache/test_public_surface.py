# SPDX-License-Identifier: Apache-2.0
"""Import paths, names and signatures that callers rely on, as a file: a change has to be made there too.

python -m tests.unittest._torch.executor.kv_cache.test_public_surface    rewrites the file
"""

import ast
import inspect
import json
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]
SNAPSHOT = Path(__file__).with_name("public_surface.json")
PACKAGE = "tensorrt_llm._torch.pyexecutor.kv_cache"
NAMES = {
    "tensorrt_llm._torch.pyexecutor._util": (
        "KvCacheCreator",
        "_create_kv_cache_manager",
        "get_kv_cache_manager_cls",
    ),
    f"{PACKAGE}.kv_cache_manager_v2": ("KVCacheManagerV2",),
    f"{PACKAGE}.mamba_cache_manager": (
        "BaseMambaCacheManager",
        "MambaHybridCacheManagerV2",
        "MambaRole",
        "MixedMambaHybridCacheManager",
        "ReplayStateUpdateMetadata",
        "SpeculativeState",
        "State",
    ),
    f"{PACKAGE}.config": (
        "BlockReuseSettings",
        "CacheType",
        "KvCacheSettings",
        "MambaStateSettings",
        "SpecSettings",
    ),
    f"{PACKAGE}.create": ("create_manager",),
    f"{PACKAGE}.mamba_cache_manager.plan": ("CachePlan",),
    f"{PACKAGE}.budget": ("KvCacheCreator", "Managers", "split_budget"),
    f"{PACKAGE}.requests": ("CacheBatch", "CacheRequest", "DummyRequest"),
    f"{PACKAGE}.select": ("SelectionFacts", "get_kv_cache_manager_cls", "select_manager"),
    f"{PACKAGE}.sizing": ("CacheCost",),
    f"{PACKAGE}.stats": ("KvCacheStats",),
    f"{PACKAGE}.traits": ("EngineStandIn", "ModelTraits"),
}


def signature_of(value: object) -> str:
    # How an enumeration and a protocol are called is Python's business, and differs between its releases.
    if inspect.isclass(value) and (issubclass(value, Enum) or getattr(value, "_is_protocol", False)):
        return ""
    return str(inspect.signature(value))  # type: ignore[arg-type]


def members_of(cls: type) -> dict[str, str]:
    """Public methods by signature, properties as "property"; inherited ones of this package included."""
    found: dict[str, str] = {}
    for name, value in inspect.getmembers(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not owner.__module__.startswith("tensorrt_llm"):
            continue
        static = inspect.getattr_static(cls, name)
        found[name] = (
            signature_of(value) if callable(value) and not isinstance(static, property) else "property"
        )
    return found


def surface() -> dict[str, object]:
    result: dict[str, object] = {}
    for path, names in NAMES.items():
        module = import_module(path)
        for name in names:
            value = getattr(module, name)
            entry: dict[str, object] = {"signature": signature_of(value)}
            if inspect.isclass(value):
                entry["members"] = members_of(value)
            result[f"{path}.{name}"] = entry
    return result


def test_public_surface_is_the_recorded_one() -> None:
    recorded = json.loads(SNAPSHOT.read_text())
    found = surface()
    assert found.keys() == recorded.keys()
    for name, entry in found.items():
        assert entry == recorded[name], f"{name} has changed: record it with the command above"


@pytest.mark.parametrize("name", ["_util", "kv_cache.mamba_cache_manager"])
def test_facades_only_import(name: str) -> None:
    """A facade fits on a screen and defines nothing; each name in it is the one of its home."""
    module = import_module(f"tensorrt_llm._torch.pyexecutor.{name}")
    source = Path(str(module.__file__)).read_text()
    tree = ast.parse(source)
    assert len(source.splitlines()) <= 40
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            home = import_module(str(node.module))
            assert all(
                getattr(module, alias.asname or alias.name) is getattr(home, alias.name)
                for alias in node.names
            )


def public_names(source: Path) -> set[str]:
    """Classes and functions of a module that anybody may use."""
    tree = ast.parse(source.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def find_unnamed(page: str, sources: Sequence[Path]) -> list[str]:
    """Modules and public names that the page on TensorRT-LLM does not have."""
    wanted = {f"`{name}`" for source in sources for name in public_names(source)}
    files = {f"{source.name}`" for source in sources if source.name != "__init__.py"}
    return sorted(name for name in wanted | files if name not in page)


def test_the_page_on_tensorrt_llm_names_every_public_name(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "upstream.md").read_text()
    sources = sorted((ROOT / PACKAGE.replace(".", "/")).rglob("*.py"))
    assert len(sources) > 25 and find_unnamed(page, sources) == []
    planted = tmp_path / "planted.py"
    planted.write_text("class New: ...\ndef fresh(): ...\ndef _private(): ...\n")
    assert find_unnamed(page, [planted]) == ["`New`", "`fresh`", "planted.py`"]


def test_no_public_call_takes_arbitrary_keywords() -> None:
    """A misspelt keyword is a TypeError everywhere."""
    for name, entry in surface().items():
        assert isinstance(entry, dict)
        signatures = [entry["signature"], *entry.get("members", {}).values()]
        assert not [signature for signature in signatures if "**" in signature], name


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
