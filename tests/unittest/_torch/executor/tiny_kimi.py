# SPDX-License-Identifier: Apache-2.0
"""A Kimi K3 of random weights and of the smallest sizes, with its cache manager and executor."""

from dataclasses import dataclass, field
from functools import cache

import torch

from tensorrt_llm._torch.models.config import parse_config
from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy
from tensorrt_llm._torch.pyexecutor.config import ExecutorConfig, VerifySchemeName
from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheSettings, MambaStateSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, SamplingSpec
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.pyexecutor.py_executor_creator import build_py_executor, resolve_config_scheme
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.fakes import Collected, ScriptedDrafter

VOCAB_SIZE = 50
MAX_SEQ_LEN = 600

TINY_CONFIG = {
    "hidden_size": 32,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 5,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 64,
    "first_k_dense_replace": 1,
    "attn_res_block_size": 2,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 16,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4, 5],
    },
}


@cache
def tiny_model(device: str = "cpu", for_kernels: bool = False) -> KimiForCausalLM:
    """The model in fp32; its verify scheme is whatever was last asked of `make_tiny_rig`.

    `for_kernels`: in bf16, with KDA heads of the width that kernels serve.
    """
    linear = TINY_CONFIG["linear_attn_config"] | ({"head_dim": 128} if for_kernels else {})
    config = parse_config(TINY_CONFIG | {"linear_attn_config": linear})
    model = KimiForCausalLM(config, torch.bfloat16 if for_kernels else torch.float32)
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 1.6 / fan_in**0.5)
    model = model.to(device).eval().requires_grad_(False)
    if for_kernels:
        model.prepare()
    return model


@dataclass(slots=True, kw_only=True)
class TinyRig:
    """An executor on the tiny model and a real manager, stepped by hand."""

    executor: PyExecutor
    manager: MambaHybridCacheManagerV2
    answers: dict[int, Collected] = field(default_factory=dict)

    def submit(self, request: ExecutorRequest) -> Collected:
        answer = self.answers[request.request_id] = Collected()
        self.executor.submit(request, answer.responses.append)
        return answer

    def run(self, max_steps: int = 3000) -> dict[int, list[int]]:
        """Step until idle and shut down; the texts by request id."""
        for _ in range(max_steps):
            busy = self.executor.run_step()
            self.manager.check_integrity()
            if not busy:
                break
        else:
            raise AssertionError(f"still busy after {max_steps} steps")
        stats = self.manager.get_kv_cache_stats()
        assert (stats.used_num_blocks, len(self.manager.kv_cache_map)) == (0, 0)
        self.executor.shutdown()
        assert all(answer.is_final for answer in self.answers.values())
        return {request_id: answer.token_ids for request_id, answer in self.answers.items()}


def make_tiny_rig(
    *,
    scheme: VerifySchemeName = "records",
    spec: SpeculationSpec | None = None,
    max_batch_size: int = 8,
    max_num_tokens: int = 512,
    max_tokens_in_cache: int = 2048,
    snapshot_interval: int | None = None,
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    host_cache_size: int | None = None,
    max_util_for_resume: float = 0.95,
    enable_chunked_prefill: bool = True,
    device: str = "cpu",
    for_kernels: bool = False,
) -> TinyRig:
    """An executor as `create_py_executor` builds it. A drafter of one's own goes into a User_Provided
    spec.
    """
    config = ExecutorConfig(
        model="tiny",
        model_kwargs={"kda_verify_scheme": scheme},
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=MAX_SEQ_LEN,
        enable_chunked_prefill=enable_chunked_prefill,
        capacity_scheduler_policy=policy,
        kv_cache_config=KvCacheSettings(
            max_tokens=max_tokens_in_cache,
            host_cache_size=host_cache_size,
            max_util_for_resume=max_util_for_resume,
            mamba_state_config=MambaStateSettings(periodic_snapshot_interval=snapshot_interval or 0),
        ),
        enable_block_reuse=snapshot_interval is not None,
        speculation=spec,
        random_seed=5,
    )
    resolved = resolve_config_scheme(config)
    executor = build_py_executor(config, resolved, tiny_model(device, for_kernels), torch.device(device))
    manager = executor._cache
    assert isinstance(manager, MambaHybridCacheManagerV2)
    return TinyRig(executor=executor, manager=manager)


def scripted_speculation(texts: dict[int, list[int]], script: list[tuple[int, int]]) -> SpeculationSpec:
    """Up to seven drafts a round by a `ScriptedDrafter`."""
    drafter = ScriptedDrafter(dict(texts), script)
    return SpeculationSpec(decoding_type="User_Provided", max_draft_len=7, drafter=drafter)


def tiny_prompt(request_id: int, prompt_len: int) -> tuple[int, ...]:
    """A prompt that depends on its id and repeats itself a little."""
    return tuple((request_id * 7 + i * i % 11 + i % 5) % VOCAB_SIZE for i in range(prompt_len))


def tiny_request(
    request_id: int, prompt_len: int, max_tokens: int, sampling: SamplingSpec | None = None
) -> ExecutorRequest:
    return ExecutorRequest(
        request_id=request_id,
        prompt_token_ids=tiny_prompt(request_id, prompt_len),
        max_tokens=max_tokens,
        sampling=SamplingSpec() if sampling is None else sampling,
    )
