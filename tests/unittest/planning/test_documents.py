# SPDX-License-Identifier: Apache-2.0
"""The commands that the documents show print what they show, and draw the pictures that lie beside them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unittest.planning.helpers import run

ROOT = Path(__file__).resolve().parents[3]
PLANNING = ROOT / "docs" / "planning.md"
README = ROOT / "README.md"
BLOCK = re.compile(r"```\w*\n(?:\$ )?(?:\.venv/bin/)?(trtllm-kv-plan (?:.*\\\n)*.*)\n((?:(?!```).*\n)*)```")


def shown(document: Path) -> Iterator[tuple[list[str], str]]:
    """Each command's words, and the output that is shown below it."""
    for command, output in BLOCK.findall(document.read_text()):
        yield shlex.split(command.replace("\\\n", " "))[1:], output


def rerun(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "docs" / "images").mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    result = run(*words)
    return result.stdout + result.stderr


@pytest.mark.parametrize("document", [PLANNING, README], ids=["planning", "readme"])
def test_commands_print_what_is_shown(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list(shown(document))
    assert len(commands) == document.read_text().count("trtllm-kv-plan kimi-k3 ") > 0
    for words, output in commands:
        printed = rerun(words, tmp_path, monkeypatch)
        assert not output or printed == output, words
    pictures = re.findall(r"!\[[^]]*\]\((?:docs/)?(images/kv-plan[^)]*)\)", document.read_text())
    assert pictures
    for picture in pictures:
        drawn = (tmp_path / "docs" / picture).read_text()
        assert drawn == (ROOT / "docs" / picture).read_text(), f"{picture} is not what its command draws"


def test_links_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", PLANNING.read_text()):
        assert (PLANNING.parent / link).exists(), link


def test_no_picture_is_left_over() -> None:
    text = PLANNING.read_text() + README.read_text()
    pictures = (ROOT / "docs" / "images").glob("kv-plan*")
    assert [picture.name for picture in pictures if picture.name not in text] == []
