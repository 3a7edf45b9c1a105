# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands among all ranks: tensor, context, pipeline and expert parallelism.

Ranks are numbered with the tensor dimension fastest, then context, then pipeline:
`rank = (pp_rank * cp_size + cp_rank) * tp_size + tp_rank`.
"""

from dataclasses import KW_ONLY, dataclass, fields


@dataclass(frozen=True, slots=True)
class Mapping:
    """The parallel layout seen from one rank; a frozen value with TensorRT-LLM's names.

    `world_size` must be `tp_size * pp_size * cp_size`. Experts are split over the tensor group, `moe_tp_size`
    ways inside an expert and `moe_ep_size` ways between experts; whichever of the two is None follows from
    the other, and both None means `moe_ep_size` 1. Read back, both are ints.

    Raises ValueError, naming argument, value and remedy, for a size below 1, a rank outside the world, or
    sizes that do not multiply up.
    """

    world_size: int = 1
    rank: int = 0
    gpus_per_node: int = 8
    _: KW_ONLY
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    moe_tp_size: int = None  # type: ignore[assignment]  # an int for every reader: filled in below
    moe_ep_size: int = None  # type: ignore[assignment]
    enable_attention_dp: bool = False

    def __post_init__(self) -> None:
        moe_tp_size, moe_ep_size = _split_of_experts(self.tp_size, self.moe_tp_size, self.moe_ep_size)
        # A frozen value has no other way to complete itself; nothing holds a reference to it yet.
        object.__setattr__(self, "moe_tp_size", moe_tp_size)
        object.__setattr__(self, "moe_ep_size", moe_ep_size)
        self._validate()

    def _validate(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_size", "_node")) and value < 1:
                raise ValueError(f"Mapping: {field.name} is {value}; it counts ranks and must be at least 1")
        product = self.tp_size * self.pp_size * self.cp_size
        if self.world_size != product:
            raise ValueError(
                f"Mapping: world_size is {self.world_size}, but tp_size {self.tp_size} * pp_size "
                f"{self.pp_size} * cp_size {self.cp_size} = {product}; set it to {product} or "
                "change the sizes"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"Mapping: rank is {self.rank}; with world_size {self.world_size} it must be in "
                f"0..{self.world_size - 1}"
            )
        if self.moe_tp_size * self.moe_ep_size != self.tp_size:
            raise ValueError(
                f"Mapping: moe_tp_size {self.moe_tp_size} * moe_ep_size {self.moe_ep_size} must equal "
                f"tp_size {self.tp_size}; leave one of them out and it follows from the other"
            )

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp_size % self.cp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_tp_rank(self) -> int:
        """Which part of each of its experts this rank holds."""
        return self.tp_rank // self.moe_ep_size

    @property
    def moe_ep_rank(self) -> int:
        """Which group of experts this rank holds."""
        return self.tp_rank % self.moe_ep_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        """The rank inside its node, which is also the index of its GPU there."""
        return self.rank % self.gpus_per_node

    @property
    def tp_group(self) -> list[int]:
        """Ranks that differ from this one in `tp_rank` alone, itself included, ascending."""
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))

    @property
    def cp_group(self) -> list[int]:
        """Ranks that differ from this one in `cp_rank` alone, itself included, ascending."""
        first = self.rank - self.cp_rank * self.tp_size
        return [first + self.tp_size * i for i in range(self.cp_size)]

    @property
    def pp_group(self) -> list[int]:
        """Ranks that differ from this one in `pp_rank` alone, itself included, ascending."""
        stride = self.tp_size * self.cp_size
        return list(range(self.rank % stride, self.world_size, stride))

    def has_tp(self) -> bool:
        return self.tp_size > 1

    def has_cp(self) -> bool:
        return self.cp_size > 1

    def has_pp(self) -> bool:
        return self.pp_size > 1

    def has_moe_ep(self) -> bool:
        return self.moe_ep_size > 1

    def is_first_pp_rank(self) -> bool:
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def prev_pp_rank(self) -> int:
        """The rank that sends activations to this one; the first stage's predecessor is the last stage."""
        return (self.rank - self.tp_size * self.cp_size) % self.world_size

    def next_pp_rank(self) -> int:
        """The rank that receives this one's activations; the last stage's successor is the first stage."""
        return (self.rank + self.tp_size * self.cp_size) % self.world_size

    def pp_layers(self, num_layers: int) -> list[int]:
        """Global indices of the layers on this rank, of `num_layers` counted from 0.

        Stages hold contiguous ranges; where the layers do not divide evenly the first stages hold one more.
        Empty for the last stages if there are fewer layers than stages.
        """
        if num_layers < 0:
            raise ValueError(f"pp_layers: num_layers is {num_layers}; a model has 0 or more layers")
        share, left_over = divmod(num_layers, self.pp_size)
        start = self.pp_rank * share + min(self.pp_rank, left_over)
        return list(range(start, start + share + (self.pp_rank < left_over)))


def _split_of_experts(tp_size: int, moe_tp_size: int | None, moe_ep_size: int | None) -> tuple[int, int]:
    """Both sizes, the missing ones filled in; a product other than `tp_size` is the caller's to refuse."""
    if moe_ep_size is None:
        moe_ep_size = 1 if moe_tp_size is None else tp_size // max(moe_tp_size, 1)
    if moe_tp_size is None:
        moe_tp_size = tp_size // max(moe_ep_size, 1)
    return moe_tp_size, moe_ep_size
