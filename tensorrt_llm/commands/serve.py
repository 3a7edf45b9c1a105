# SPDX-License-Identifier: Apache-2.0
"""`trtllm-serve MODEL`: an OpenAI-compatible server for one model."""

import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from tensorrt_llm import envs, logger
from tensorrt_llm._torch.models.auto import resolve_model_folder
from tensorrt_llm.llmapi import LLM, TorchLlmArgs
from tensorrt_llm.llmapi.llm_args import read_yaml
from tensorrt_llm.llmapi.strict_model import parse
from tensorrt_llm.serve.chat_template import ChatTemplate
from tensorrt_llm.serve.openai_server import OpenAIServer, ServerOptions
from tensorrt_llm.serve.startup import ServerProcess, bind, start_up_line, url_of

EXIT_FAULT = 1
EXIT_USAGE = 2


class Refusal(click.ClickException):
    """The command cannot run as asked; nothing was loaded."""

    exit_code = EXIT_USAGE


class _ServeCommand(click.Command):
    """Takes TensorRT-LLM's subcommand name `serve` as well as none."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, args[1:] if args[:1] == ["serve"] else args)


@click.command(cls=_ServeCommand, context_settings={"show_default": True})
@click.argument("model")
@click.option("--host", default="localhost", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@click.option("--backend", type=click.Choice(["pytorch"]), default="pytorch", help="There is one.")
@click.option("--tokenizer", help="A tokenizer.json or a folder with one, instead of the model's.")
@click.option("--served_model_name", multiple=True, help="Name for requests; may be given several times.")
@click.option("--chat_template", help="Jinja template: a file, or the template itself on one line.")
@click.option("--api_key", help="Key that requests to /v1 must send.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where the model runs.")
@click.option("--max_batch_size", type=int, help="Requests that run at once.")
@click.option("--max_num_tokens", type=int, help="Tokens of one step.")
@click.option("--max_seq_len", type=int, help="Tokens of a request with its output.")
@click.option("--enable_chunked_prefill", is_flag=True, default=None, help="Read long prompts in parts.")
@click.option(
    "--free_gpu_memory_fraction",
    "--kv_cache_free_gpu_memory_fraction",
    type=float,
    help="Share of the free memory that the cache may take.",
)
@click.option("--tensor_parallel_size", "--tp_size", type=int, help="Ranks; 1 is what is offered.")
@click.option("--trust_remote_code", is_flag=True, default=None, help="No effect: no such code is run.")
@click.option(
    "--config",
    "--extra_llm_api_options",
    "config",
    help="YAML file of LLM arguments; what it says wins over the other options.",
)
@click.option("--log_level", type=click.Choice(get_args(envs.LogLevel)), help="Least severe messages.")
def main(
    model: str,
    host: str,
    port: int,
    backend: str,
    tokenizer: str | None,
    served_model_name: tuple[str, ...],
    chat_template: str | None,
    api_key: str | None,
    device: str | None,
    max_batch_size: int | None,
    max_num_tokens: int | None,
    max_seq_len: int | None,
    enable_chunked_prefill: bool | None,
    free_gpu_memory_fraction: float | None,
    tensor_parallel_size: int | None,
    trust_remote_code: bool | None,
    config: str | None,
    log_level: envs.LogLevel | None,
) -> None:
    """Serve MODEL, a packaged model's name or a checkpoint folder, over OpenAI's HTTP API."""
    if log_level is not None:
        logger.set_level(log_level)
    cache = {"free_gpu_memory_fraction": free_gpu_memory_fraction}
    flags = {
        "model": model,
        "tokenizer": tokenizer,
        "device": device,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_seq_len": max_seq_len,
        "enable_chunked_prefill": enable_chunked_prefill,
        "kv_cache_config": cache if free_gpu_memory_fraction is not None else None,
        "tensor_parallel_size": tensor_parallel_size,
        "trust_remote_code": trust_remote_code,
    }
    try:
        args = _read_args({name: value for name, value in flags.items() if value is not None}, config)
        folder = resolve_model_folder(args.model)
        template = ChatTemplate.find(folder, chat_template)
    except ValueError as error:
        raise Refusal(str(error)) from None
    options = ServerOptions(
        model_names=served_model_name or (_default_name(args.model),), api_key=api_key, chat_template=template
    )
    sys.exit(_serve(args, host, port, options))


def _read_args(flags: Mapping[str, Any], config: str | None) -> TorchLlmArgs:
    """The arguments; raises ValueError with one line that names the faulty option or the file and its key."""
    args = parse(TorchLlmArgs, flags)
    if config is None:
        return args
    content = read_yaml(config)
    try:
        return parse(TorchLlmArgs, merge(flags, content))
    except ValueError as error:
        raise ValueError(f"{config}: {error}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins, key by key, also inside mappings that both have."""
    merged = dict(base)
    for key, value in over.items():
        own = merged.get(key)
        merged[key] = merge(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return merged


def _default_name(model: str | Path) -> str:
    """What requests call the model: a folder's own name, since clients take a path for something else."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _serve(args: TorchLlmArgs, host: str, port: int, options: ServerOptions) -> int:
    """Bind, load, serve until the end; the exit code."""
    try:
        bound = bind(host, port)
    except OSError as error:
        logger.error(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host")
        return EXIT_FAULT
    with bound:
        try:
            llm = LLM.from_args(args)
        except ValueError as error:
            raise Refusal(str(error)) from None
        with llm:
            return _run(llm, bound, url_of(host, bound), options)


def _run(llm: LLM, bound: socket.socket, url: str, options: ServerOptions) -> int:
    process = ServerProcess()
    line = start_up_line(url, options.model_names[0], llm.description)
    try:
        server = OpenAIServer(llm, replace(options, on_fatal=process.fail))
    except ValueError as error:
        raise Refusal(str(error)) from None
    try:
        good = process.run(server.app, bound, lambda: logger.info(line))
    except KeyboardInterrupt:
        # Uvicorn has ended in good order and passes the signal on.
        good = True
    return 0 if good else EXIT_FAULT


if __name__ == "__main__":
    main()
