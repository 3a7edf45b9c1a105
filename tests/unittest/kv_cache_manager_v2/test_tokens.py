# SPDX-License-Identifier: Apache-2.0
"""Keys of token ids against lists of ids, for text and for any ids; and what the manager promises of both."""

import random

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import MisuseError
from tensorrt_llm.runtime.kv_cache_manager_v2.tokens import TEXT_BITS, TokenPacker
from tests.unittest.kv_cache_manager_v2.builders import attention, make_manager, run_prompt, ssm

BIG = 1 << TEXT_BITS


def common(left: list[int], right: list[int]) -> int:
    differing = (i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, min(len(left), len(right)))


@pytest.mark.parametrize("text_only", [True, False])
def test_keys_are_the_tokens(text_only: bool) -> None:
    """Lengths odd and even, ids at both ends of the range, heads, common prefixes and order."""
    packer = TokenPacker(text_only=text_only)
    limit = BIG if text_only else 1 << 32
    rng = random.Random(20)
    for _ in range(400):
        alphabet = rng.choice([[0, 1], [0, limit - 1], [limit // 2, limit // 2 - 1, 17], range(limit)])
        left = rng.choices(alphabet, k=rng.randrange(0, 12))
        right = left[: rng.randrange(len(left) + 1)] + rng.choices(alphabet, k=rng.randrange(0, 5))
        one, other = (packer.key(packer.parse(tokens)) for tokens in (left, right))
        assert packer.unpack(one) == left and packer.num_tokens(one) == len(left)
        assert packer.num_common(one, other) == packer.num_common(other, one) == common(left, right)
        assert (one == other) == (left == right)
        if len(left) == len(right):
            assert (one < other) == (left < right), "byte order is token order"
        for length in range(len(left) + 1):
            assert packer.head(one, length) == packer.key(packer.parse(left[:length]))


@pytest.mark.parametrize("text_only", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
def test_block_keys_are_the_keys_of_the_blocks(text_only: bool, size: int) -> None:
    packer = TokenPacker(text_only=text_only)
    tokens = random.Random(size).choices(range(BIG), k=5 * size + size // 2)
    ids = packer.parse(tokens)
    expected = [packer.key(packer.parse(tokens[i * size : (i + 1) * size])) for i in range(5)]
    assert packer.block_keys(ids, size) == expected
    assert packer.block_keys(ids[: size - 1], size) == []
    assert len(expected[0]) == -(-size * packer.bits // 8)


def test_text_takes_160_bytes_for_64_tokens() -> None:
    text, anything = TokenPacker(text_only=True), TokenPacker(text_only=False)
    assert len(text.key(text.parse(range(64)))) == 160
    assert len(anything.key(anything.parse(range(64)))) == 256


@pytest.mark.parametrize("text_only", [True, False])
@pytest.mark.parametrize("tokens_per_block", [1, 3, 4])
def test_reuse_is_the_same_for_text_and_for_any_ids(text_only: bool, tokens_per_block: int) -> None:
    manager = make_manager([attention()], text_only=text_only, tokens_per_block=tokens_per_block)
    tokens = [BIG - 1 - index for index in range(10)]
    cache = run_prompt(manager, tokens, commit_at=(5, 10))
    cache.stop_committing()
    cache.close()
    for length in range(11):
        assert manager.probe_reuse(None, [*tokens[:length], 3, 4]) == length
    manager.check_integrity()
    manager.shutdown()


def test_ids_that_are_no_text_need_a_manager_for_them() -> None:
    """A promise that all is text is kept to: the manager's for everyone, a request's for itself."""
    text = make_manager([attention(), ssm()], num_states=3, text_only=True)
    with pytest.raises(MisuseError, match=rf"{BIG} is no text.*set text_only=False"):
        text.probe_reuse(None, [BIG])
    with pytest.raises(MisuseError, match="no text"):
        text.create_kv_cache(input_tokens=[1, BIG, 2])
    assert text.num_open_caches == 0
    text.shutdown()
    anything = make_manager([attention(), ssm()], num_states=3)
    run_prompt(anything, [BIG, 2**32 - 1, 7, 8]).close()
    assert anything.probe_reuse(None, [BIG, 2**32 - 1, 7, 8, 9]) == 4
    with pytest.raises(MisuseError, match="no text"):
        anything.create_kv_cache(input_tokens=[BIG], text_only=True)
    honest = anything.create_kv_cache(input_tokens=[5, 6], text_only=True)
    assert honest.resume() and honest.resize(4)
    with pytest.raises(MisuseError, match="no text"):
        honest.commit([5, BIG])
    honest.commit([5, 6])
    assert honest.num_committed_tokens == 2
    honest.close()
    anything.check_integrity()
    anything.shutdown()
