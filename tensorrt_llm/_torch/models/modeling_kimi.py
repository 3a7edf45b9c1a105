# SPDX-License-Identifier: Apache-2.0
"""The text model of Kimi K3 and Kimi Linear: one class per block, variants by configuration.

Rows: the model pads a step's tokens to a multiple of 4 (`linear.pad_rows` says why) and drops the padding at
the end. Layer indices are 0-based.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensorrt_llm._torch.models.config import KimiTextConfig
from tensorrt_llm._torch.modules.attn_res import AttentionResidual
from tensorrt_llm._torch.modules.kda.attention import KdaConfig, KimiDeltaAttention
from tensorrt_llm._torch.modules.kda.verify_scheme import VerifyScheme
from tensorrt_llm._torch.modules.linear import aligned_linear, pad_rows
from tensorrt_llm._torch.modules.metadata import ForwardMetadata, LayerCaches
from tensorrt_llm._torch.modules.mla import LatentAttention
from tensorrt_llm._torch.modules.moe import GatedMLP, LatentMoE
from tensorrt_llm._torch.modules.rms_norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What cache code may know of a model. Layer indices are 0-based, latent_dim counts values per token."""

    num_layers: int
    attention_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    kda: KdaConfig | None
    latent_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: torch.dtype
    default_tokens_per_block: int


def _attention_block(
    config: KimiTextConfig, layer_idx: int, dtype: torch.dtype
) -> LatentAttention | KimiDeltaAttention:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    if config.is_attention_layer(layer_idx):
        assert config.mla is not None, f"layer {layer_idx} is an attention layer of a model without any"
        return LatentAttention(config.mla, hidden, eps, dtype)
    assert config.kda is not None, f"layer {layer_idx} is a KDA layer of a model without any"
    return KimiDeltaAttention(config.kda, hidden, eps, dtype)


def _feed_forward_block(config: KimiTextConfig, layer_idx: int, dtype: torch.dtype) -> GatedMLP | LatentMoE:
    hidden, activation = config.hidden_size, config.activation
    if config.is_dense_layer(layer_idx):
        return GatedMLP(hidden, config.dense_intermediate_size, activation, dtype)
    assert config.moe is not None, f"layer {layer_idx} is an expert layer of a model without experts"
    return LatentMoE(config.moe, hidden, config.rms_norm_eps, activation, dtype)


class KimiDecoderLayer(nn.Module):
    """Attention (KDA or MLA) and feed-forward (dense or MoE), joined by attention residuals or plain ones."""

    def __init__(self, config: KimiTextConfig, layer_idx: int, dtype: torch.dtype):
        super().__init__()
        self.layer_idx = layer_idx
        hidden, eps = config.hidden_size, config.rms_norm_eps
        block = config.attn_res_block_size
        self.starts_block = block is not None and layer_idx % block == 0
        self.self_attention_res = AttentionResidual(hidden, eps, dtype) if block else None
        self.mlp_res = AttentionResidual(hidden, eps, dtype) if block else None
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.self_attn = _attention_block(config, layer_idx, dtype)
        self.mlp = _feed_forward_block(config, layer_idx, dtype)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the tensor it is loaded into, relative to the layer."""
        names: dict[str, Tensor] = {
            "input_layernorm.weight": self.input_layernorm.weight,
            "post_attention_layernorm.weight": self.post_attention_layernorm.weight,
        }
        sites = {"self_attention_res": self.self_attention_res, "mlp_res": self.mlp_res}
        for site, residual in sites.items():
            if residual is not None:
                names |= {f"{site}_norm.weight": residual.norm, f"{site}_proj.weight": residual.proj}
        ffn = "mlp" if isinstance(self.mlp, GatedMLP) else "block_sparse_moe"
        names |= {f"self_attn.{n}": t for n, t in self.self_attn.checkpoint_tensors().items()}
        return names | {f"{ffn}.{n}": t for n, t in self.mlp.checkpoint_tensors().items()}

    def _attend(self, x: Tensor, metadata: ForwardMetadata | None, cache: LayerCaches | None) -> Tensor:
        x = self.input_layernorm(x)
        if metadata is None or cache is None:
            return self.self_attn.forward_dense(x)
        if isinstance(self.self_attn, LatentAttention):
            return self.self_attn(x, metadata, cache.get_buffers(self.layer_idx))
        return self.self_attn(x, metadata, cache.mamba_layer_cache(self.layer_idx))

    def _feed_forward(self, x: Tensor, num_tokens: int | None) -> Tensor:
        x = self.post_attention_layernorm(x)
        if isinstance(self.mlp, GatedMLP):
            return self.mlp(x)
        if num_tokens is None:
            return self.mlp.forward_dense(x.flatten(0, -2)).view(x.shape)
        return self.mlp(x, num_tokens)

    def forward(
        self,
        prefix: Tensor,
        snapshots: list[Tensor],
        metadata: ForwardMetadata | None,
        cache: LayerCaches | None,
    ) -> Tensor:
        """The running sum after the layer; appends to `snapshots` where a block starts. metadata None =
        training."""
        num_tokens = None if metadata is None else metadata.num_tokens
        if self.self_attention_res is None or self.mlp_res is None:
            prefix = prefix + self._attend(prefix, metadata, cache)
            return prefix + self._feed_forward(prefix, num_tokens)
        hidden = self.self_attention_res(prefix, snapshots) if snapshots else prefix
        if self.starts_block:
            snapshots.append(prefix)
        attended = self._attend(hidden, metadata, cache)
        prefix = attended if self.starts_block else prefix + attended
        return prefix + self._feed_forward(self.mlp_res(prefix, snapshots), num_tokens)


class KimiModel(nn.Module):
    """The backbone. `kda_token_states` is the switch a cache factory reads: keep the drafts' records."""

    def __init__(self, config: KimiTextConfig, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.kda_token_states = False
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Parameter(torch.zeros(config.vocab_size, hidden, dtype=dtype))
        self.layers = nn.ModuleList(KimiDecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.output_attn_res = AttentionResidual(hidden, eps, dtype) if config.attn_res_block_size else None
        self.norm = RMSNorm(hidden, eps, dtype)

    def forward(
        self, input_ids: Tensor, metadata: ForwardMetadata | None = None, cache: LayerCaches | None = None
    ) -> Tensor:
        """Normalised hidden states of input_ids: [rows] with metadata and cache, [B, T] in training -> [..,
        hidden]."""
        prefix = F.embedding(input_ids, self.embed_tokens)
        snapshots: list[Tensor] = []
        for layer in self.layers:
            prefix = layer(prefix, snapshots, metadata, cache)
        if self.output_attn_res is not None:
            prefix = self.output_attn_res(prefix, snapshots)
        return self.norm(prefix)


class KimiForCausalLM(nn.Module):
    """The backbone and the language-model head."""

    def __init__(self, config: KimiTextConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = KimiModel(config, dtype)
        self.lm_head = nn.Parameter(torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype))

    @property
    def traits(self) -> ModelTraits:
        """What cache code may know of this model."""
        c = self.config
        return ModelTraits(
            num_layers=c.num_layers,
            attention_layers=c.attention_layers,
            kda_layers=c.kda_layers,
            kda=c.kda,
            latent_dim=c.mla.latent_dim if c.mla else 0,
            vocab_size=c.vocab_size,
            max_position_embeddings=c.max_position_embeddings,
            dtype=self.dtype,
            default_tokens_per_block=64,
        )

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint by its full name (without a multimodal prefix)."""
        names: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.model.embed_tokens,
            "model.norm.weight": self.model.norm.weight,
            "lm_head.weight": self.lm_head,
        }
        residual = self.model.output_attn_res
        if residual is not None:
            names |= {"model.output_attn_res_norm.weight": residual.norm}
            names |= {"model.output_attn_res_proj.weight": residual.proj}
        for i, layer in enumerate(self.model.layers):
            assert isinstance(layer, KimiDecoderLayer)
            names |= {f"model.layers.{i}.{n}": t for n, t in layer.checkpoint_tensors().items()}
        return names

    def prepare(self) -> None:
        """Fix what the kernels read, once the weights are loaded and where they stay."""
        for layer in self.model.layers:
            if isinstance(layer.self_attn, KimiDeltaAttention):
                layer.self_attn.prepare()

    def set_verify_scheme(self, scheme: VerifyScheme | None) -> None:
        """Choose how every KDA layer undoes rejected drafts; None = no drafts are verified."""
        for layer in self.model.layers:
            if isinstance(layer.self_attn, KimiDeltaAttention):
                layer.self_attn.verify_scheme = scheme

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, metadata: ForwardMetadata, cache: LayerCaches) -> Tensor:
        """Run one step: input_ids int64 [num_tokens] -> hidden [num_tokens, hidden]; updates `cache`."""
        return self.model(pad_rows(input_ids), metadata, cache)[: metadata.num_tokens]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> logits fp32 [n, vocab]."""
        return aligned_linear(hidden, self.lm_head).float()

    def training_logits(self, input_ids: Tensor) -> Tensor:
        """Next-token logits [B, T, vocab] of whole sequences, differentiable, without a cache."""
        return F.linear(self.model(input_ids), self.lm_head)
