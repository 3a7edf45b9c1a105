# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from tensorrt_llm.llmapi.checkpoint import read_end_ids
from tests.unittest._torch.executor.tiny_kimi import TINY_CONFIG


def write(folder: Path, end_ids: object, generation_config: str | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, "eos_token_id": end_ids}))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(generation_config)
    return folder


@pytest.mark.parametrize(("end_ids", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8)), (0, (0,))])
def test_end_tokens_of_the_config(tmp_path: Path, end_ids: object, expected: tuple[int, ...]) -> None:
    assert read_end_ids(write(tmp_path, end_ids)) == expected


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [('{"eos_token_id": [1, 2]}', (1, 2)), ('{"eos_token_id": 0}', (0,)), ('{"top_p": 0.9}', (7,))],
)
def test_the_generation_config_goes_first(
    tmp_path: Path, generation_config: str, expected: tuple[int, ...]
) -> None:
    assert read_end_ids(write(tmp_path, 7, generation_config)) == expected


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_malformed_generation_config_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match=r"generation_config\.json is no JSON object"):
        read_end_ids(write(tmp_path, 7, content))
