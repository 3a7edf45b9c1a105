# SPDX-License-Identifier: Apache-2.0
"""The command line of `trtllm-serve`: one clear message for each mistake, before anything is loaded."""

import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tensorrt_llm.commands import serve
from tensorrt_llm.llmapi import TorchLlmArgs
from tensorrt_llm.serve.openai_server import ServerOptions


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TorchLlmArgs, str, int, ServerOptions]]:
    """What would have been served."""
    calls: list[tuple[TorchLlmArgs, str, int, ServerOptions]] = []
    monkeypatch.setattr(serve, "_serve", lambda *call: calls.append(call) or 0)
    return calls


def run(*arguments: object) -> Result:
    return CliRunner().invoke(serve.main, [str(argument) for argument in arguments])


def write_yaml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    return file


def test_options_become_arguments(checkpoint: Path, started: list) -> None:
    result = run(
        "serve", checkpoint, "--host", "0.0.0.0", "--port", 9, "--max_batch_size", 3, "--max_seq_len", 99,
        "--max_num_tokens", 77, "--kv_cache_free_gpu_memory_fraction", 0.5, "--tp_size", 1, "--device", "cpu",
        "--enable_chunked_prefill", "--trust_remote_code", "--served_model_name", "a",
        "--served_model_name", "b", "--api_key", "sesame", "--chat_template", "{{ 1 }}",
        "--log_level", "info",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    ((args, host, port, options),) = started
    assert (host, port, args.model, args.device) == ("0.0.0.0", 9, str(checkpoint), "cpu")
    assert (args.max_batch_size, args.max_seq_len, args.max_num_tokens) == (3, 99, 77)
    assert args.enable_chunked_prefill and args.kv_cache_config.free_gpu_memory_fraction == 0.5
    assert (options.model_names, options.api_key) == (("a", "b"), "sesame")
    assert options.chat_template is not None


def test_defaults(checkpoint: Path, started: list) -> None:
    assert run(checkpoint).exit_code == 0
    ((args, host, port, options),) = started
    assert (host, port) == ("localhost", 8000)
    assert args == TorchLlmArgs(model=str(checkpoint))
    assert (options.model_names, options.api_key, options.chat_template) == (("tiny",), None, None)


def test_yaml_wins_key_by_key(checkpoint: Path, started: list, tmp_path: Path) -> None:
    file = write_yaml(
        tmp_path,
        "max_batch_size: 2\n"
        "kv_cache_config: {enable_block_reuse: false}\n"
        "speculative_config: {decoding_type: NGram, max_draft_len: 3}\n"
        "model_kwargs: {kda_verify_scheme: replay}\n",
    )
    flags = ("--max_batch_size", 9, "--max_seq_len", 64, "--free_gpu_memory_fraction", 0.25)
    for option in ("--config", "--extra_llm_api_options"):
        assert run(checkpoint, *flags, option, file).exit_code == 0
    args = started[1][0]
    assert started[0][0] == args
    assert (args.max_batch_size, args.max_seq_len) == (2, 64)
    assert args.kv_cache_config.free_gpu_memory_fraction == 0.25
    assert args.kv_cache_config.enable_block_reuse is False
    assert args.speculative_config is not None and args.speculative_config.max_draft_len == 3
    assert args.model_kwargs.kda_verify_scheme == "replay"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_batchsize: 2",
            "max_batchsize: there is no 'max_batchsize'; the nearest valid name is 'max_",
        ),
        ("kv_cache_config: {max_token: 2}", "kv_cache_config.max_token: there is no 'max_token'"),
        ("max_batch_size: none", "max_batch_size: "),
        ("speculative_config: {decoding_type: Eagle3}", "speculative_config: "),
        ("max_batch_size: [", "is not YAML"),
        ("[1]", "must be a mapping"),
    ],
)
def test_faulty_yaml_is_one_message(
    checkpoint: Path, started: list, tmp_path: Path, text: str, message: str
) -> None:
    result = run(checkpoint, "--config", write_yaml(tmp_path, text))
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ") and "options.yaml" in line and message in line
    assert started == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["/no/such/model"],
            "model='/no/such/model' is neither a folder nor a packaged model",
        ),
        (["{model}", "--config", "/no/such.yaml"], "/no/such.yaml: No such file"),
        (["{model}", "--max_batch_size", "0"], "max_batch_size: Input should be greater than 0"),
        (["{model}", "--free_gpu_memory_fraction", "1.5"], "kv_cache_config.free_gpu_memory_fraction: "),
        (["{model}", "--tp_size", "2"], "tensor_parallel_size: it is 2"),
        (["{model}", "--chat_template", "none.jinja"], "'none.jinja': there is no such file"),
    ],
)
def test_mistakes_are_one_message(
    checkpoint: Path, started: list, arguments: list[str], message: str
) -> None:
    result = run(*[argument.format(model=checkpoint) for argument in arguments])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ") and message in line
    assert started == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--max_batch_siz", "3"], "--max_batch_size"),
        (["m", "--port", "70000"], "70000"),
        (["m", "--log_level", "loud"], "internal_error"),
        (["m", "--backend", "tensorrt"], "pytorch"),
        ([], "MODEL"),
    ],
)
def test_wrong_options_show_the_usage(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output


def test_the_port_is_taken_before_the_model_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve.LLM, "from_args", lambda args: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run(checkpoint, "--host", "127.0.0.1", "--port", port)
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in caplog.text


def test_a_model_that_cannot_be_built_is_one_message_and_frees_the_port(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def refuse(args: TorchLlmArgs) -> None:
        raise ValueError("kv_cache_config.enable_block_reuse=True cannot be combined with draft records")

    bind = serve.bind

    def recording_bind(host: str, port: int) -> socket.socket:
        bound = bind(host, port)
        taken.append(bound.getsockname()[1])
        return bound

    monkeypatch.setattr(serve, "bind", recording_bind)
    monkeypatch.setattr(serve.LLM, "from_args", refuse)
    result = run(checkpoint, "--host", "127.0.0.1", "--port", 0)
    assert (result.exit_code, result.output) == (
        2,
        "Error: kv_cache_config.enable_block_reuse=True cannot be combined with draft records\n",
    )
    with socket.create_server(("127.0.0.1", taken[0])):
        pass


def test_merge_goes_into_mappings_only() -> None:
    assert serve.merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 5}, "d": {"e": 1}}) == {
        "a": {"b": 5, "c": 2},
        "d": {"e": 1},
    }


def test_every_option_says_what_it_does() -> None:
    options = [parameter for parameter in serve.main.params if isinstance(parameter, click.Option)]
    assert all(option.help for option in options)
