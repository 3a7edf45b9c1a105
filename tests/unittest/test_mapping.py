# SPDX-License-Identifier: Apache-2.0
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm.mapping import Mapping

sizes = st.integers(1, 4)


def world(tp_size: int = 1, pp_size: int = 1, cp_size: int = 1) -> list[Mapping]:
    """The mapping of every rank."""
    world_size = tp_size * pp_size * cp_size
    first = Mapping(world_size=world_size, tp_size=tp_size, pp_size=pp_size, cp_size=cp_size)
    return [replace(first, rank=rank) for rank in range(world_size)]


def test_default_is_one_rank() -> None:
    mapping = Mapping()
    assert (mapping.tp_rank, mapping.pp_rank, mapping.cp_rank) == (0, 0, 0)
    assert (mapping.moe_tp_size, mapping.moe_ep_size) == (1, 1)
    assert mapping.is_first_pp_rank() and mapping.is_last_pp_rank()
    assert not (mapping.has_tp() or mapping.has_pp() or mapping.has_cp() or mapping.has_moe_ep())


def test_ranks_count_tensor_then_context_then_pipeline() -> None:
    assert [(m.tp_rank, m.cp_rank, m.pp_rank) for m in world(tp_size=2, pp_size=2, cp_size=2)] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 1),
        (1, 1, 1),
    ]


def test_groups_of_one_rank() -> None:
    mapping = world(tp_size=2, pp_size=3, cp_size=2)[7]
    assert (mapping.tp_group, mapping.cp_group, mapping.pp_group) == ([6, 7], [5, 7], [3, 7, 11])


@given(sizes, sizes, sizes)
def test_groups_partition_the_world(tp_size: int, pp_size: int, cp_size: int) -> None:
    mappings = world(tp_size, pp_size, cp_size)
    for groups in (
        [m.tp_group for m in mappings],
        [m.cp_group for m in mappings],
        [m.pp_group for m in mappings],
    ):
        for rank, group in enumerate(groups):
            assert rank in group
            assert all(groups[other] == group for other in group)


@given(sizes, sizes, sizes)
def test_neighbours_are_each_others(tp_size: int, pp_size: int, cp_size: int) -> None:
    mappings = world(tp_size, pp_size, cp_size)
    for mapping in mappings:
        following = mappings[mapping.next_pp_rank()]
        assert following.prev_pp_rank() == mapping.rank
        assert following.pp_rank == (mapping.pp_rank + 1) % pp_size
        assert (following.tp_rank, following.cp_rank) == (mapping.tp_rank, mapping.cp_rank)


@given(sizes, st.integers(0, 100))
def test_stages_share_the_layers_in_order(pp_size: int, num_layers: int) -> None:
    shares = [mapping.pp_layers(num_layers) for mapping in world(pp_size=pp_size)]
    assert sum(shares, []) == list(range(num_layers))
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_first_stages_hold_one_layer_more() -> None:
    assert [len(mapping.pp_layers(69)) for mapping in world(pp_size=4)] == [18, 17, 17, 17]


def test_ends_of_the_pipeline() -> None:
    mappings = world(tp_size=2, pp_size=3)
    assert [m.rank for m in mappings if m.is_first_pp_rank()] == [0, 1]
    assert [m.rank for m in mappings if m.is_last_pp_rank()] == [4, 5]


@pytest.mark.parametrize(
    ("moe_tp_size", "moe_ep_size", "resolved"),
    [(None, None, (8, 1)), (None, 4, (2, 4)), (4, None, (4, 2)), (1, 8, (1, 8))],
)
def test_split_of_experts_is_completed(
    moe_tp_size: int | None, moe_ep_size: int | None, resolved: tuple[int, int]
) -> None:
    mapping = Mapping(world_size=8, rank=5, tp_size=8, moe_tp_size=moe_tp_size, moe_ep_size=moe_ep_size)
    assert (mapping.moe_tp_size, mapping.moe_ep_size) == resolved
    assert mapping.moe_tp_rank * mapping.moe_ep_size + mapping.moe_ep_rank == 5


def test_nodes() -> None:
    mapping = Mapping(world_size=16, rank=11, gpus_per_node=4, tp_size=16)
    assert (mapping.node_rank, mapping.local_rank) == (2, 3)


def test_mapping_is_a_value() -> None:
    mapping = Mapping(world_size=2, tp_size=2)
    assert mapping == Mapping(world_size=2, rank=0, tp_size=2)
    assert len({mapping, replace(mapping, rank=1), replace(mapping)}) == 2
    with pytest.raises(FrozenInstanceError):
        mapping.rank = 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 0}, "tp_size is 0; it counts ranks and must be at least 1"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"moe_ep_size": 0}, "moe_ep_size is 0"),
        ({"moe_tp_size": -1}, "moe_tp_size is -1"),
        ({"world_size": 8, "tp_size": 2, "pp_size": 2}, r"world_size is 8, but .* = 4; set it to 4"),
        ({"world_size": 2, "tp_size": 2, "rank": 2}, r"rank is 2; .* must be in 0\.\.1"),
        ({"rank": -1}, "rank is -1"),
        (
            {"world_size": 4, "tp_size": 4, "moe_ep_size": 3},
            "moe_tp_size 1 . moe_ep_size 3 must equal tp_size 4",
        ),
    ],
)
def test_user_mistake_names_argument_and_remedy(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mapping(**arguments)


def test_negative_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers is -1"):
        Mapping().pp_layers(-1)


def test_sizes_are_keywords() -> None:
    with pytest.raises(TypeError):
        Mapping(2, 0, 8, 2)  # type: ignore[misc]
