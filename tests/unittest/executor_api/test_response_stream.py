# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading

import pytest

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorResponse, RequestTimestamps
from tensorrt_llm.executor import ChoiceResponse, ResponseStream


def arrival(choice: int) -> ChoiceResponse:
    response = ExecutorResponse(request_id=choice, timestamps=RequestTimestamps(arrival=0.0))
    return ChoiceResponse(choice=choice, response=response)


def test_responses_keep_their_order_for_a_thread() -> None:
    stream = ResponseStream()
    reader_got: list[int] = []
    reader = threading.Thread(target=lambda: reader_got.extend(stream.get(20).choice for _ in range(50)))
    reader.start()
    for choice in range(50):
        stream.put(arrival(choice))
    reader.join(20)
    assert reader_got == list(range(50))


def test_responses_keep_their_order_for_a_coroutine() -> None:
    stream = ResponseStream()

    async def read() -> list[int]:
        writer = threading.Thread(target=lambda: [stream.put(arrival(choice)) for choice in range(50)])
        writer.start()
        got = [(await asyncio.wait_for(stream.aget(), 20)).choice for _ in range(50)]
        writer.join(20)
        return got

    assert asyncio.run(read()) == list(range(50))


def test_a_sleeping_coroutine_is_woken() -> None:
    stream = ResponseStream()

    async def read() -> int:
        reader = asyncio.ensure_future(stream.aget())
        await asyncio.sleep(0)
        threading.Thread(target=stream.put, args=(arrival(7),)).start()
        return (await asyncio.wait_for(reader, 20)).choice

    assert asyncio.run(read()) == 7


def test_a_reader_that_gave_up_loses_nothing_and_harms_nobody() -> None:
    stream = ResponseStream()

    async def give_up() -> None:
        reader = asyncio.ensure_future(stream.aget())
        await asyncio.sleep(0)
        reader.cancel()

    asyncio.run(give_up())
    stream.put(arrival(1))
    stream.put(arrival(2))
    assert asyncio.run(stream.aget()).choice == 1
    assert stream.get(0).choice == 2


def test_waiting_has_an_end() -> None:
    with pytest.raises(TimeoutError, match="within 0 seconds"):
        ResponseStream().get(0)
