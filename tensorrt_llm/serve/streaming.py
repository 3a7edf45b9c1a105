# SPDX-License-Identifier: Apache-2.0
"""Waiting for outputs while watching the client: whole answers, streams, and clients that leave."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tensorrt_llm import logger
from tensorrt_llm.llmapi import RequestError, RequestOutput
from tensorrt_llm.serve.bodies import BodyWriter, usage_of
from tensorrt_llm.serve.errors import failed_request, internal_error
from tensorrt_llm.serve.openai_requests import StreamOptions

Result = TypeVar("Result")
OnEnd = Callable[[Sequence[RequestOutput]], None]

DONE = "data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def collect(outputs: Sequence[RequestOutput], on_end: OnEnd) -> None:
    """Wait until all outputs are finished; abort them if the wait is cancelled or one fails."""
    try:
        for output in outputs:
            await output.aresult()
    finally:
        abort_all(outputs)
        on_end(outputs)


async def stream(
    outputs: Sequence[RequestOutput], writer: BodyWriter, options: StreamOptions
) -> AsyncIterator[str]:
    """Server-sent events of streaming outputs, ending with [DONE].

    A failure becomes an error event, since the status line has long been sent.
    """
    try:
        sources = [_events_of(outputs, place, writer, options) for place in range(len(outputs))]
        async for event in merge(sources):
            yield event
        if options.include_usage:
            yield writer.usage_chunk(usage_of(outputs)).to_chunk()
    except RequestError as error:
        yield failed_request(error).to_event()
    except Exception as error:  # noqa: BLE001 - a broken stream would look to the client like a short answer
        logger.error("a stream failed:", repr(error))
        yield internal_error().to_event()
    yield DONE


class EventStream(StreamingResponse):
    """A streamed answer. Its outputs are aborted when it ends early, even before its first event."""

    def __init__(
        self,
        events: AsyncIterator[str],
        outputs: Sequence[RequestOutput],
        on_end: OnEnd,
        headers: dict[str, str],
    ) -> None:
        # Proxies would otherwise gather events into larger pieces.
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers={**unbuffered, **headers})
        self._outputs = outputs
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            abort_all(self._outputs)
            self._on_end(self._outputs)


async def _events_of(
    outputs: Sequence[RequestOutput], place: int, writer: BodyWriter, options: StreamOptions
) -> AsyncIterator[str]:
    async for output in outputs[place]:
        usage = usage_of(outputs) if options.continuous_usage_stats else None
        for chunk in writer.chunks(place * len(output.outputs), output, usage):
            yield chunk.to_chunk()


async def merge(sources: Sequence[AsyncIterator[str]]) -> AsyncIterator[str]:
    """The items of all sources as they come. The first source to fail ends the others."""
    if len(sources) == 1:
        async for only in sources[0]:
            yield only
        return
    queue: asyncio.Queue[str | None] = asyncio.Queue()

    async def pump(source: AsyncIterator[str]) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
        finally:
            queue.put_nowait(None)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        for _ in sources:
            while (item := await queue.get()) is not None:
                yield item
            for finished in (task for task in pumps if task.done()):
                finished.result()
        await asyncio.gather(*pumps)
    finally:
        for task in pumps:
            task.cancel()


def abort_all(outputs: Sequence[RequestOutput]) -> None:
    """End what is not finished."""
    for output in outputs:
        output.abort()


async def unless_client_leaves(request: Request, work: Coroutine[object, object, Result]) -> Result:
    """The result of `work`, which is cancelled with ClientGone if the connection closes first."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_connection_closed(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()


async def _connection_closed(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
