# SPDX-License-Identifier: Apache-2.0
"""Carries requests to the loop and results back."""

from tensorrt_llm.executor.engine import Engine as Engine
from tensorrt_llm.executor.errors import RequestError as RequestError
from tensorrt_llm.executor.executor import GenerationExecutor as GenerationExecutor
from tensorrt_llm.executor.executor import SubmittedRequest as SubmittedRequest
from tensorrt_llm.executor.response_stream import ChoiceResponse as ChoiceResponse
from tensorrt_llm.executor.response_stream import ResponseStream as ResponseStream

__all__ = [
    "ChoiceResponse",
    "Engine",
    "GenerationExecutor",
    "RequestError",
    "ResponseStream",
    "SubmittedRequest",
]
