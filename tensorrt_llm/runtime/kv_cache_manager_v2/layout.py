# SPDX-License-Identifier: Apache-2.0
"""Where each layer's bytes lie: coalesced buffers, pools, pool groups and page index arithmetic. Pure.

Buffers of one life cycle with equal byte size lie side by side in one coalesced buffer, and each coalesced
buffer is a pool::

    slot s of a pool:  | layer 0 key | layer 0 value | layer 1 key | layer 1 value | ...   scale = buffers
    per slot page index of a buffer, counted from the buffer's own base address:  s * scale

Life cycles whose pools have the same slot sizes share a pool group; slot i of a group exists in all of its
pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ._types import LayerId, LifeCycleId, PoolGroupIndex, PoolIndex
from .config import AttentionLayerConfig, LayerConfig
from .errors import MisuseError
from .life_cycle import LifeCycleRegistry
from .scratch import LayerShare, ScratchDesc, largest_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferAttr:
    """Place of one (layer, role) buffer. `offset` and `size` in bytes within a slot of `pool`.

    `scale`: buffers in the coalesced buffer. `expansion`: pages that one block becomes for the kernel.
    """

    life_cycle: LifeCycleId
    pool_group: PoolGroupIndex
    pool: PoolIndex
    offset: int
    size: int
    scale: int
    expansion: int
    run_bytes: int
    """Bytes from this buffer to the end of its layer's adjacent buffers, such as key and value together."""
    num_layer_buffers: int
    """Buffers of the same layer in this pool; they lie side by side."""
    index_in_layer: int

    @property
    def page_stride_bytes(self) -> int:
        return self.size // self.expansion

    @property
    def slot_bytes(self) -> int:
        return self.size * self.scale

    def page_index_upper_bound(self, num_slots: int) -> int:
        """Return the bound on page indices counted from this buffer's own base address.

        The number of slots is ceil(bound / (scale * expansion)).
        """
        return (self.scale * num_slots - self.offset // self.size) * self.expansion


@dataclass(frozen=True, slots=True)
class PageIndexConverter:
    """Turns the slot ids of a block table into page indices of one buffer.

    `layer_offset` is 0 in SHARED mode, where the base address already contains it, and `is_shared` then
    True. `num_layer_buffers` and `index_in_layer`: the buffer's place among those of its layer.
    """

    scale: int
    expansion: int = 1
    layer_offset: int = 0
    is_shared: bool = True
    num_layer_buffers: int = 1
    index_in_layer: int = 0

    def __call__(self, base_page_indices: Sequence[int], scratch: ScratchDesc | None = None) -> list[int]:
        """Return `expansion` page indices per base index; a negative base index gives negative ones.

        `scratch` places the blocks that share slots; each layer has them elsewhere, so one base address for
        all layers cannot reach them and SHARED mode raises MisuseError.
        """
        bases = [base * self.scale + self.layer_offset if base >= 0 else base for base in base_page_indices]
        if scratch is not None:
            if self.is_shared:
                raise MisuseError(
                    "blocks that share slots lie elsewhere for each layer; ask for the converter and the "
                    "base address with index_mode=PageIndexMode.PER_LAYER"
                )
            for position, ordinal in enumerate(scratch.ordinals):
                slot, place = divmod(position * self.num_layer_buffers + self.index_in_layer, self.scale)
                bases[ordinal] = scratch.slots[slot] * self.scale + place
        return [
            base * self.expansion + page if base >= 0 else base
            for base in bases
            for page in range(self.expansion)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolGroupDesc:
    """One pool group: slot bytes of each pool, largest first, and the life cycles it serves."""

    pool_group_index: PoolGroupIndex
    slot_sizes: tuple[int, ...]
    life_cycles: tuple[LifeCycleId, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all pools."""
        return sum(self.slot_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLayout:
    """The whole map: pool groups, the group of each life cycle, the place of each buffer.

    layer_shares: per life cycle, what the largest layer has of a slot in each pool.
    """

    pool_groups: tuple[PoolGroupDesc, ...]
    group_of: tuple[PoolGroupIndex, ...]
    layer_shares: tuple[tuple[LayerShare, ...], ...]
    buffers: dict[tuple[LayerId, str], BufferAttr]

    def buffer(self, layer: LayerId, role: str) -> BufferAttr:
        """Return the place of a buffer; MisuseError for an unknown layer or role."""
        try:
            return self.buffers[layer, role]
        except KeyError:
            roles = sorted(name for owner, name in self.buffers if owner == layer)
            known = f"layer {layer} has {roles}" if roles else f"no layer {layer} is configured"
            raise MisuseError(f"no buffer {role!r} of layer {layer}: {known}") from None


@dataclass(frozen=True, slots=True)
class _Coalesced:
    """Buffers of one byte size: (layer, role, expansion) in order."""

    size: int
    members: tuple[tuple[LayerId, str, int], ...]

    @property
    def slot_bytes(self) -> int:
        return self.size * len(self.members)

    def owners(self) -> list[LayerId]:
        """Return the layer of each buffer."""
        return [layer for layer, _, _ in self.members]

    def run_bytes(self, index: int) -> int:
        layer = self.members[index][0]
        stop = index
        while stop < len(self.members) and self.members[stop][0] == layer:
            stop += 1
        return (stop - index) * self.size


def _expansion(layer: LayerConfig, override: int | None, tokens_per_block: int) -> int:
    if override is None or not isinstance(layer, AttentionLayerConfig):
        return 1
    return tokens_per_block // override


def _coalesce(layers: Sequence[LayerConfig], tokens_per_block: int) -> tuple[_Coalesced, ...]:
    by_size: dict[int, list[tuple[LayerId, str, int]]] = {}
    for layer in layers:
        for buffer in layer.buffers:
            expansion = _expansion(layer, buffer.tokens_per_block_override, tokens_per_block)
            by_size.setdefault(buffer.size, []).append((layer.layer_id, buffer.role, expansion))
    coalesced = [_Coalesced(size, tuple(members)) for size, members in by_size.items()]
    return tuple(sorted(coalesced, key=lambda one: -one.slot_bytes))


def build_layout(
    layers: Sequence[LayerConfig], registry: LifeCycleRegistry, tokens_per_block: int
) -> StorageLayout:
    """Return the layout of `layers`; pool groups are numbered in order of their first life cycle."""
    groups: dict[tuple[int, ...], list[LifeCycleId]] = {}
    pools: list[tuple[_Coalesced, ...]] = []
    for life_cycle, _ in registry.items():
        members = [layer for layer in layers if registry.of_layer(layer.layer_id) == life_cycle]
        pools.append(_coalesce(members, tokens_per_block))
        groups.setdefault(tuple(pool.slot_bytes for pool in pools[-1]), []).append(life_cycle)
    pool_groups = tuple(
        PoolGroupDesc(pool_group_index=PoolGroupIndex(index), slot_sizes=sizes, life_cycles=tuple(owners))
        for index, (sizes, owners) in enumerate(groups.items())
    )
    owner_of = {owner: group.pool_group_index for group in pool_groups for owner in group.life_cycles}
    buffers = {
        (layer, role): BufferAttr(
            life_cycle=life_cycle,
            pool_group=owner_of[life_cycle],
            pool=PoolIndex(pool_index),
            offset=index * pool.size,
            size=pool.size,
            scale=len(pool.members),
            expansion=expansion,
            run_bytes=pool.run_bytes(index),
            num_layer_buffers=pool.owners().count(layer),
            index_in_layer=index - pool.owners().index(layer),
        )
        for life_cycle, _ in registry.items()
        for pool_index, pool in enumerate(pools[life_cycle])
        for index, (layer, role, expansion) in enumerate(pool.members)
    }
    group_of = tuple(owner_of[life_cycle] for life_cycle, _ in registry.items())
    shares = tuple(largest_shares([pool.owners() for pool in coalesced]) for coalesced in pools)
    return StorageLayout(pool_groups=pool_groups, group_of=group_of, layer_shares=shares, buffers=buffers)
