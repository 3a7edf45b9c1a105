# SPDX-License-Identifier: Apache-2.0
"""The arguments of `LLM`, checked at the door and turned into the executor's frozen configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import AfterValidator, ConfigDict, PositiveInt, model_validator

from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig
from tensorrt_llm.llmapi.kv_cache_config import KvCacheConfig
from tensorrt_llm.llmapi.speculative_config import SpeculativeConfig
from tensorrt_llm.llmapi.strict_model import StrictBaseModel, parse
from tensorrt_llm.llmapi.tokenizer import Tokenizer

# Options of TensorRT-LLM that a user may well try: they are refused as such, not as misspellings.
_NOT_OFFERED = """
    allreduce_strategy attn_backend backend batch_wait_timeout_ms batched_logits_processor
    cache_transceiver_config context_parallel_size cuda_graph_config custom_tokenizer
    disable_overlap_scheduler enable_attention_dp enable_iter_req_stats enable_lora env_overrides
    gather_generation_logits generation_config gpus_per_node guided_decoding_backend kv_connector_config
    load_format lora_config max_beam_width max_input_len moe_config moe_expert_parallel_size
    moe_tensor_parallel_size num_postprocess_workers orchestrator_type peft_cache_config
    perf_metrics_output_dir pipeline_parallel_size post_processor_hook print_iter_log
    prometheus_metrics_config quant_config reasoning_parser return_perf_metrics revision sampler_type
    sleep_config stream_interval telemetry_config tokenizer_mode tokenizer_revision
    torch_compile_config
"""
NOT_OFFERED_ARGS = frozenset(_NOT_OFFERED.split())


# What the cache managers know and the loop makes no use of. Falsy values say "off" and are fine.
_IDLE_CACHE_OPTIONS = {
    "max_attention_window": "the models attend to the whole text",
    "enable_kv_pool_rebalance": "pools keep the sizes they start with",
}
_TIER_OPTIONS = ("host_cache_size", "disk_cache_size", "disk_cache_path")


def _one_rank(size: int) -> int:
    if size != 1:
        raise ValueError(f"it is {size}, and the model runs on one rank: leave it at 1")
    return size


class ModelKwargs(StrictBaseModel):
    """Switches of the model itself.

    kda_token_states: True keeps draft records, False never does, None decides as kda_verify_scheme says.
    kda_verify_scheme: how rejected drafts are undone; "auto" takes records where speculation is on, block
        reuse is off and an op serves the model's heads, else replay.
    kda_conv_dtype: element type of the windows that verify rounds keep beside the states; bfloat16 takes half
        the bytes and is exact for a model that runs in bfloat16, and is refused for others.
    """

    kda_token_states: bool | None = None
    kda_verify_scheme: Literal["auto", "records", "replay", "intermediate"] = "auto"
    kda_conv_dtype: Literal["float32", "bfloat16"] = "float32"


class SchedulerConfig(StrictBaseModel):
    """Who may hold cache pages when requests want more than there are.

    capacity_scheduler_policy: GUARANTEED_NO_EVICT admits a request when the pages of its whole life are free.
        MAX_UTILIZATION admits by what is needed now; the youngest request gives way when pages run out, to a
        host or disk tier where there is one.
    """

    not_offered: ClassVar[frozenset[str]] = frozenset(
        {"context_chunking_policy", "dynamic_batch_config", "waiting_queue_policy"}
    )

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


class TorchLlmArgs(StrictBaseModel):
    """Everything `LLM` takes.

    model: a packaged model's name or a checkpoint folder. tokenizer: a `tokenizer.json`, a folder with one,
        or a `Tokenizer`; None means the model's. skip_tokenizer_init: prompts and outputs are token ids.
    trust_remote_code: inert; code from a checkpoint is never run.
    dtype, device: "auto" follows the checkpoint, and takes a GPU where there is one. tensor_parallel_size: 1.
    max_batch_size: requests that run at once. max_num_tokens: tokens of one step. max_seq_len: tokens of a
        request with its output; None means the model's limit. enable_chunked_prefill: let a long prompt share
        steps with others, in parts.
    enable_iter_perf_stats, max_stats_len: keep so many iterations for `get_stats`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    not_offered: ClassVar[frozenset[str]] = NOT_OFFERED_ARGS

    model: str | Path
    tokenizer: Any = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: Annotated[int, AfterValidator(_one_rank)] = 1
    max_batch_size: PositiveInt = 8
    max_num_tokens: PositiveInt = 8192
    max_seq_len: PositiveInt | None = None
    enable_chunked_prefill: bool = False
    scheduler_config: SchedulerConfig = SchedulerConfig()
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    speculative_config: SpeculativeConfig | None = None
    model_kwargs: ModelKwargs = ModelKwargs()
    enable_iter_perf_stats: bool = True
    max_stats_len: PositiveInt = 1000

    @model_validator(mode="after")
    def _check_tokenizer(self) -> Self:
        if self.tokenizer is not None and not isinstance(self.tokenizer, str | Path | Tokenizer):
            raise ValueError(
                f"tokenizer is a {type(self.tokenizer).__name__}; give a path or a tensorrt_llm Tokenizer"
            )
        if self.tokenizer is not None and self.skip_tokenizer_init:
            raise ValueError("tokenizer and skip_tokenizer_init=True contradict each other; drop one of them")
        return self

    @model_validator(mode="after")
    def _refuse_idle_cache_options(self) -> Self:
        cache = self.kv_cache_config
        for name, reason in _IDLE_CACHE_OPTIONS.items():
            if getattr(cache, name):
                raise ValueError(f"kv_cache_config.{name} is not offered: {reason}; leave it out")
        suspends = self.scheduler_config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
        tiers = [name for name in _TIER_OPTIONS if getattr(cache, name)]
        if tiers and not suspends:
            raise ValueError(
                f"kv_cache_config.{tiers[0]}: requests move to a lower tier only under "
                "scheduler_config.capacity_scheduler_policy=MAX_UTILIZATION; set that, or leave the tier out"
            )
        if cache.use_kv_cache_manager_v2 is False:
            raise ValueError("kv_cache_config.use_kv_cache_manager_v2=False: there is no other manager")
        return self

    @classmethod
    def from_yaml(cls, path: str | Path, base: Mapping[str, Any] | None = None) -> Self:
        """Arguments from a YAML file, which wins over `base`. Raises ValueError with one line per fault."""
        return parse(cls, {**(base or {}), **read_yaml(path)})

    def to_executor_config(self, checkpoint: Path) -> ExecutorConfig:
        """The executor's view of these arguments, for the checkpoint that `model` was found to be."""
        reuse_was_set = "enable_block_reuse" in self.kv_cache_config.model_fields_set
        return ExecutorConfig(
            model=str(checkpoint),
            model_kwargs=self.model_kwargs.model_dump(exclude_unset=True),
            dtype=self.dtype,
            device=self.device,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_seq_len=self.max_seq_len,
            enable_chunked_prefill=self.enable_chunked_prefill,
            capacity_scheduler_policy=self.scheduler_config.capacity_scheduler_policy,
            kv_cache_config=self.kv_cache_config.to_settings(),
            enable_block_reuse=self.kv_cache_config.enable_block_reuse if reuse_was_set else None,
            speculation=None if self.speculative_config is None else self.speculative_config.to_spec(),
            enable_iter_perf_stats=self.enable_iter_perf_stats,
            max_stats_len=self.max_stats_len,
        )


class _SingleKeyLoader(yaml.SafeLoader):
    """YAML without objects, in which a key given twice is an error and not the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            raise yaml.YAMLError(f"it has {repeated!r} twice, line {node.start_mark.line + 1} and below")
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping. Raises ValueError naming the file."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_SingleKeyLoader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}; it must be a mapping of option names to values"
        )
    return content
