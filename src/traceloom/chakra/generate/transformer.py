"""A training step of a transformer with data, tensor and pipeline parallelism.

Of each layer: attention and MLP, in forward and backward, with the operations of their matrix products, and the
all-reduces of tensor parallelism behind each; activations between pipeline stages; all-reduces of the gradients over
data parallel ranks, layer by layer beside the last backward; an optimizer step. Embeddings and the head are not in it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from traceloom.chakra.generate.pipeline import schedule_of
from traceloom.chakra.generate.program import Generated, RankProgram
from traceloom.errors import UsageError

_ADAM_OPERATIONS, _ADAM_BYTES = 12, 24  # per parameter: moments and update; read and written in 4 bytes each
_ACTIVATIONS, _OPTIMIZER_BYTES = 17, 12
_TOKENS = 1024  # of a micro-batch, which is one sample
_ELEMENT_BYTES = 2  # of an activation, weight or gradient
_WEIGHTS = {"attention": 4, "mlp": 8}  # x hidden^2


@dataclass(frozen=True)
class TransformerOptions:
    """What to generate.

    Attributes:
        data_parallel: Copies of the model.
        tensor_parallel: Ranks that share every layer.
        pipeline_parallel: Stages; divides the layers.
        layers: Layers of the model.
        hidden: Width of the model; the MLP is four times as wide.
        micro_batches: Micro-batches of a step, per copy of the model: samples of 1024 tokens.
        schedule: `1f1b` or `gpipe`.
        tflops: Operations per second that a rank reaches, in 10^12.
        memory_gbps: Bytes per second of its memory, in 10^9.
    """

    data_parallel: int = 2
    tensor_parallel: int = 2
    pipeline_parallel: int = 2
    layers: int = 4
    hidden: int = 1024
    micro_batches: int = 4
    schedule: str = "1f1b"
    tflops: float = 300.0
    memory_gbps: float = 2000.0


@dataclass(frozen=True)
class _Position:
    """Where a rank stands: tensor parallel ranks are neighbours, then data parallel ones, then stages."""

    tensor: int
    data: int
    stage: int

    def rank(self, options: TransformerOptions) -> int:
        return (self.stage * options.data_parallel + self.data) * options.tensor_parallel + self.tensor


def transformer(options: TransformerOptions) -> Generated:
    """One training step.

    Known: `operations` and `compute_us` of every rank, `collective_bytes` (sum of comm_size by kind), `sent_bytes`.

    Raises:
        UsageError: `cannot-generate`: layers or width do not divide.
    """
    if options.layers % options.pipeline_parallel or options.hidden % options.tensor_parallel:
        raise UsageError(
            f"{options.layers} layers and a width of {options.hidden} cannot be shared by "
            f"{options.pipeline_parallel} stages and {options.tensor_parallel} tensor parallel ranks",
            slug="cannot-generate",
            hint="choose numbers that divide",
        )
    positions = [
        _Position(tensor, data, stage)
        for stage in range(options.pipeline_parallel)
        for data in range(options.data_parallel)
        for tensor in range(options.tensor_parallel)
    ]
    # Groups of one need no communication; a group of all ranks has no name.
    by_key: dict[tuple[str, int, int], list[int]] = {}
    for position in positions:
        by_key.setdefault(("tensor", position.data, position.stage), []).append(position.rank(options))
        by_key.setdefault(("data", position.tensor, position.stage), []).append(position.rank(options))
    names: dict[tuple[int, ...], str | None] = {}
    for members in by_key.values():
        if len(members) > 1 and tuple(members) not in names:
            number = 1 + len([name for name in names.values() if name])
            names[tuple(members)] = None if len(members) == len(positions) else str(number)
    groups = {name: list(members) for members, name in names.items() if name}
    programs = [RankProgram(position.rank(options)) for position in positions]
    for program, position in zip(programs, positions, strict=True):
        _RankProgram(program, position, options, names).write()
    totals = {
        "operations": [program.operations() for program in programs],
        "compute_us": [program.compute_us() for program in programs],
        "collective_bytes": [program.collective_bytes() for program in programs],
        "sent_bytes": [program.sent()[1] for program in programs],
    }
    return Generated("transformer", asdict(options), programs, groups, totals)


def memory_bytes(options: TransformerOptions) -> int:
    """What the rank that needs most memory holds at most, without what libraries and fragments take.

    Weights and gradients of an element each; 12 bytes per parameter of the optimizer (a copy of the weight and two
    moments, 4 bytes each); and the activations of the micro-batches that are on their way at once, of each layer 17
    times tokens x width elements, shared by the tensor parallel ranks (attention scores are worked out again).

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), equation 2
    without the term of the scores, with sequence parallelism.
    """
    layers = options.layers // options.pipeline_parallel
    weights = sum(_WEIGHTS.values()) * options.hidden**2 * layers // options.tensor_parallel
    of_layer = _ACTIVATIONS * _TOKENS * options.hidden * _ELEMENT_BYTES // options.tensor_parallel
    ahead = options.micro_batches
    if options.schedule == "1f1b":
        ahead = min(options.pipeline_parallel, ahead)
    return weights * (2 * _ELEMENT_BYTES + _OPTIMIZER_BYTES) + ahead * layers * of_layer


class _RankProgram:
    """Writes the program of one rank."""

    def __init__(
        self,
        program: RankProgram,
        position: _Position,
        options: TransformerOptions,
        names: dict[tuple[int, ...], str | None],
    ) -> None:
        self.program, self.position, self.options = program, position, options
        tensor = [_Position(k, position.data, position.stage).rank(options) for k in range(options.tensor_parallel)]
        data = [_Position(position.tensor, k, position.stage).rank(options) for k in range(options.data_parallel)]
        self.tensor_group, self.data_group = names.get(tuple(tensor)), names.get(tuple(data))
        self.activation = _TOKENS * options.hidden * _ELEMENT_BYTES
        self.own_layers = options.layers // options.pipeline_parallel
        self.last: list[int] = []  # the compute or collective that the next one waits for
        self.gradients: list[int] = []

    def write(self) -> None:
        """The whole step."""
        options, got = self.options, dict[str, list[int]]()
        steps = list(
            schedule_of(options.schedule, self.position.stage, options.pipeline_parallel, options.micro_batches)
        )
        for turn, (direction, number) in enumerate(steps):
            forward = direction == "forward"
            tag = 2 * number + (not forward)
            source, to = self.neighbour(-1 if forward else 1), self.neighbour(1 if forward else -1)
            if source is not None:
                got[direction] = [self.program.receive(source, self.activation, got.get(direction, []), tag=tag)]
                self.last = [*self.last, *got[direction]]
            self.layers(number, forward=forward, final=turn == len(steps) - 1)
            if to is not None:
                self.program.send(to, self.activation, self.last, tag=tag)
        weights = sum(_WEIGHTS.values()) * options.hidden**2 * self.own_layers // options.tensor_parallel
        operations, size = _ADAM_OPERATIONS * weights, _ADAM_BYTES * weights
        after = [*self.last, *self.gradients]
        self.program.compute("optimizer", after, us=self.us(operations, size), operations=operations, size=size)

    def neighbour(self, step: int) -> int | None:
        stage = self.position.stage + step
        inside = 0 <= stage < self.options.pipeline_parallel
        return _Position(self.position.tensor, self.position.data, stage).rank(self.options) if inside else None

    def layers(self, number: int, *, forward: bool, final: bool) -> None:
        options, program = self.options, self.program
        first = self.position.stage * self.own_layers
        layers = range(first, first + self.own_layers)
        for layer in layers if forward else reversed(layers):
            for part in ("attention", "mlp") if forward else ("mlp", "attention"):
                # Matrix products: 2 operations per weight and token, twice that backward; attention has its scores.
                name = f"layer {layer} {part} {'forward' if forward else 'backward'} {number}"
                weights = _WEIGHTS[part] * options.hidden**2
                operations = 2 * weights * _TOKENS
                if part == "attention":
                    operations += 4 * options.hidden * _TOKENS**2
                operations = operations * (1 if forward else 2) // options.tensor_parallel
                size = weights * _ELEMENT_BYTES // options.tensor_parallel + 2 * self.activation
                us = self.us(operations, size)
                self.last = [program.compute(name, self.last, us=us, operations=operations, size=size)]
                if options.tensor_parallel > 1:
                    name, group = f"{name} all-reduce", self.tensor_group
                    self.last = [program.collective("ALL_REDUCE", self.activation, self.last, group=group, name=name)]
            if final and options.data_parallel > 1:
                size = sum(_WEIGHTS.values()) * options.hidden**2 // options.tensor_parallel * _ELEMENT_BYTES
                after, name = [*self.last, *self.gradients[-1:]], f"layer {layer} gradients"
                node = program.collective("ALL_REDUCE", size, after, group=self.data_group, name=name)
                self.gradients.append(node)

    def us(self, operations: int, size: int) -> int:
        """Roofline: whichever takes longer, operations or bytes; at least 1 µs."""
        return max(1, round(operations / (self.options.tflops * 1e6)), round(size / (self.options.memory_gbps * 1e3)))
