# SPDX-License-Identifier: Apache-2.0
"""The `LLM` API."""

from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy as CapacitySchedulerPolicy
from tensorrt_llm.executor import RequestError as RequestError
from tensorrt_llm.llmapi.kv_cache_config import BlockReuseConfig as BlockReuseConfig
from tensorrt_llm.llmapi.kv_cache_config import KvCacheConfig as KvCacheConfig
from tensorrt_llm.llmapi.kv_cache_config import MambaStateConfig as MambaStateConfig
from tensorrt_llm.llmapi.llm import LLM as LLM
from tensorrt_llm.llmapi.llm_args import ModelKwargs as ModelKwargs
from tensorrt_llm.llmapi.llm_args import SchedulerConfig as SchedulerConfig
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs as TorchLlmArgs
from tensorrt_llm.llmapi.outputs import CompletionOutput as CompletionOutput
from tensorrt_llm.llmapi.outputs import Logprob as Logprob
from tensorrt_llm.llmapi.outputs import RequestOutput as RequestOutput
from tensorrt_llm.llmapi.speculative_config import DecodingBaseConfig as DecodingBaseConfig
from tensorrt_llm.llmapi.speculative_config import NGramDecodingConfig as NGramDecodingConfig
from tensorrt_llm.llmapi.speculative_config import UserProvidedDecodingConfig as UserProvidedDecodingConfig
from tensorrt_llm.llmapi.tokenizer import Tokenizer as Tokenizer
from tensorrt_llm.sampling_params import SamplingParams as SamplingParams

__all__ = [
    "LLM",
    "BlockReuseConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "DecodingBaseConfig",
    "KvCacheConfig",
    "Logprob",
    "MambaStateConfig",
    "ModelKwargs",
    "NGramDecodingConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "Tokenizer",
    "TorchLlmArgs",
    "UserProvidedDecodingConfig",
]
