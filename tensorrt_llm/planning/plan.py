# SPDX-License-Identifier: Apache-2.0
"""One configuration under one verify scheme: what the cache of the tightest rank holds, and what it costs."""

from dataclasses import dataclass

from tensorrt_llm._torch.modules.kda.verify_scheme import SCHEMES, bytes_per_slot_layer
from tensorrt_llm._torch.pyexecutor.scheduler import SchedulerLimits
from tensorrt_llm.planning.models import PlannedModel
from tensorrt_llm.planning.request import PlanRequest
from tensorrt_llm.planning.sizes_only import SizedManager, agree, size_cache
from tensorrt_llm.planning.weights import RankWeights, count_weights
from tensorrt_llm.runtime.kv_cache_manager_v2._math import float32

SCHEME_NAMES = tuple(SCHEMES)

_CONV_PREFIX = "kda_conv_"
_BUFFERS_OF = {"records": "kda_state_tok", "intermediate": "intermediate_ssm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemePlan:
    """The tightest rank's cache under one scheme: bytes per slot over all its layers, slots, pages, tokens.

    `floor_slots` live sequences (`num_resident` requests and `num_dummy_slots` dummies) lead to `slots_kept`,
    and `ssm_slots` rows are allocated. `pool_bytes` are whole grains. `outside_quota_bytes` lie beside the
    quota. `resumable_tokens` may be in use when a suspended request is to resume. Of `full_length_requests`
    and `page_bound_requests` only the former counts the batch as a bound.
    """

    scheme: str
    stage: int
    num_kda_layers: int
    num_attention_layers: int
    num_heads: int
    num_resident: int
    num_dummy_slots: int
    floor_slots: int
    max_util: float
    slots_kept: int
    ssm_slots: int
    state_bytes_per_slot: int
    records_bytes_per_slot: int
    replay_cache_bytes_per_slot: int
    intermediate_bytes_per_slot: int
    conv_cache_bytes_per_slot: int
    outside_quota_bytes: int
    attention_bytes_per_token: int
    tokens_per_page: int
    attention_pages: int
    resumable_tokens: int
    quota_bytes: int
    pool_bytes: int
    grain_bytes: int
    is_at_live_floor: bool
    full_length_requests: int
    page_bound_requests: int
    weights: RankWeights

    @property
    def rollback_bytes_per_slot(self) -> int:
        """What undoing drafts takes per slot, beside the extended windows that all schemes have."""
        return (
            self.records_bytes_per_slot + self.replay_cache_bytes_per_slot + self.intermediate_bytes_per_slot
        )

    @property
    def rollback_bytes(self) -> int:
        return self.ssm_slots * self.rollback_bytes_per_slot

    @property
    def conv_cache_bytes(self) -> int:
        return self.ssm_slots * self.conv_cache_bytes_per_slot

    @property
    def records_bytes(self) -> int:
        """The part of `rollback_bytes` that the quota pays for."""
        return self.ssm_slots * self.records_bytes_per_slot

    @property
    def state_bytes(self) -> int:
        return self.ssm_slots * self.state_bytes_per_slot

    @property
    def attention_tokens(self) -> int:
        return self.attention_pages * self.tokens_per_page

    @property
    def attention_bytes(self) -> int:
        return self.attention_tokens * self.attention_bytes_per_token

    @property
    def left_over_bytes(self) -> int:
        """Quota that no slot, record or page uses; negative where whole grains exceed the quota."""
        return self.quota_bytes - self.state_bytes - self.records_bytes - self.attention_bytes

    def as_json(self) -> dict[str, str | int]:
        """The plan under the names of `--json`."""
        return {name: getattr(self, name) for name in JSON_KEYS}


JSON_KEYS = (
    "scheme",
    "slots_kept",
    "ssm_slots",
    "state_bytes_per_slot",
    "records_bytes_per_slot",
    "replay_cache_bytes_per_slot",
    "intermediate_bytes_per_slot",
    "conv_cache_bytes_per_slot",
    "rollback_bytes",
    "outside_quota_bytes",
    "attention_bytes_per_token",
    "attention_pages",
    "attention_tokens",
    "quota_bytes",
    "pool_bytes",
    "full_length_requests",
)


def plan_scheme(model: PlannedModel, request: PlanRequest, scheme: str) -> SchemePlan:
    """The cache of the rank that holds the fewest tokens.

    Raises ValueError, with the runtime's message, for what the runtime refuses, and where no request of
    max_seq_len tokens fits.
    """
    plan = plan_unfitted(model, request, scheme)
    if plan.attention_tokens < request.max_seq_len:
        raise ValueError(
            f"max_seq_len is reduced from {request.max_seq_len} to {plan.attention_tokens}, which is all the "
            "KV cache holds"
        )
    return plan


def plan_unfitted(model: PlannedModel, request: PlanRequest, scheme: str) -> SchemePlan:
    """`plan_scheme`, which may hold less than one request of max_seq_len tokens, as the runtime may."""
    stages = range(request.pp)
    plans = [request.cache_plan(model, scheme, stage) for stage in stages]
    for plan in plans:
        # What the cache itself refuses comes before what its weights would.
        plan.sizing()
    weights = [count_weights(model, plan.mapping) for plan in plans]
    sized = [
        size_cache(plan, request.gpu, counted.total_bytes)
        for plan, counted in zip(plans, weights, strict=True)
    ]
    built = agree(sized)
    held = {stage: tokens for stage in stages if (tokens := built[stage].held_tokens) is not None}
    tightest = min(held, key=lambda stage: held[stage])
    return _describe(request, scheme, tightest, built[tightest], weights[tightest])


def _describe(
    request: PlanRequest, scheme: str, stage: int, manager: SizedManager, weights: RankWeights
) -> SchemePlan:
    sizing, states = manager.sizing, manager.sizing.states
    side, num_layers = _side_bytes_per_slot(manager), len(manager.sizing.layers.recurrent)
    pages, full_length = manager.num_attention_pages, _pages_of_full_length(request, manager)
    return SchemePlan(
        scheme=scheme,
        stage=stage,
        num_kda_layers=num_layers,
        num_attention_layers=len(sizing.layers.pp_layers) - num_layers,
        num_heads=sizing.spec.num_heads,
        num_resident=sizing.num_resident,
        num_dummy_slots=sizing.num_dummy_slots,
        floor_slots=states.floor_slots,
        max_util=float32(states.max_util_for_resume),
        slots_kept=states.kept_slots if num_layers else 0,
        ssm_slots=manager.num_state_slots,
        state_bytes_per_slot=states.pool_bytes_per_slot,
        records_bytes_per_slot=side["records"],
        replay_cache_bytes_per_slot=side["replay"],
        intermediate_bytes_per_slot=side["intermediate"],
        conv_cache_bytes_per_slot=side["conv"],
        outside_quota_bytes=manager.side_bytes_beside_quota,
        attention_bytes_per_token=sizing.bytes_per_token,
        tokens_per_page=sizing.limits.tokens_per_block,
        attention_pages=pages,
        resumable_tokens=int(pages * float32(sizing.max_util_for_resume)) * sizing.limits.tokens_per_block,
        quota_bytes=manager.quota_bytes,
        pool_bytes=manager.split.pool_bytes,
        grain_bytes=manager.split.grain,
        is_at_live_floor=sizing.is_at_live_floor,
        full_length_requests=min(sizing.num_resident, pages // full_length),
        page_bound_requests=pages // full_length,
        weights=weights,
    )


def _side_bytes_per_slot(manager: SizedManager) -> dict[str, int]:
    """Bytes beside the pools per slot over all layers, by what they are for."""
    verify, num_layers = manager.sizing.verify, len(manager.sizing.layers.recurrent)
    sizes = {"conv": 0, "records": 0, "replay": 0, "intermediate": 0}
    if verify is None:
        return sizes
    kind_of = {buffer: kind for kind, buffer in _BUFFERS_OF.items()}
    for name, size in bytes_per_slot_layer(verify.scheme, verify.geometry).items():
        kind = "conv" if name.startswith(_CONV_PREFIX) else kind_of.get(name, "replay")
        sizes[kind] += num_layers * size
    return sizes


def _pages_of_full_length(request: PlanRequest, manager: SizedManager) -> int:
    """Pages that the loop sets aside for a request of max_seq_len tokens, whose last one is never cached."""
    limits = SchedulerLimits(
        max_batch_size=request.max_batch_size,
        max_num_tokens=manager.plan.max_num_tokens,
        max_seq_len=request.max_seq_len,
        max_pages=manager.num_attention_pages,
        tokens_per_page=request.tokens_per_block,
        tokens_per_gen_step=request.drafts + 1,
    )
    return max(1, limits.pages_of(request.max_seq_len - 1))
