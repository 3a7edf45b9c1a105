# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: OpenAI's endpoints over an `LLM`."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from tensorrt_llm import logger
from tensorrt_llm.llmapi import LLM, RequestOutput, SamplingParams, Tokenizer
from tensorrt_llm.serve.bodies import BodyWriter, ChatWriter, CompletionWriter
from tensorrt_llm.serve.chat_template import ChatTemplate
from tensorrt_llm.serve.errors import (
    SERVER,
    UNAUTHORIZED,
    ApiError,
    failed_request,
    install_handlers,
    invalid_argument,
    unknown_model,
)
from tensorrt_llm.serve.metrics import ServerMetrics
from tensorrt_llm.serve.openai_requests import ChatCompletionRequest, CompletionRequest, SamplingFields
from tensorrt_llm.serve.openai_responses import ModelCard, ModelList, ResponseHead
from tensorrt_llm.serve.streaming import (
    ClientGone,
    EventStream,
    abort_all,
    collect,
    stream,
    unless_client_leaves,
)
from tensorrt_llm.version import __version__

# Encoding a text of this many characters takes about as long as a step; longer ones go to a thread.
LONG_TEXT_CHARS = 16_384
HEALTH_CHECK_INTERVAL_S = 1.0
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a server is called and whom it serves: requests name one of `model_names`, and the key if set."""

    model_names: Sequence[str]
    api_key: str | None = None
    chat_template: ChatTemplate | None = None
    on_fatal: Callable[[], None] | None = None


class OpenAIServer:
    """Serves one `LLM`; `app` is the ASGI application. The LLM stays the caller's to shut down."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        """Raises ValueError for an LLM without a tokenizer."""
        if llm.tokenizer is None:
            raise ValueError("skip_tokenizer_init=True: a server needs the tokenizer, leave the option out")
        self._llm = llm
        self._tokenizer: Tokenizer = llm.tokenizer
        self._options = options
        self._created = int(time.time())
        self._metrics = ServerMetrics(options.model_names[0], llm.snapshot)
        self.app = FastAPI(title="trtllm-serve", version=__version__, lifespan=self._watch_engine)
        install_handlers(self.app, self._metrics.observe_error)
        self._add_routes()

    def _add_routes(self) -> None:
        get, post = self.app.get, self.app.post
        keyed = [Depends(self._check_key)]
        get("/health")(self.health)
        get("/health_generate")(self.health_generate)
        get("/version")(self.version)
        get("/server_info")(self.server_info)
        get("/metrics")(self.iteration_stats)
        get("/prometheus/metrics")(self.prometheus)
        get("/v1/models", dependencies=keyed)(self.models)
        get("/v1/models/{name:path}", dependencies=keyed)(self.model)
        post("/v1/completions", dependencies=keyed, response_model=None)(self.completions)
        post("/v1/chat/completions", dependencies=keyed, response_model=None)(self.chat_completions)

    # Endpoints.

    async def health(self) -> Response:
        """200 while requests are being served, else 503."""
        if self._llm.is_healthy:
            return Response()
        cause = self._llm.fatal_error
        return PlainTextResponse("the engine is down" + (f": {cause}" if cause else ""), 503)

    async def health_generate(self, http: Request) -> Response:
        """200 once the engine has generated a token."""
        outputs = await self._submit([[0]], SamplingParams(max_tokens=1, ignore_eos=True), streaming=False)
        await unless_client_leaves(http, collect(outputs, _ignore))
        return Response()

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def server_info(self) -> dict[str, Any]:
        """What was built: limits, cache split, verify scheme."""
        return asdict(self._llm.description)

    async def iteration_stats(self) -> Response:
        """Statistics of the iterations since the last call, as a JSON array."""
        return JSONResponse(self._llm.get_stats())

    async def prometheus(self) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> ModelList:
        return ModelList(data=[self._card(name) for name in self._options.model_names])

    async def model(self, name: str) -> ModelCard:
        self._check_model(name)
        return self._card(name)

    async def completions(self, request: CompletionRequest, http: Request) -> Response:
        self._check_model(request.model)
        params = _sampling_params(request)
        outputs = await self._submit(request.prompts, params, streaming=bool(request.stream))
        head = ResponseHead.new("cmpl", request.model)
        echoes = [self._text_of(prompt) for prompt in request.prompts] if request.echo else None
        writer = CompletionWriter(head, self._tokenizer, request.logprobs, echoes)
        return await self._answer(request, http, outputs, writer, head.id)

    async def chat_completions(self, request: ChatCompletionRequest, http: Request) -> Response:
        self._check_model(request.model)
        params = _sampling_params(request)
        outputs = await self._submit([self._render(request)], params, streaming=bool(request.stream))
        head = ResponseHead.new("chatcmpl", request.model)
        writer = ChatWriter(head, self._tokenizer, params.logprobs)
        return await self._answer(request, http, outputs, writer, head.id)

    # Steps that endpoints share.

    async def _submit(
        self, prompts: Sequence[str] | Sequence[list[int]], params: SamplingParams, *, streaming: bool
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        try:
            for prompt in prompts:
                token_ids = await self._encode(prompt, params) if isinstance(prompt, str) else prompt
                outputs.append(self._llm.generate_async(token_ids, params, streaming=streaming))
        except BaseException as error:
            abort_all(outputs)
            if isinstance(error, ValueError | TypeError):
                raise invalid_argument(error) from None
            if isinstance(error, RuntimeError) and not self._llm.is_healthy:
                raise ApiError(503, str(error), kind=SERVER) from None
            raise
        return outputs

    async def _encode(self, text: str, params: SamplingParams) -> list[int]:
        special = params.add_special_tokens
        if len(text) < LONG_TEXT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=special)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=special)

    async def _answer(
        self,
        request: SamplingFields,
        http: Request,
        outputs: list[RequestOutput],
        writer: BodyWriter,
        request_id: str,
    ) -> Response:
        headers = {"x-request-id": request_id}
        if request.stream:
            events = stream(outputs, writer, request.usage_in_stream)
            return EventStream(events, outputs, self._observe_stream, headers)
        try:
            await unless_client_leaves(http, collect(outputs, self._metrics.observe))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        body = writer.body(outputs).model_dump_json()
        return Response(body, media_type="application/json", headers=headers)

    def _observe_stream(self, outputs: Sequence[RequestOutput]) -> None:
        self._metrics.observe(outputs)
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            self._metrics.observe_error(failed_request(errors[0]).status)

    def _render(self, request: ChatCompletionRequest) -> str:
        template = self._options.chat_template
        if template is None:
            raise ApiError(
                400,
                f"the model {request.model!r} has no chat template: start the server with --chat_template, "
                "or use /v1/completions",
            )
        try:
            return template.render(
                [message.for_template() for message in request.messages],
                add_generation_prompt=request.add_generation_prompt is not False,
                values=request.chat_template_kwargs,
            )
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _card(self, name: str) -> ModelCard:
        return ModelCard(id=name, created=self._created)

    def _check_model(self, name: str) -> None:
        if name not in self._options.model_names:
            raise unknown_model(name, list(self._options.model_names))

    async def _check_key(self, http: Request) -> None:
        key = self._options.api_key
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            message = "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
            raise ApiError(401, message, kind=UNAUTHORIZED, code="invalid_api_key")

    @asynccontextmanager
    async def _watch_engine(self, _: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._await_fatal_error())
        yield
        watch.cancel()

    async def _await_fatal_error(self) -> None:
        while self._llm.fatal_error is None:
            await asyncio.sleep(HEALTH_CHECK_INTERVAL_S)
        logger.error("the engine failed, the server stops:", repr(self._llm.fatal_error))
        if self._options.on_fatal is not None:
            self._options.on_fatal()


def _sampling_params(request: CompletionRequest | ChatCompletionRequest) -> SamplingParams:
    try:
        return request.to_sampling_params()
    except ValueError as error:
        raise invalid_argument(error) from None


def _ignore(_: Sequence[RequestOutput]) -> None:
    """For outputs that count in no metric."""
