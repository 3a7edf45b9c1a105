# SPDX-License-Identifier: Apache-2.0
"""The documents name what exists: packages, commands, make targets, and files that links point to."""

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tensorrt_llm.llmapi import TorchLlmArgs

ROOT = Path(__file__).resolve().parents[2]
LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0\n"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def packages() -> set[str]:
    """Every package below `tensorrt_llm`, as the page writes it: `folder/folder/`."""
    package = ROOT / "tensorrt_llm"
    return {f"{p.parent.relative_to(package).as_posix()}/" for p in package.rglob("__init__.py")} - {"./"}


def named_folders(text: str) -> list[str]:
    return re.findall(r"`([\w/]+/)`", text)


def find_disagreements(text: str, real: Iterable[str]) -> list[str]:
    named = named_folders(text)
    missing = [f"{name} is not named" for name in sorted(set(real) - set(named))]
    invented = [f"{name} does not exist" for name in sorted(set(named) - set(real))]
    repeated = [
        f"{name} is named {named.count(name)} times" for name in sorted(set(named)) if named.count(name) > 1
    ]
    return missing + invented + repeated


def test_architecture_names_every_package_once() -> None:
    assert find_disagreements(ARCHITECTURE.read_text(), packages()) == []


def test_disagreements_are_found() -> None:
    text = "- `serve/` and `attic/`\n- `serve/`"
    assert find_disagreements(text, {"serve/", "executor/"}) == [
        "executor/ is not named",
        "attic/ does not exist",
        "serve/ is named 2 times",
    ]


def test_architecture_is_one_page() -> None:
    assert len(ARCHITECTURE.read_text().splitlines()) < 80


def test_a_request_lives_in_at_most_ten_steps() -> None:
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", ARCHITECTURE.read_text(), re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1)) and 5 <= len(steps) <= 10


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name
)
def test_links_and_make_targets_exist(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), link
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", text)) <= targets


def test_listed_commands_exist() -> None:
    """Every script's module has the `main` that it calls."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for command, target in scripts.items():
        module, _, function = target.partition(":")
        source = ROOT / (module.replace(".", "/") + ".py")
        assert re.search(rf"^def {function}\(|^{function} = ", source.read_text(), re.MULTILINE), command


def test_readme_programs_compile_and_example_files_are_accepted() -> None:
    programs = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(programs) == 3
    for program in programs:
        compile(program, "README.md", "exec")
    for path in (ROOT / "examples").glob("*.yaml"):
        assert TorchLlmArgs.from_yaml(path, {"model": "kimi-k3-tiny"}).speculative_config is not None


def test_notice_lists_what_the_packaged_model_was_trained_on() -> None:
    corpus = json.loads((ROOT / "examples" / "train_tiny" / "training.json").read_text())["corpus"]
    notice = (ROOT / "NOTICE").read_text()
    listed = re.findall(r"^  (\S+) (\S+) \(", notice, re.MULTILINE)
    # A local version, such as the +cpu of a build, is not part of the release.
    trained = [(name, facts["version"].partition("+")[0]) for name, facts in corpus["packages"].items()]
    assert listed == trained
    assert f"Python {corpus['python']} " in notice


def test_every_source_carries_the_licence_line() -> None:
    parts = ("tensorrt_llm", "tests", "tools", "benchmarks", "examples")
    sources = [path for part in parts for path in (ROOT / part).rglob("*.py")]
    bare = [
        source.relative_to(ROOT).as_posix()
        for source in sources
        if source.stat().st_size and not source.read_text().startswith(LICENCE_LINE)
    ]
    assert bare == []
