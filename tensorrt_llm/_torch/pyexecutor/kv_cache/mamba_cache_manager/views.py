# SPDX-License-Identifier: Apache-2.0
"""A layer's view of the slots: the tensors a recurrent layer reads and writes, with TensorRT-LLM's field
names.

Letters: N slots, H heads, V = K head width, D = H*K, W conv width, M drafts.
"""

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """conv [.., N, 3D, W-1] in the model's dtype, temporal [.., N, H, V, K]; `..` is the layer axis before
    `at_layer_idx`.
    """

    conv: Tensor
    temporal: Tensor

    _SHARED_BY_ALL_LAYERS: ClassVar[frozenset[str]] = frozenset()

    def at_layer_idx(self, layer: int) -> Self:
        """The same kind of view for one local layer: every tensor that has a layer axis, indexed by it; None
        stays None.
        """
        named = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in self._SHARED_BY_ALL_LAYERS
        }
        return replace(self, **{name: value[layer] for name, value in named.items() if value is not None})

    @property
    def has_kda_replay_caches(self) -> bool:
        """Whether a verify round can run on these slots: whether they hold the extended conv windows."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeState(State):
    """A state with what a verify round keeps beside it, by scheme; what the scheme in force does not keep is
    None.

    prev_num_accepted_tokens int32 [N]: drafts pending in each slot, shared by all layers. kda_conv_q/k/v [N,
    D, W-1+M] fp32 or bf16, channel stride 1: raw inputs at positions -(W-2)..M around the golden token.
    kda_state_tok fp32 [N, 3, M, H, K], contiguous: vn, beta k, decay of each draft. kda_qkg_cache fp32 [N, M,
    3, D], kda_v_cache fp32 [N, M, D], kda_beta_cache fp32 [N, M, H] with rows padded to 16 bytes.
    intermediate_ssm fp32 [N, M, H, V, K]: the state after each draft.
    """

    intermediate_conv_window: Tensor | None = None
    intermediate_ssm: Tensor | None = None
    kda_conv_q: Tensor | None = None
    kda_conv_k: Tensor | None = None
    kda_conv_v: Tensor | None = None
    kda_qkg_cache: Tensor | None = None
    kda_v_cache: Tensor | None = None
    kda_beta_cache: Tensor | None = None
    kda_state_tok: Tensor | None = None
    prev_num_accepted_tokens: Tensor | None = None
    cache_buf_idx: Tensor | None = None
    mamba_ssm_rand_seed: Tensor | None = None

    _SHARED_BY_ALL_LAYERS: ClassVar[frozenset[str]] = frozenset(
        {"prev_num_accepted_tokens", "cache_buf_idx", "mamba_ssm_rand_seed"}
    )

    @property
    def has_kda_replay_caches(self) -> bool:
        return self.kda_conv_q is not None

    def commit_conv_window(self, slot_indices: Tensor, conv_pool: Tensor) -> None:
        """Copy the committed W-1 columns of these slots from `conv_pool` [.., N, 3D, W-1] into the extended
        windows.

        slot_indices int [n], distinct; `..` is the layer axis of a view of all layers. Columns W-1.. and all
        other slots stay. For after a prefill chunk or a plain decode.
        """
        assert self.kda_conv_q is not None and self.kda_conv_k is not None and self.kda_conv_v is not None
        columns, slots = conv_pool.shape[-1], slot_indices.long()
        sections = conv_pool.index_select(-3, slots).to(self.kda_conv_q.dtype).chunk(3, dim=-2)
        for cache, section in zip((self.kda_conv_q, self.kda_conv_k, self.kda_conv_v), sections, strict=True):
            cache[..., :columns].index_copy_(-3, slots, section)
