# SPDX-License-Identifier: Apache-2.0
"""Routed experts: both ways to run them against every expert on every row."""

import pytest
import torch

from tensorrt_llm._torch.modules import moe
from tensorrt_llm._torch.modules.activation import GatedActivation
from tensorrt_llm._torch.modules.moe import LatentMoE, MoeConfig

CONFIG = MoeConfig(
    num_experts=6,
    experts_per_token=2,
    intermediate_size=16,
    shared_intermediate_size=16,
    latent_dim=24,
    latent_norm=True,
    renormalize=True,
    routed_scaling_factor=1.5,
)


def random_moe(activation: GatedActivation) -> LatentMoE:
    torch.manual_seed(0)
    block = LatentMoE(CONFIG, 32, 1e-5, activation, torch.float32)
    for parameter in block.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return block.requires_grad_(False)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("reads_on_the_host", [True, False])
def test_grouped_experts_equal_every_expert_on_every_row(
    num_tokens: int, reads_on_the_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with an expert that nobody chose, and with rows of padding behind the tokens."""
    block = random_moe(GatedActivation())
    block.selection_bias[3] = -100
    if not reads_on_the_host:
        monkeypatch.setattr(moe, "host_values", lambda tensor: None)
    x = torch.randn(num_tokens + -num_tokens % 4, 32)
    out = block(x, num_tokens)
    expected = block.forward_dense(x[:num_tokens])
    torch.testing.assert_close(out[:num_tokens], expected, rtol=1e-5, atol=1e-5)
    assert block.expert_load[3] == 0 and block.expert_load.sum() == 2 * num_tokens
