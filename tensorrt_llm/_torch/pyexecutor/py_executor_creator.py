# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an executor: model, cache manager, drafter, loop."""

from dataclasses import replace
from functools import partial
from typing import cast

import torch

from tensorrt_llm import envs, logger
from tensorrt_llm._torch.models.auto import load_model
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tensorrt_llm._torch.modules.kda.verify_scheme import get_scheme
from tensorrt_llm._torch.pyexecutor.capacity_policy import create_capacity_policy
from tensorrt_llm._torch.pyexecutor.config import (
    ExecutorConfig,
    ResolvedVerifyScheme,
    VerifySchemeRequest,
    limit_to_model,
    read_verify_scheme_kwargs,
    resolve_verify_scheme,
)
from tensorrt_llm._torch.pyexecutor.description import ExecutorDescription
from tensorrt_llm._torch.pyexecutor.kv_cache.budget import KvCacheCreator, Managers
from tensorrt_llm._torch.pyexecutor.kv_cache.create import wants_token_states
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import conv_dtype_of
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import gpu_quota_bytes
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import EngineStandIn
from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits
from tensorrt_llm._torch.pyexecutor.model_engine import ModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import CacheManager, LoopOptions, PyExecutor
from tensorrt_llm._torch.pyexecutor.verify_op import find_missing_kernel, op_runs_on
from tensorrt_llm._torch.pyexecutor.warmup import full_step_lengths, run_full_step
from tensorrt_llm._torch.speculative.create import create_drafter
from tensorrt_llm._torch.speculative.speculator import Speculator
from tensorrt_llm.mapping import Mapping

_ROUNDING_BYTES = 64 << 20
"""A few grains of the smallest pools (2 MiB each)."""


def create_py_executor(config: ExecutorConfig) -> PyExecutor:
    """Load the model, size and allocate its cache, and build the executor, not yet started.

    Raises ValueError for a model, limits or options that cannot work together, before weights are read where
    they can be checked without them.
    """
    resolved = resolve_config_scheme(config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    model = load_model(config.model, dtype, device.type)
    return build_py_executor(config, resolved, model, device)


def resolve_config_scheme(config: ExecutorConfig) -> ResolvedVerifyScheme:
    """How this configuration undoes rejected drafts; logs what may surprise, once."""
    scheme, token_states = read_verify_scheme_kwargs(config.model_kwargs)
    resolved = resolve_verify_scheme(
        VerifySchemeRequest(
            kda_verify_scheme=scheme,
            kda_token_states=token_states,
            speculating=config.speculation is not None,
            enable_block_reuse=config.enable_block_reuse,
            op_serves_shape=op_runs_on(resolve_device(config.device)),
        )
    )
    if resolved.notice is not None:
        logger.info_once(resolved.notice)
    return resolved


def resolve_device(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda". Raises ValueError for another name, or where there is no GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; it must be 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch finds no GPU here: use device='cpu'")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The element type of "auto" (float32 on a CPU, else bfloat16) or of its name; ValueError for another."""
    by_name = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in by_name:
        raise ValueError(f"dtype is {name!r}; it must be 'auto', {', '.join(map(repr, by_name))}")
    return by_name[name]


def build_py_executor(
    config: ExecutorConfig, resolved: ResolvedVerifyScheme, model: KimiForCausalLM, device: torch.device
) -> PyExecutor:
    """The executor of a model already loaded. Sets the model's verify scheme; allocates the cache."""
    spec, traits = config.speculation, model.traits
    _tell_missing_kernel(config, resolved, model, device)
    config = limit_to_model(config, traits.max_position_embeddings)
    model.set_verify_scheme(None if spec is None else get_scheme(resolved.scheme))
    model.model.kda_token_states = resolved.kda_token_states
    manager = _create_manager(config, resolved, model, device)
    limits = SchedulerLimits(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=manager.max_seq_len,
        max_pages=manager.num_attention_pages,
        tokens_per_page=manager.tokens_per_block,
        tokens_per_gen_step=1 if spec is None else spec.tokens_per_gen_step,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )
    description = describe(config, resolved, model, manager)
    logger.info(description.cache_line())
    # The manager's own protocols are wider where TensorRT-LLM's signatures are.
    cache = cast(CacheManager, manager)
    drafter = None if spec is None else create_drafter(spec, device.type)
    return PyExecutor(
        engine=ModelEngine(model, cache, traits.attention_layers[0], device),
        cache=cache,
        limits=limits,
        capacity_policy=create_capacity_policy(
            config.capacity_scheduler_policy, offloads=len(manager.kv_cache_manager_py_config.cache_tiers) > 1
        ),
        options=LoopOptions(
            random_seed=config.random_seed,
            max_stats_len=config.max_stats_len if config.enable_iter_perf_stats else 0,
        ),
        description=description,
        speculator=Speculator(traits.vocab_size, spec, drafter, envs.force_num_accepted_tokens()),
    )


def _tell_missing_kernel(
    config: ExecutorConfig, resolved: ResolvedVerifyScheme, model: KimiForCausalLM, device: torch.device
) -> None:
    spec, kda = config.speculation, model.traits.kda
    if spec is None or kda is None or not resolved.kda_token_states:
        return
    reason = find_missing_kernel(kda, model.dtype, spec.max_draft_len, device)
    if reason:
        logger.warning_once(
            f"no kernel verifies drafts of this model on this GPU, its torch reference does, slowly: {reason}"
        )


def _create_manager(
    config: ExecutorConfig, resolved: ResolvedVerifyScheme, model: KimiForCausalLM, device: torch.device
) -> MambaHybridCacheManagerV2:
    creator = KvCacheCreator(plan_cache(config, resolved, model), device=device.type)
    if creator.try_prepare_estimation():
        creator.configure_kv_cache_capacity(partial(_run_full_step, config, resolved, model, device))
    manager = creator.build_managers().target
    try:
        return _check_manager(manager, resolved)
    except ValueError:
        manager.shutdown()
        raise


def _check_manager(manager: KVCacheManagerV2, resolved: ResolvedVerifyScheme) -> MambaHybridCacheManagerV2:
    """The manager, if the loop can run with it and it undoes drafts as the model does; else ValueError."""
    name = type(manager).__name__
    if not isinstance(manager, MambaHybridCacheManagerV2):
        raise ValueError(
            f"the cache manager is {name}; the loop needs one with recurrent states: leave "
            "kv_cache_config.use_kv_cache_manager_v2 out"
        )
    undone_by = manager.verify_scheme
    if undone_by is not None and undone_by.name != resolved.scheme:
        raise ValueError(
            f"model_kwargs: kda_verify_scheme is {resolved.scheme!r}, but the cache manager is {name}, which "
            f"undoes rejected drafts by {undone_by.name}: set kda_verify_scheme={undone_by.name!r}, or leave "
            "kv_cache_config.use_kv_cache_manager_v2 out"
        )
    return manager


def plan_cache(config: ExecutorConfig, resolved: ResolvedVerifyScheme, model: KimiForCausalLM) -> CachePlan:
    """What the cache is made from: no more tokens than all requests at full length can use.

    Where the user gave no bytes either, their bound is twice what these tokens need and room for rounding to
    the storage's grains, so that a share of a large memory does not count as asked for.
    """
    assert config.max_seq_len is not None, "limit_to_model fills it in"
    settings = replace(config.kv_cache_config, enable_block_reuse=resolved.enable_block_reuse)
    if settings.max_tokens is None:
        settings = replace(settings, max_tokens=config.max_batch_size * config.max_seq_len)
    plan = CachePlan(
        traits=model.traits,
        mapping=Mapping(),
        kv_cache_config=settings,
        tokens_per_block=model.traits.default_tokens_per_block,
        max_seq_len=config.max_seq_len,
        max_batch_size=config.max_batch_size,
        spec_config=config.speculation,
        max_num_tokens=config.max_num_tokens,
        kda_token_states=wants_token_states(EngineStandIn(model)),
        kda_verify_scheme=None if config.speculation is None else resolved.scheme,
        kda_conv_dtype=conv_dtype_of(config.model_kwargs.get("kda_conv_dtype", "float32")),
    )
    if settings.max_gpu_total_bytes > 0:
        return plan
    bound = 2 * gpu_quota_bytes(settings, plan.sizing()) + _ROUNDING_BYTES
    return plan.with_config(replace(settings, max_gpu_total_bytes=bound))


def _run_full_step(
    config: ExecutorConfig,
    resolved: ResolvedVerifyScheme,
    model: KimiForCausalLM,
    device: torch.device,
    managers: Managers,
) -> None:
    assert config.max_seq_len is not None, "limit_to_model fills it in"
    cache = cast(CacheManager, _check_manager(managers.target, resolved))
    lengths = full_step_lengths(config.max_num_tokens, config.max_batch_size, config.max_seq_len)
    run_full_step(ModelEngine(model, cache, model.traits.attention_layers[0], device), cache, lengths)


def describe(
    config: ExecutorConfig,
    resolved: ResolvedVerifyScheme,
    model: KimiForCausalLM,
    manager: MambaHybridCacheManagerV2,
) -> ExecutorDescription:
    """The executor in numbers."""
    spec, records = config.speculation, manager.kda_state_tok
    records_bytes = 0 if records is None else records.nbytes
    return ExecutorDescription(
        model=config.model,
        device=manager.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=manager.max_seq_len,
        vocab_size=model.traits.vocab_size,
        max_draft_len=0 if spec is None else spec.max_draft_len,
        verify_scheme=None if spec is None else resolved.scheme,
        attention_pages=manager.num_attention_pages,
        tokens_per_page=manager.tokens_per_block,
        ssm_slots=manager.num_state_slots,
        pool_bytes=manager.allocated_bytes,
        records_bytes=records_bytes,
        other_side_bytes=manager.side_bytes - records_bytes,
    )
