"""Who is who in a parallel job: the places of ranks in data x tensor x pipeline (x expert), and their groups."""

from __future__ import annotations

from dataclasses import dataclass

TENSOR, DATA, PIPELINE, EXPERT = "tensor", "data", "pipeline", "expert"
ROLES = (TENSOR, DATA, PIPELINE, EXPERT)
# What such groups are called by whoever makes them.
DESCRIPTIONS = {
    TENSOR: "TENSOR_MODEL_PARALLEL_GROUP",
    DATA: "DATA_PARALLEL_GROUP",
    PIPELINE: "PIPELINE_MODEL_PARALLEL_GROUP",
    EXPERT: "EXPERT_MODEL_PARALLEL_GROUP",
}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group.

    Attributes:
        name: The number that PyTorch gives it: groups are counted as they are made, on all ranks alike.
        role: One of ROLES; "" for the group of all ranks.
        ranks: Its members, ascending.
    """

    name: str
    role: str
    ranks: tuple[int, ...]

    @property
    def description(self) -> str:
        """As PyTorch shows it."""
        return DESCRIPTIONS.get(self.role, "default_pg")


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of the ranks: tensor fastest, then data, then pipeline; experts are spread over the data ranks.

    Attributes:
        data: Copies of the model.
        tensor: Ranks that share each layer.
        pipeline: Stages.
        expert: Ranks that share the experts of a layer; divides `data`.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline, self.expert) < 1 or self.data % self.expert:
            raise ValueError(
                f"expected sizes from 1 and experts that divide the data ranks, got {self}"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.data * self.tensor * self.pipeline

    def rank(self, data: int, tensor: int, pipeline: int) -> int:
        """The rank at a place."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def place(self, rank: int) -> tuple[int, int, int]:
        """The place of a rank: data, tensor, pipeline."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return data, tensor, pipeline

    def groups(self) -> list[Group]:
        """All groups of the job that have more than one member, the group of all ranks first."""
        members: list[tuple[str, tuple[int, ...]]] = [("", tuple(range(self.world_size)))]
        for role in ROLES:
            memberships = {self.members(rank, role) for rank in range(self.world_size)}
            members += [(role, ranks) for ranks in sorted(memberships) if len(ranks) > 1]
        return [Group(str(number), role, ranks) for number, (role, ranks) in enumerate(members)]

    def members(self, rank: int, role: str) -> tuple[int, ...]:
        """Who is in a rank's group of a role."""
        data, tensor, pipeline = self.place(rank)
        if role == TENSOR:
            return tuple(self.rank(data, other, pipeline) for other in range(self.tensor))
        if role == DATA:
            return tuple(self.rank(other, tensor, pipeline) for other in range(self.data))
        if role == PIPELINE:
            return tuple(self.rank(data, tensor, other) for other in range(self.pipeline))
        first = data - data % self.expert
        return tuple(self.rank(first + other, tensor, pipeline) for other in range(self.expert))
