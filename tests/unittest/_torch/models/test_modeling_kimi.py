# SPDX-License-Identifier: Apache-2.0
"""The whole model: cached against dense, and a token's logits against the company it runs in."""

import pytest
import torch

from tensorrt_llm._torch.models.modeling_kimi import KimiForCausalLM
from tensorrt_llm._torch.modules.kda.verify_scheme import RECORDS, SCHEMES, VerifyScheme
from tensorrt_llm._torch.modules.metadata import ContextChunk, ForwardMetadata
from tests.unittest._torch.kimi_small import (
    KIMI_LINEAR_CONFIG,
    RAW_CONFIG,
    ModelCaches,
    context,
    make_group,
    random_model,
    round_of,
)

PAGES = torch.tensor([4, 1, 7, 2, 9, 3])


def prefill(
    model: KimiForCausalLM, caches: ModelCaches, ids: torch.Tensor, slot: int, pages: torch.Tensor
) -> torch.Tensor:
    return model.compute_logits(model(ids, context(len(ids), 0, slot, pages), caches))


@pytest.mark.parametrize("raw", [RAW_CONFIG, KIMI_LINEAR_CONFIG], ids=["k3", "kimi_linear"])
@pytest.mark.parametrize("scheme", [None, *SCHEMES.values()], ids=["none", *SCHEMES])
def test_cached_steps_match_the_dense_pass(raw: dict, scheme: VerifyScheme | None) -> None:
    """Prefill in chunks, then steps, against the dense form that training uses."""
    model = random_model(raw)
    model.set_verify_scheme(scheme)
    ids = torch.randint(96, (150,))
    dense = model.training_logits(ids.unsqueeze(0))[0]
    caches = ModelCaches(model.config, scheme, 3, 10)
    logits = []
    for start, end in ((0, 64), (64, 130)):
        metadata = context(end - start, start, 2, PAGES)
        logits.append(model.compute_logits(model(ids[start:end], metadata, caches)))
    for t in range(130, 150):
        logits.append(model.compute_logits(model(ids[t : t + 1], round_of(1, [2], [t], [PAGES]), caches)))
    torch.testing.assert_close(torch.cat(logits), dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_token_alone_equals_the_token_in_a_round_and_in_a_batch(scheme: VerifyScheme) -> None:
    model = random_model()
    model.set_verify_scheme(scheme)
    ids = torch.randint(96, (8, 120))
    lengths = [70, 64, 3, 100, 65, 1, 96, 33]
    pages = [torch.tensor([2 * i + 1, 2 * i]) for i in range(8)]
    alone, batch = ModelCaches(model.config, scheme, 8, 16), ModelCaches(model.config, scheme, 8, 16)
    single = []
    for i, n in enumerate(lengths):
        prefill(model, alone, ids[i, :n], i, pages[i])
        steps = [
            model.compute_logits(model(ids[i, t : t + 1], round_of(1, [i], [t], [pages[i]]), alone))
            for t in range(n, n + 16)
        ]
        single.append(torch.cat(steps))
    for i, n in enumerate(lengths):
        prefill(model, batch, ids[i, :n], i, pages[i])
    for accepted in (3, 7, 0):
        rows = torch.cat([ids[i, n : n + 8] for i, n in enumerate(lengths)])
        metadata = round_of(8, list(range(8)), lengths, pages)
        logits = model.compute_logits(model(rows, metadata, batch)).view(8, 8, -1)
        for i in range(8):
            first = lengths[i] - [70, 64, 3, 100, 65, 1, 96, 33][i]
            assert torch.equal(logits[i, : accepted + 1], single[i][first : first + accepted + 1]), (
                accepted,
                i,
            )
            batch.accept(i, accepted)
        lengths = [n + accepted + 1 for n in lengths]


def test_prompts_do_not_depend_on_chunks_or_company() -> None:
    """Chunks of 64, 128 and all at once, alone and beside other requests: equal bits."""
    model = random_model()
    model.set_verify_scheme(RECORDS)
    ids, other = torch.randint(96, (200,)), torch.randint(96, (130,))
    whole = ModelCaches(model.config, RECORDS, 3, 12)
    expected = prefill(model, whole, ids, 0, PAGES)
    for cut in (64, 128):
        caches = ModelCaches(model.config, RECORDS, 3, 12)
        parts = [
            model.compute_logits(model(ids[s : s + cut], context(len(ids[s : s + cut]), s, 0, PAGES), caches))
            for s in range(0, 200, cut)
        ]
        assert torch.equal(torch.cat(parts), expected)
    caches = ModelCaches(model.config, RECORDS, 3, 12)
    neighbour, generating = torch.tensor([0, 5, 6]), torch.tensor([8])
    prefill(model, caches, other[:5], 2, generating)
    chunks = (
        ContextChunk(request_id=1, row_start=0, num_tokens=130, position_start=0, slot=1, pages=neighbour),
        ContextChunk(request_id=0, row_start=130, num_tokens=200, position_start=0, slot=0, pages=PAGES),
    )
    group = make_group([2], 4, 330, torch.tensor([2], dtype=torch.int32), [5], [generating])
    metadata = ForwardMetadata(contexts=chunks, groups=(group,), num_tokens=334)
    logits = model.compute_logits(model(torch.cat((other, ids, other[:4])), metadata, caches))
    assert torch.equal(logits[130:330], expected)
    for layer, cache in whole.layers.items():
        assert torch.equal(caches.layers[layer].temporal[0], cache.temporal[0])


def test_a_new_prompt_starts_from_zeros_in_a_used_slot() -> None:
    """Whatever a slot's last owner left, NaN included, the first chunk does not see."""
    model = random_model()
    ids = torch.randint(96, (2,))
    fresh, used = ModelCaches(model.config, None, 1, 6), ModelCaches(model.config, None, 1, 6)
    for cache in used.layers.values():
        cache.temporal.fill_(torch.nan)
        cache.conv.fill_(torch.nan)
    assert torch.equal(prefill(model, fresh, ids, 0, PAGES[1:2]), prefill(model, used, ids, 0, PAGES[1:2]))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_conv_window(length: int) -> None:
    model = random_model()
    ids = torch.randint(96, (length + 3,))
    dense = model.training_logits(ids.unsqueeze(0))[0]
    caches = ModelCaches(model.config, None, 1, 6)
    logits = [prefill(model, caches, ids[:length], 0, PAGES[1:2])]
    for t in range(length, length + 3):
        logits.append(
            model.compute_logits(model(ids[t : t + 1], round_of(1, [0], [t], [PAGES[1:2]]), caches))
        )
    torch.testing.assert_close(torch.cat(logits), dense, rtol=1e-4, atol=1e-4)


def test_attention_residuals_take_a_snapshot_each_block() -> None:
    """The stack that reaches the last layer: the embedding, then one running sum per closed block."""
    model = random_model()
    seen = []
    model.model.layers[4].register_forward_hook(lambda module, args, out: seen.append(list(args[1])))
    ids = torch.randint(96, (1, 5))
    model.training_logits(ids)
    assert len(seen[0]) == 3
    assert torch.equal(seen[0][0], model.model.embed_tokens[ids])


def test_router_bias_selects_but_does_not_weigh() -> None:
    moe = random_model().model.layers[1].mlp
    x = torch.randn(6, 64)
    experts, weights = moe.route(x)
    moe.selection_bias[experts[0, -1]] -= 100.0
    moved, new_weights = moe.route(x)
    assert experts[0, -1] not in moved[0]
    scores = torch.sigmoid(x @ moe.router.T)[0, moved[0]]
    torch.testing.assert_close(new_weights[0], scores / scores.sum())
    assert torch.allclose(weights.sum(-1), torch.ones(6))
