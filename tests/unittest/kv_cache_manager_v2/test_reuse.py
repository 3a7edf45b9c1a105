# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse: what is found, how far, and that shared pages and snapshots stay what they were."""

from collections.abc import Sequence

import pytest

from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    KVCacheManager,
    LayerConfig,
    LayerGroupId,
    LifeCycle,
    MisuseError,
    Priority,
)
from tests.unittest.kv_cache_manager_v2.builders import (
    attention,
    make_manager,
    pages_view,
    run_prompt,
    slots,
    ssm,
)

FULL, HYBRID, PURE_SSM = [attention()], [attention(), ssm()], [ssm()]
TEXT = list(range(100, 140))


def reused_after(
    layers: Sequence[LayerConfig],
    committed: Sequence[int],
    prompt: Sequence[int],
    commit_at: Sequence[int] = (),
    **options: object,
) -> int:
    manager = make_manager(layers, num_grains=4, num_states=3, **options)
    run_prompt(manager, committed, commit_at=commit_at).close()
    found = manager.probe_reuse(None, prompt)
    manager.check_integrity()
    manager.shutdown()
    return found


@pytest.mark.parametrize(
    ("committed", "prompt", "found"),
    [
        (TEXT[:12], TEXT[:20], 12),
        (TEXT[:12], TEXT[:12], 11),
        (TEXT[:12], TEXT[:1], 0),
        (TEXT[:12], TEXT[:7], 6),
        (TEXT[:12], [*TEXT[:6], 1, 2, 3], 6),
        (TEXT[:12], [1, *TEXT[:12]], 0),
        (TEXT[:3], TEXT[:20], 3),
    ],
)
def test_full_attention_reuses_the_longest_common_prefix(
    committed: list[int], prompt: list[int], found: int
) -> None:
    manager = make_manager(FULL)
    cache = run_prompt(manager, committed)
    cache.stop_committing()
    cache.close()
    assert manager.probe_reuse(None, prompt) == found
    manager.shutdown()


@pytest.mark.parametrize(
    ("prompt", "found"), [(TEXT[:20], 12), (TEXT[:12], 8), ([*TEXT[:6], 1, 2], 4), (TEXT[:4], 0)]
)
def test_without_partial_reuse_only_whole_blocks_are_found(prompt: list[int], found: int) -> None:
    assert reused_after(FULL, TEXT[:12], prompt, enable_partial_reuse=False) == found


@pytest.mark.parametrize(
    ("commit_at", "prompt", "found"),
    [
        ((12,), TEXT[:20], 12),
        ((12,), TEXT[:12], 0),
        ((10,), TEXT[:20], 10),
        ((5, 10), TEXT[:20], 10),
        ((5, 10), TEXT[:10], 5),
        ((4, 12), TEXT[:12], 4),
        ((9, 10), TEXT[:10], 0),
        ((8, 9), TEXT[:9], 8),
        ((6, 16), [*TEXT[:7], 1, 2], 6),
        ((6, 16), [*TEXT[:5], 1, 2], 0),
    ],
)
@pytest.mark.parametrize("layers", [HYBRID, PURE_SSM], ids=["hybrid", "pure_ssm"])
def test_a_recurrent_state_is_reused_at_exact_snapshots_only(
    layers: list[LayerConfig], commit_at: tuple[int, ...], prompt: list[int], found: int
) -> None:
    """The latest snapshot of a block wins; a prompt never reuses all of its tokens."""
    assert reused_after(layers, TEXT[:16], prompt, commit_at) == found


def test_snapshots_inside_blocks_need_partial_reuse() -> None:
    assert reused_after(HYBRID, TEXT[:16], TEXT[:20], (10,), enable_partial_reuse=False) == 0
    assert reused_after(HYBRID, TEXT[:16], TEXT[:20], (8, 10), enable_partial_reuse=False) == 8


def test_expected_prompt_length_leaves_the_last_token_to_be_computed() -> None:
    manager = make_manager(HYBRID, num_grains=4)
    run_prompt(manager, TEXT[:12]).close()
    assert manager.probe_reuse(None, TEXT[:12], expected_prompt_length=13) == 12
    assert manager.probe_reuse(None, TEXT[:12]) == 0
    cache = manager.create_kv_cache(input_tokens=TEXT[:12], expected_prompt_length=13)
    assert cache.num_committed_tokens == 12
    cache.close()
    manager.shutdown()


def test_backoff_gives_up_the_last_tokens_of_a_match() -> None:
    assert reused_after(FULL, TEXT[:12], TEXT[:20], reuse_match_backoff=3) == 9
    assert reused_after(FULL, TEXT[:12], TEXT[:20], reuse_match_backoff=50) == 0


def test_a_window_needs_only_the_blocks_it_sees() -> None:
    windowed = [attention(window=6, layer=1)]
    manager = make_manager(windowed, num_grains=2)
    cache = run_prompt(manager, TEXT[:20])
    assert cache.resize(history_length=20)
    cache.close()
    assert manager.probe_reuse(None, TEXT[:30]) == 20
    reused = manager.create_kv_cache(input_tokens=TEXT[:30])
    assert reused.resume()
    assert [index >= 0 for index in reused.get_base_page_indices(LayerGroupId(0))] == [
        False,
        False,
        False,
        True,
        True,
    ]
    reused.close()
    manager.shutdown()


def test_a_commit_of_the_minimum_leaves_no_window_for_shorter_prefixes() -> None:
    """With commit_min_snapshot only the window at the committed length is offered; shorter hits have none."""
    windowed = [attention(window=6, layer=1)]
    for keeps_minimum, found in ((True, 0), (False, 10)):
        manager = make_manager(windowed, num_grains=2, commit_min_snapshot=keeps_minimum)
        run_prompt(manager, TEXT[:20]).close()
        assert manager.probe_reuse(None, TEXT[:11]) == found
        manager.shutdown()


def test_the_hit_is_what_every_group_can_serve() -> None:
    """Full attention serves 16 tokens, snapshots are at 8 and 16, but the window lost its last block."""
    layers = [attention(), attention(window=5, layer=1), ssm()]
    manager = make_manager(layers, num_grains=6, num_states=4, commit_min_snapshot=True)
    run_prompt(manager, TEXT[:16], commit_at=(8, 16)).close()
    assert manager.probe_reuse(None, TEXT[:20]) == 16
    windowed = [
        page
        for block in manager.tree.blocks()
        for page in block.pages()
        if page.life_cycle == 1 and len(list(block.iter_children())) == 0
    ]
    manager.storage.withdraw(windowed[0])
    cache = manager.create_kv_cache(input_tokens=TEXT[:20])
    assert cache.num_committed_tokens == 8
    assert cache.num_matched_tokens_before_pruning == 16
    assert cache.num_matched_tokens_before_ssm_pruning == 8
    cache.close()
    manager.check_integrity()
    manager.shutdown()


def test_reuse_scopes_do_not_see_each_other() -> None:
    manager = make_manager(FULL)
    cache = manager.create_kv_cache("adapter", TEXT[:8])
    assert cache.resume() and cache.resize(8)
    cache.commit(TEXT[:8])
    cache.close()
    assert manager.probe_reuse("adapter", TEXT[:9]) == 8
    assert manager.probe_reuse(None, TEXT[:9]) == 0
    manager.shutdown()


def test_reused_pages_are_shared_and_a_partial_block_is_copied() -> None:
    manager = make_manager(FULL)
    first = run_prompt(manager, TEXT[:12])
    view = pages_view(manager)
    old = list(first.get_base_page_indices(LayerGroupId(0)))
    view[old] = view.new_tensor([1, 2, 3])
    second = manager.create_kv_cache(input_tokens=[*TEXT[:10], 7, 8, 9])
    assert second.num_committed_tokens == 10
    assert second.resume()
    new = list(second.get_base_page_indices(LayerGroupId(0)))
    assert new[:2] == old[:2] and new[2] not in old
    assert view[new].tolist() == [1, 2, 3]
    view[new[2]] = 4
    assert view[old[2]] == 3
    first.close()
    second.close()
    manager.check_integrity()
    manager.shutdown()


def test_a_shared_snapshot_is_untouched_by_its_users() -> None:
    manager = make_manager(HYBRID, num_grains=4, num_states=4)
    group = LayerGroupId(1)
    first = run_prompt(manager, TEXT[:8], commit_at=())
    view = pages_view(manager, 1)
    view[first.get_ssm_block_base_index(group)] = 80
    assert first.resize(9)
    first.commit([TEXT[8]])
    view[first.get_ssm_block_base_index(group)] = 90
    for _ in range(2):
        user = manager.create_kv_cache(input_tokens=TEXT[:30])
        assert user.num_committed_tokens == 9 and user.resume()
        own = user.get_ssm_block_base_index(group)
        assert own != first.get_ssm_block_base_index(group) and view[own] == 80
        view[own] = 111
        user.close()
    first.close()
    manager.check_integrity()
    manager.shutdown()


def test_equal_blocks_are_stored_once() -> None:
    manager = make_manager(FULL)
    first = run_prompt(manager, TEXT[:8])
    second = manager.create_kv_cache()
    assert second.resume() and second.resize(9)
    second.commit(TEXT[:8])
    assert list(second.get_base_page_indices(LayerGroupId(0)))[:2] == list(
        first.get_base_page_indices(LayerGroupId(0))
    )
    assert slots(manager)[0][0] == 16 - 3
    first.close()
    second.close()
    manager.check_integrity()
    manager.shutdown()


def test_two_requests_at_the_same_partial_block_keep_their_own_tails() -> None:
    manager = make_manager(HYBRID, num_grains=4, num_states=6)
    caches = [run_prompt(manager, TEXT[:6]) for _ in range(2)]
    tails = [cache.get_base_page_indices(LayerGroupId(0))[1] for cache in caches]
    assert tails[0] != tails[1]
    for cache, suffix in zip(caches, ([1, 2], [3, 4]), strict=True):
        assert cache.resize(8)
        cache.commit(suffix)
        manager.check_integrity()
    for suffix in ([1, 2, 0], [3, 4, 0]):
        assert manager.probe_reuse(None, [*TEXT[:6], *suffix]) == 8
    for cache in caches:
        cache.close()
    manager.shutdown()


def test_priority_callback_ranks_each_block_and_is_checked_before_anything_changes() -> None:
    manager = make_manager(FULL)
    asked: list[tuple[int, LifeCycle]] = []

    def rank(ordinal: int, value: LifeCycle) -> Priority:
        asked.append((ordinal, value))
        return Priority(10 if len(asked) <= 2 else 1000)

    cache = manager.create_kv_cache(custom_priority_callback=rank)
    assert cache.resume() and cache.resize(16)
    cache.commit(TEXT[:8])
    assert [ordinal for ordinal, _ in asked] == [0, 1]
    with pytest.raises(MisuseError, match="1000"):
        cache.commit(TEXT[8:16])
    assert cache.num_committed_tokens == 8
    cache.close()
    assert manager.probe_reuse(None, TEXT[:20]) == 8
    manager.shutdown()


@pytest.mark.parametrize("tokens", [[-1, 2], [2**32], ["a"], [1.5]])
def test_what_is_no_token_id_is_refused(tokens: list[int]) -> None:
    manager = make_manager(FULL)
    with pytest.raises(MisuseError, match="token ids"):
        manager.create_kv_cache(input_tokens=tokens)
    cache = manager.create_kv_cache()
    assert cache.resume() and cache.resize(8)
    with pytest.raises(MisuseError, match="token ids"):
        cache.commit(tokens)
    assert cache.num_committed_tokens == 0
    cache.close()
    manager.shutdown()


def test_a_drop_plan_forgets_what_one_request_offered() -> None:
    manager = make_manager(HYBRID, num_grains=4, num_states=4)
    run_prompt(manager, TEXT[:8]).close()
    longer = run_prompt(manager, TEXT[:16])
    plan = longer.plan_committed_block_drop()
    longer.close()
    assert manager.probe_reuse(None, TEXT[:20]) == 16
    assert plan.num_droppable == 3
    assert [plan.drop(), plan.drop()] == [3, 0]
    assert manager.probe_reuse(None, TEXT[:20]) == 8
    manager.check_integrity()
    manager.shutdown()


def test_cleared_prefixes_are_gone_and_their_slots_free() -> None:
    manager: KVCacheManager = make_manager(HYBRID, num_grains=4)
    run_prompt(manager, TEXT[:16]).close()
    manager.clear_reusable_blocks()
    assert manager.probe_reuse(None, TEXT[:20]) == 0
    assert all(free == total for free, _, total in slots(manager))
    manager.shutdown()
