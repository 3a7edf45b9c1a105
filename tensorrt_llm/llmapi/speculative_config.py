# SPDX-License-Identifier: Apache-2.0
"""What a user says about speculative decoding, one class per way of drafting."""

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tensorrt_llm.llmapi.strict_model import StrictBaseModel

_NOT_OFFERED = """
    advanced_sampling_mode allow_advanced_sampling enable_penalty load_format max_total_draft_tokens
    speculative_model speculative_model_dir use_rejection_sampling
"""


class DecodingBaseConfig(StrictBaseModel):
    """Options of every drafter.

    max_draft_len: most drafts verified per round (K). max_concurrency: no drafts while more requests than
    this generate. draft_len_schedule: instead, drafts by number of generating requests. The drafter goes
    silent for good when, over the last acceptance_rate_window_size requests, the share of accepted drafts
    falls below acceptance_rate_threshold (a window of 0 never does).
    """

    not_offered: ClassVar[frozenset[str]] = frozenset(_NOT_OFFERED.split())

    max_draft_len: PositiveInt
    max_concurrency: PositiveInt | None = None
    draft_len_schedule: dict[PositiveInt, NonNegativeInt] | None = None
    acceptance_rate_window_size: NonNegativeInt = 0
    acceptance_rate_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0


class NGramDecodingConfig(DecodingBaseConfig):
    """Drafts are what followed the same last tokens earlier in the text.

    max_matching_ngram_size: longest run of last tokens that is looked up. is_keep_all: keep every
    continuation seen, not only the newest; is_use_oldest: of those take the first seen; is_public_pool:
    share them between requests. round_cost_per_token: what one more token in a verify round costs as a
    share of the round's fixed cost; None takes the device's figure, 0 drafts always.

    The defaults are TensorRT-LLM's. On prompts that kimi-k3-tiny was not trained on, is_use_oldest=False,
    is_public_pool=False and max_matching_ngram_size=4 gave 2.5 tokens a round, the defaults 2.3 (40 prompts,
    64 greedy tokens each, max_draft_len=7).
    """

    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: PositiveInt = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True
    round_cost_per_token: NonNegativeFloat | None = None

    def to_spec(self) -> SpeculationSpec:
        """What the executor reads. Raises ValueError where options contradict each other."""
        return SpeculationSpec(**self.model_dump())

    @model_validator(mode="after")
    def _check(self) -> "NGramDecodingConfig":
        self.to_spec()
        return self


class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts come from the caller's `drafter`, an object with `prepare_draft_tokens(scheduled_requests)`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    decoding_type: Literal["User_Provided"] = "User_Provided"
    drafter: object

    def to_spec(self) -> SpeculationSpec:
        """What the executor reads. Raises ValueError where options contradict each other."""
        return SpeculationSpec(**{**dict(self), "drafter": self.drafter})

    @model_validator(mode="after")
    def _check(self) -> "UserProvidedDecodingConfig":
        if not (hasattr(self.drafter, "prepare_draft_tokens") or hasattr(self.drafter, "propose")):
            raise ValueError("drafter must have a method prepare_draft_tokens(scheduled_requests)")
        self.to_spec()
        return self


SpeculativeConfig = Annotated[
    NGramDecodingConfig | UserProvidedDecodingConfig, Field(discriminator="decoding_type")
]
