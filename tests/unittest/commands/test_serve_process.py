# SPDX-License-Identifier: Apache-2.0
"""`trtllm-serve` as a process of its own, on a model of random weights."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.unittest.executor_api.toy_checkpoint import write_toy_checkpoint

PATIENCE_S = 60
ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def serving(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tensorrt_llm.commands.serve", *map(str, arguments)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        assert process.stderr is not None
        process.stderr.close()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first match in the process' log; fails if the log ends before."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        found = re.search(pattern, line)
        if found:
            return found
    pytest.fail(f"the process ended without {pattern!r}:\n{''.join(seen)}")


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_server_from_its_command_line_to_its_end(tmp_path: Path, end: signal.Signals, code: int) -> None:
    folder = tmp_path / "toy-model"
    folder.mkdir()
    write_toy_checkpoint(folder)
    options = tmp_path / "options.yaml"
    options.write_text("speculative_config: {decoding_type: NGram, max_draft_len: 3}\nmax_seq_len: 128\n")
    flags = (
        "--host",
        "127.0.0.1",
        "--port",
        0,
        "--max_batch_size",
        2,
        "--device",
        "cpu",
        "--config",
        options,
    )
    with serving("serve", folder, *flags) as process:
        started = read_until(process, r"(http://127\.0\.0\.1:\d+) serves (\S+) .*attention pages.*records")
        assert started.group(2) == "toy-model"
        with openai.OpenAI(base_url=f"{started.group(1)}/v1", api_key="none", timeout=PATIENCE_S) as client:
            assert client.models.list().data[0].id == "toy-model"
            chunks = client.completions.create(
                model="toy-model", prompt="def x", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
            )
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        process.send_signal(end)
        assert process.wait(PATIENCE_S) == code


def test_the_packaged_model_streams_python(tmp_path: Path) -> None:
    """As `make serve` starts it, but for the port and for drafts, which change no text."""
    options = tmp_path / "options.yaml"
    options.write_text("speculative_config: {decoding_type: NGram, max_draft_len: 7}\n")
    prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n"
    texts = []
    for flags in ((), ("--config", options)):
        with serving("kimi-k3-tiny", "--port", 0, *flags) as process:
            url = read_until(process, r"(http://localhost:\d+) serves kimi-k3-tiny ").group(1)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S) as client:
                chunks = client.completions.create(
                    model="kimi-k3-tiny", prompt=prompt, max_tokens=48, temperature=0, stream=True
                )
                texts.append("".join(chunk.choices[0].text for chunk in chunks))
                chat = client.chat.completions.create(
                    model="kimi-k3-tiny",
                    messages=[{"role": "user", "content": "Add two numbers."}],
                    max_tokens=8,
                )
                assert chat.choices[0].message.content
    assert texts[0] == texts[1] and ("def " in texts[0] or "self." in texts[0])


def test_a_checkpoint_that_cannot_be_loaded_is_one_message(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with serving(tmp_path, "--host", "127.0.0.1", "--port", 0) as process:
        read_until(process, r"^Error: tokenizer=.*is not a tokenizer")
        assert process.wait(PATIENCE_S) == 2
