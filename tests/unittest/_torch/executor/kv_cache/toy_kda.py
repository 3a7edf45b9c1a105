# SPDX-License-Identifier: Apache-2.0
"""A model of KDA layers with nothing between them, run on a manager's slots, and its literal counterpart.

`ToyKda` runs prompts and verify rounds through the real schemes on the views of a manager. `Literal` keeps
one request's accepted tokens with the state and window they lead to, token by token, in tensors of its own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.recurrence import KdaWeights, prepare_tokens, recurrent_kda
from tensorrt_llm._torch.modules.kda.verify_scheme import KdaRows
from tensorrt_llm._torch.modules.kda.windows import load_windows, sync_window
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager import MambaHybridCacheManagerV2

VOCAB = 64


class ToyKda:
    """Random weights and projections per layer and token id: fp32, H heads of width K, W conv taps."""

    def __init__(self, *, num_layers: int, H: int, K: int, W: int = 4, device: str = "cpu") -> None:
        gen = torch.Generator().manual_seed(5)
        D = H * K

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen).to(device)

        self.num_layers, self.W, self.H, self.K, self.device = num_layers, W, H, K, device
        self.weights = [
            KdaWeights(
                num_heads=H,
                head_dim=K,
                conv=rand(W, 3 * D),
                f_b=rand(D, K),
                a_log=rand(H) / 4,
                dt_bias=rand(D),
                norm=rand(K),
                lower_bound=-5.0,
                norm_eps=1e-5,
            )
            for _ in range(num_layers)
        ]
        self.qkv = [rand(VOCAB, 3 * D) for _ in range(num_layers)]
        self.f = [rand(VOCAB, D) for _ in range(num_layers)]
        self.b = [rand(VOCAB, H) for _ in range(num_layers)]

    def rows(self, layer: int, tokens: Sequence[int]) -> KdaRows:
        ids = torch.tensor(tokens, device=self.device)
        qkv = self.qkv[layer][ids]
        return KdaRows(proj=qkv, qkv=qkv, gate=self.f[layer][ids], f=self.f[layer][ids], b=self.b[layer][ids])

    def advance(
        self, layer: int, state: Tensor, window: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """State [H, V, K] and window [W-1, 3D] after the tokens."""
        rows = self.rows(layer, tokens)
        sequence = torch.cat((window, rows.qkv))
        operands = prepare_tokens(sequence, rows.f, rows.b, self.weights[layer])
        _, state = recurrent_kda(operands, state)
        return state, sequence[-(self.W - 1) :]

    def start(self) -> tuple[Tensor, Tensor]:
        """State and window before the first token."""
        D = self.H * self.K
        state = torch.zeros(self.H, self.K, self.K, device=self.device)
        return state, torch.zeros(self.W - 1, 3 * D, device=self.device)

    def prefill(
        self, manager: MambaHybridCacheManagerV2, slot: int, position: int, tokens: Sequence[int]
    ) -> None:
        """One chunk of a prompt: the slot's pool state and window, and the extended window behind them."""
        for layer in range(self.num_layers):
            view = manager.mamba_layer_cache(layer)
            state, window = self.start() if position == 0 else (view.temporal[slot], view.conv[slot].T)
            state, window = self.advance(layer, state, window, tokens)
            view.temporal[slot] = state
            view.conv[slot] = window.T
            if view.has_kda_replay_caches:
                sync_window(view, (slot,))

    def verify(
        self, manager: MambaHybridCacheManagerV2, slots: Sequence[int], rounds: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """One verify round: each request's golden token and drafts, all rounds equally long.

        Returns each layer's output [rows, H, V].
        """
        scheme = manager.verify_scheme
        assert scheme is not None
        tokens = [token for one in rounds for token in one]
        slot_tensor = torch.tensor(slots, dtype=torch.int32, device=self.device)
        T = len(rounds[0])
        return [
            scheme.verify(
                self.rows(layer, tokens),
                self.weights[layer],
                manager.mamba_layer_cache(layer),
                slot_tensor,
                T,
            )
            for layer in range(self.num_layers)
        ]


class Literal:
    """A request as its cache must be: cached tokens, and per layer the state and window after them."""

    def __init__(self, toy: ToyKda) -> None:
        self._toy = toy
        self.tokens: list[int] = []
        self.layers = [toy.start() for _ in range(toy.num_layers)]

    def feed(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self.tokens += tokens
        self.layers = [
            self._toy.advance(layer, state, window, tokens)
            for layer, (state, window) in enumerate(self.layers)
        ]


def logical_layers(manager: MambaHybridCacheManagerV2, slot: int, W: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Per layer the state and window that a slot is worth: the pool's with the pending drafts applied."""
    layers = []
    counts = manager.prev_num_accepted_tokens
    for layer in manager.mamba_layer_offsets:
        view = manager.mamba_layer_cache(layer)
        if counts is None:
            layers.append((view.temporal[slot], view.conv[slot].T))
            continue
        scheme = manager.verify_scheme
        assert scheme is not None
        slots = torch.tensor([slot], dtype=torch.int32, device=counts.device)
        pending = counts[slots]
        state = scheme.replay_pending(view, slots, pending, view.temporal[slots])
        layers.append((state[0], load_windows(view, slots, pending, W - 1)[0].float()))
    return layers


def write_pages(
    manager: MambaHybridCacheManagerV2, request_id: int, position: int, tokens: Sequence[int]
) -> None:
    """Put each token's number into its place in every attention layer's pages."""
    tpb = manager.tokens_per_block
    for layer in attention_layers(manager):
        pages = manager.get_batch_cache_indices([request_id], layer)[0]
        buffer = manager.get_buffers(layer)
        for offset, token in enumerate(tokens, position):
            buffer[pages[offset // tpb], :, offset % tpb] = token + layer * 1000


def read_pages(manager: MambaHybridCacheManagerV2, request_id: int, num_tokens: int, layer: int) -> list[int]:
    """The tokens that an attention layer's pages hold for a request."""
    pages = manager.get_batch_cache_indices([request_id], layer)[0]
    values = manager.get_buffers(layer)[torch.tensor(pages, dtype=torch.int64), 0, :, 0, 0]
    return [int(value) - layer * 1000 for value in values.flatten()[:num_tokens].tolist()]


def attention_layers(manager: MambaHybridCacheManagerV2) -> list[int]:
    return [
        layer
        for layer, shape in zip(manager.pp_layers, manager.layers.shapes, strict=True)
        if shape.num_kv_heads
    ]
