# SPDX-License-Identifier: Apache-2.0
"""A server on a free port of the loopback, around a scripted engine or any other `LLM`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tensorrt_llm import LLM
from tensorrt_llm.serve.chat_template import ChatTemplate
from tensorrt_llm.serve.openai_server import OpenAIServer, ServerOptions
from tensorrt_llm.serve.startup import ServerProcess, bind, url_of
from tests.unittest.executor_api.fake_engine import PATIENCE_S, FakeEngine
from tests.unittest.executor_api.toy_tokenizer import eos_id, toy_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}{{ opening or 'a:' }}{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """A running server, its engine, and two clients."""

    engine: FakeEngine
    url: str
    openai: openai.OpenAI
    http: httpx.Client


ServeCall = Callable[..., Served]


@contextmanager
def running(llm: LLM, options: ServerOptions) -> Iterator[str]:
    """The URL of a server in a thread of its own, which has begun to listen."""
    bound, process, listening = bind("127.0.0.1", 0), ServerProcess(), threading.Event()
    app = OpenAIServer(llm, options).app
    thread = threading.Thread(target=process.run, args=(app, bound, listening.set), daemon=True)
    thread.start()
    try:
        assert listening.wait(PATIENCE_S)
        yield url_of("127.0.0.1", bound)
    finally:
        process.fail()
        thread.join(PATIENCE_S)
        bound.close()
        llm.shutdown()


@contextmanager
def serve(script: dict[str, Any], options: dict[str, Any]) -> Iterator[Served]:
    """A server around `FakeEngine(**script)` with `ServerOptions(**options)`."""
    tokenizer = toy_tokenizer()
    engine = FakeEngine(tokenizer, end_id=eos_id(tokenizer), **script)
    llm = LLM.from_engine(engine, tokenizer, end_ids=(eos_id(tokenizer),))
    defaults = {"model_names": ["toy"], "chat_template": ChatTemplate(TEMPLATE, name="of the test")}
    with (
        running(llm, ServerOptions(**{**defaults, **options})) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
        openai.OpenAI(
            base_url=f"{url}/v1", api_key=options.get("api_key", "unused"), max_retries=0, timeout=PATIENCE_S
        ) as client,
    ):
        yield Served(engine, url, client, http)
