# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a model in this process, for scripts and for the server."""

import uuid
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self, overload

from tqdm import tqdm

from tensorrt_llm._torch.models.auto import resolve_model_folder
from tensorrt_llm._torch.pyexecutor.description import ExecutorDescription
from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
from tensorrt_llm._torch.pyexecutor.stats import EngineSnapshot
from tensorrt_llm.executor import Engine, GenerationExecutor
from tensorrt_llm.llmapi.checkpoint import read_end_ids
from tensorrt_llm.llmapi.inputs import (
    PromptInputs,
    RequestLimits,
    build_requests,
    is_single_prompt,
    read_prompt,
)
from tensorrt_llm.llmapi.kv_cache_config import KvCacheConfig
from tensorrt_llm.llmapi.llm_args import NOT_OFFERED_ARGS, ModelKwargs, SchedulerConfig, TorchLlmArgs
from tensorrt_llm.llmapi.outputs import RequestOutput
from tensorrt_llm.llmapi.speculative_config import DecodingBaseConfig
from tensorrt_llm.llmapi.strict_model import explain_unknown_keywords, parse
from tensorrt_llm.llmapi.tokenizer import Tokenizer
from tensorrt_llm.sampling_params import SamplingParams


class LLM:
    """A model that generates text. Use it in a `with` block, or call `shutdown` when done.

    All methods may be called from several threads; an output has one reader at a time.
    """

    @explain_unknown_keywords(NOT_OFFERED_ARGS)
    def __init__(
        self,
        model: str | Path,
        tokenizer: str | Path | Tokenizer | None = None,
        *,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        dtype: str = "auto",
        device: str = "auto",
        tensor_parallel_size: int = 1,
        max_batch_size: int = 8,
        max_num_tokens: int = 8192,
        max_seq_len: int | None = None,
        enable_chunked_prefill: bool = False,
        scheduler_config: SchedulerConfig | dict[str, Any] | None = None,
        kv_cache_config: KvCacheConfig | dict[str, Any] | None = None,
        speculative_config: DecodingBaseConfig | dict[str, Any] | None = None,
        model_kwargs: ModelKwargs | dict[str, Any] | None = None,
        enable_iter_perf_stats: bool = True,
        max_stats_len: int = 1000,
    ) -> None:
        """Load the model; `TorchLlmArgs` says what the arguments mean.

        Raises TypeError for an unknown argument, naming the nearest valid one, and ValueError, before
        anything is loaded, for a value out of range, a contradiction, or a model that is not there.
        """
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        self.args: TorchLlmArgs | None = parse(TorchLlmArgs, given)
        self._assemble(*_load(self.args))

    @classmethod
    def from_args(cls, args: TorchLlmArgs) -> Self:
        """An LLM from arguments that were checked before."""
        llm = cls.__new__(cls)
        llm._assemble(*_load(args))
        llm.args = args
        return llm

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None, end_ids: tuple[int, ...] = ()) -> Self:
        """An LLM around an engine that exists already; `shutdown` stops it."""
        llm = cls.__new__(cls)
        llm._assemble(engine, tokenizer, end_ids)
        llm.args = None
        return llm

    def _assemble(self, engine: Engine, tokenizer: Tokenizer | None, end_ids: tuple[int, ...]) -> None:
        self.llm_id = f"llm-{uuid.uuid4().hex[:12]}"
        self.tokenizer = tokenizer
        description = engine.description
        self._limits = RequestLimits(
            max_batch_size=description.max_batch_size,
            max_seq_len=description.max_seq_len,
            end_ids=end_ids,
        )
        self._executor = GenerationExecutor(engine)
        # Runs once: at shutdown, when this object is collected, or when the interpreter exits.
        self._stop = weakref.finalize(self, self._executor.shutdown)

    @property
    def description(self) -> ExecutorDescription:
        """What was built: limits, cache split, verify scheme."""
        return self._executor.engine.description

    @property
    def is_healthy(self) -> bool:
        """Whether requests are being served."""
        return self._stop.alive and self._executor.engine.is_healthy

    @property
    def fatal_error(self) -> BaseException | None:
        """What stopped the engine for good, if anything did."""
        return self._executor.engine.fatal_error

    @overload
    def generate(
        self,
        inputs: str | dict[str, Any],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> RequestOutput: ...
    @overload
    def generate(
        self,
        inputs: Sequence[PromptInputs] | Sequence[int],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]: ...
    def generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> RequestOutput | list[RequestOutput]:
        """Finished outputs for a prompt (one output) or a sequence of prompts (a list, in their order).

        A prompt is text, token ids, or a mapping {"prompt": ...} or {"prompt_token_ids": ...}. One
        `sampling_params` serves all prompts, a sequence has one per prompt.
        Raises ValueError for arguments that cannot run, RequestError for a request that failed; what else was
        submitted is then aborted.
        """
        prompts = [inputs] if is_single_prompt(inputs) else list(inputs)
        params = _params_per_prompt(sampling_params, len(prompts))
        outputs: list[RequestOutput] = []
        try:
            for prompt, own_params in zip(prompts, params, strict=True):
                outputs.append(self.generate_async(prompt, own_params))
            shows_progress = use_tqdm and len(outputs) > 1
            for output in tqdm(outputs, desc="Processed requests", disable=not shows_progress):
                output.result()
        finally:
            for output in outputs:
                output.abort()
        return outputs[0] if is_single_prompt(inputs) else outputs

    def generate_async(
        self,
        inputs: PromptInputs,
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
    ) -> RequestOutput:
        """Queue one prompt and return at once; see `RequestOutput` for how to wait.

        Raises ValueError for what can never run, naming the limit.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        prompt = read_prompt(inputs, params, self.tokenizer)
        requests = build_requests(prompt, params, self._limits, self.tokenizer)
        return RequestOutput(
            submitted=self._executor.submit(requests),
            prompt=prompt.text,
            prompt_token_ids=list(prompt.token_ids),
            params=params,
            tokenizer=self.tokenizer,
            streaming=streaming,
        )

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, object]]:
        """Statistics of the iterations since the last call, in the keys of TensorRT-LLM's iteration stats.

        `timeout` has no effect: the answer is always there at once.
        """
        return self._executor.engine.get_stats()

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, object]]:
        """The same, one iteration at a time."""
        for stats in self.get_stats():
            yield stats

    def snapshot(self) -> EngineSnapshot:
        """Gauges of this moment; reading them changes nothing."""
        return self._executor.engine.snapshot()

    def shutdown(self) -> None:
        """Stop the engine; requests under way fail with RequestError. A second call does nothing."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _load(args: TorchLlmArgs) -> tuple[Engine, Tokenizer | None, tuple[int, ...]]:
    checkpoint = resolve_model_folder(args.model)
    # The tokenizer is read first: a fault in it should not cost the time to load a model.
    tokenizer = _load_tokenizer(args, checkpoint)
    end_ids = read_end_ids(checkpoint)
    engine = create_py_executor(args.to_executor_config(checkpoint))
    return engine, tokenizer, end_ids


def _load_tokenizer(args: TorchLlmArgs, checkpoint: Path) -> Tokenizer | None:
    if args.skip_tokenizer_init:
        return None
    if isinstance(args.tokenizer, Tokenizer):
        return args.tokenizer
    return Tokenizer.from_path(checkpoint if args.tokenizer is None else args.tokenizer)


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {num_prompts} prompts; give one per prompt"
        )
    return list(params)
