"""Generation of small workloads with known totals: collectives, pipelines, transformers.

A transformer step has, for each layer, attention and MLP, forward and backward, with the FLOPs of
their matrix products and a tensor-parallel all-reduce after each; activations between pipeline
stages; all-reduces of the gradients over data-parallel ranks, layer by layer during the last
backward; and an optimizer step. Embeddings and the head are not included.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from traceloom.errors import UsageError
from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.formats.chakra.nodes import (
    SIMULATOR_SCHEMA,
    Pairs,
    SimulatorNodes,
    build_metadata,
    write_simulator_nodes,
)
from traceloom.workload import collective_algorithms
from traceloom.workload.collective_algorithms import Schedule

SCHEMA, VERSION = "traceloom-generated", 1


class RankProgram:
    """The nodes of one rank in the order in which they are added; ids count from 1.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._nodes: list[dict[str, Any]] = []
        self._awaited: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def compute(
        self,
        name: str,
        after: Sequence[int] = (),
        *,
        us: int,
        operations: int | None = None,
        size: int | None = None,
    ) -> int:
        """Adds GPU work of `us` microseconds, with its FLOPs and the bytes it moves in memory."""
        return self._add(
            name, NodeType.COMP_NODE, after, duration_us=us, num_ops=operations, tensor_size=size
        )

    def collective(
        self,
        kind: str,
        size: int,
        after: Sequence[int] = (),
        *,
        group: str | None = None,
        name: str = "",
    ) -> int:
        """Adds a collective (`ALL_REDUCE`) of `size` bytes, defined like comm_size; `group` None
        means all ranks.
        """
        return self._add(
            name or kind.lower(),
            NodeType.COMM_COLL_NODE,
            after,
            comm_type=int(CollectiveCommType.Value(kind)),
            comm_size=size,
            pg_name=group,
        )

    def send(
        self, to: int, size: int, after: Sequence[int] = (), *, tag: int, name: str = ""
    ) -> int:
        label = name or f"send to {to}"
        endpoints = {"comm_src": self.rank, "comm_dst": to}
        return self._add(
            label, NodeType.COMM_SEND_NODE, after, comm_size=size, comm_tag=tag, **endpoints
        )

    def receive(
        self, source: int, size: int, after: Sequence[int] = (), *, tag: int, name: str = ""
    ) -> int:
        label = name or f"receive from {source}"
        endpoints = {"comm_src": source, "comm_dst": self.rank}
        return self._add(
            label, NodeType.COMM_RECV_NODE, after, comm_size=size, comm_tag=tag, **endpoints
        )

    def _add(self, name: str, kind: int, after: Sequence[int], **attributes: Any) -> int:
        number = len(self._nodes) + 1
        self._nodes.append(
            {
                "id": number,
                "name": name,
                "type": int(kind),
                "duration_us": 0,
                "is_cpu_op": False,
                **attributes,
            }
        )
        self._awaited.append(sorted(set(after)))
        return number

    def sent(self) -> tuple[int, int]:
        """Returns the number of messages that the rank sends, and their bytes."""
        sizes = [
            node["comm_size"] for node in self._nodes if node["type"] == NodeType.COMM_SEND_NODE
        ]
        return len(sizes), sum(sizes)

    def collective_bytes(self) -> dict[str, int]:
        """Returns the sum of comm_size by kind of collective."""
        totals: dict[str, int] = {}
        for node in self._nodes:
            if node["type"] == NodeType.COMM_COLL_NODE:
                kind = CollectiveCommType.Name(node["comm_type"]).lower()
                totals[kind] = totals.get(kind, 0) + node["comm_size"]
        return totals

    def compute_us(self) -> int:
        return sum(node["duration_us"] for node in self._nodes)

    def operations(self) -> int:
        return sum(node.get("num_ops") or 0 for node in self._nodes)

    def plain(self) -> SimulatorNodes:
        """Returns the columns of the rank's file."""
        row = np.repeat(np.arange(len(self._nodes)), [len(awaited) for awaited in self._awaited])
        ids = np.array([number for awaited in self._awaited for number in awaited], dtype=np.int64)
        return SimulatorNodes(
            pl.DataFrame(self._nodes, schema=SIMULATOR_SCHEMA), Pairs(row.astype(np.int64), ids)
        )


@dataclass(frozen=True)
class Generated:
    """A generated workload with known totals.

    Attributes:
        kind: The kind of workload.
        options: The options it was generated with.
        programs: The ranks' programs, from rank 0.
        groups: Members of the groups other than that of all ranks.
        totals: Known totals by name, with units in the names.
    """

    kind: str
    options: Mapping[str, Any]
    programs: Sequence[RankProgram]
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the description that `traceloom generate --json` prints and the files' metadata
        contain.
        """
        return {
            "format": SCHEMA,
            "version": VERSION,
            "kind": self.kind,
            "options": dict(self.options),
            "ranks": len(self.programs),
            "nodes": [len(program) for program in self.programs],
            "groups": {name: list(members) for name, members in self.groups.items()},
            "totals": dict(self.totals),
        }


KINDS = tuple(sorted(name.lower() for name in CollectiveCommType.keys()))  # noqa: SIM118  (not a dict)
ALGORITHMS = ("one-node", *collective_algorithms.ALGORITHMS)
_HOST_RANKS = 8  # ranks per host for two-level


@dataclass(frozen=True)
class CollectiveOptions:
    """Options of `generate_collectives`.

    Attributes:
        collective: One of `KINDS`.
        ranks: Number of participating ranks, >= 2.
        size: Bytes, defined like comm_size: one rank's part for all_gather, else the full buffer of
            a rank.
        algorithm: `one-node` per rank, or an algorithm as sends and receives; two-level has 8 ranks
            per host.
        compute_us: Computation before the collective, and for each reduction of an algorithm; 0 for
            none.
    """

    collective: str = "all_reduce"
    ranks: int = 8
    size: int = 1 << 20
    algorithm: str = "one-node"
    compute_us: int = 0


def generate_collectives(options: CollectiveOptions) -> Generated:
    """Returns a workload of one collective.

    Known totals: with an algorithm, `sent_bytes` per rank and `messages` of all ranks; else
    `comm_bytes` per rank, its comm_size.

    Raises:
        UsageError: slugs `cannot-generate`: the algorithm does not support the collective, or the
            size has too few bytes for parts; `no-such-schedule`: not with this number of ranks.
    """
    programs = [RankProgram(rank) for rank in range(options.ranks)]
    one_node = options.algorithm == "one-node"
    kinds = () if one_node else collective_algorithms.KINDS_BY_ALGORITHM[options.algorithm]
    if not one_node and options.collective not in kinds:
        raise UsageError(
            f"there is no {options.algorithm} algorithm for {options.collective}",
            slug="cannot-generate",
            hint=f"it does {', '.join(sorted(kinds))}",
        )
    if options.size < options.ranks and options.collective != "barrier":
        raise UsageError(
            f"{options.size} bytes are fewer than one for each of the {options.ranks} ranks",
            slug="cannot-generate",
            hint="give more bytes",
        )
    size = 0 if options.collective == "barrier" else options.size
    schedule = (
        None
        if one_node
        else collective_algorithms.build_schedule(
            options.collective, options.algorithm, options.ranks, options.size, local=_HOST_RANKS
        )
    )
    for program in programs:
        before = [program.compute("compute", us=options.compute_us)] if options.compute_us else []
        if schedule is None:
            program.collective(options.collective.upper(), size, before)
    totals: dict[str, object]
    if schedule is None:
        totals = {"comm_bytes": [size] * options.ranks}
    else:
        _write(programs, schedule, options)
        sent = [program.sent() for program in programs]
        totals = {
            "sent_bytes": [sent_size for _, sent_size in sent],
            "messages": sum(count for count, _ in sent),
        }
    return Generated("collective", asdict(options), programs, {}, totals)


def _write(programs: Sequence[RankProgram], schedule: Schedule, options: CollectiveOptions) -> None:
    """Adds the messages of a schedule; they start after each rank's computation, and end in one
    node.

    A message waits for the node with the newest data of its sender and for the sender's previous
    message, so that they stay in order; messages of one round do not wait for each other.
    """
    newest = [[len(program)] if len(program) else [] for program in programs]
    before = [list(nodes) for nodes in newest]  # additional dependencies of the next send
    unawaited: list[list[int]] = [[] for _ in programs]  # sends that nothing waits for yet
    for tag, part in enumerate(schedule.rounds):
        messages = list(
            zip(
                *(c.tolist() for c in (part.source, part.target, part.bytes, part.reduced)),
                strict=True,
            )
        )
        sent: dict[int, list[int]] = defaultdict(list)
        received: dict[int, list[int]] = defaultdict(list)
        reductions = Counter[int]()
        for source, target, size, _ in messages:
            after = [*newest[source], *before[source]]
            sent[source].append(programs[source].send(target, size, after, tag=tag))
        for source, target, size, reduced in messages:
            received[target].append(programs[target].receive(source, size, newest[target], tag=tag))
            reductions[target] += reduced > 0
        for rank, nodes in sent.items():
            unawaited[rank] = [
                *(node for node in unawaited[rank] if node not in before[rank]),
                *nodes,
            ]
            before[rank] = nodes if len(nodes) == 1 else []
        for rank, nodes in received.items():
            newest[rank] = nodes
            if reductions[rank] and options.compute_us:
                us = options.compute_us * reductions[rank]
                newest[rank] = [programs[rank].compute("reduce", nodes, us=us)]
    for program, last, nodes in zip(programs, newest, unawaited, strict=True):
        program.compute(f"end of {options.collective}", [*last, *nodes], us=0)


Step = tuple[Literal["forward", "backward"], int]
SCHEDULES = ("1f1b", "gpipe")
_FORWARD_US, _BACKWARD_US = 100, 200  # per micro-batch and stage


@dataclass(frozen=True)
class PipelineOptions:
    """Options of `generate_pipeline`.

    Attributes:
        ranks: Stages, one per rank, >= 2.
        micro_batches: Number of micro-batches.
        schedule: `1f1b` (one forward, one backward) or `gpipe` (all forward, then all backward).
        size: Bytes of the activations between stages, and of their gradients.
    """

    ranks: int = 4
    micro_batches: int = 8
    schedule: str = "1f1b"
    size: int = 1 << 20


def build_stage_schedule(
    schedule: str, stage: int, stages: int, micro_batches: int
) -> Iterator[Step]:
    ahead = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    yield from (("forward", number) for number in range(ahead))
    for number in range(ahead, micro_batches):
        yield "forward", number
        yield "backward", number - ahead
    yield from (("backward", number) for number in range(micro_batches - ahead, micro_batches))


def generate_pipeline(options: PipelineOptions) -> Generated:
    """Returns a training step of a pipeline; a stage takes 100 µs forward and 200 µs backward per
    micro-batch.

    Known totals, if messages take no time: `step_us` = (micro-batches + stages - 1) x (forward +
    backward), of which (stages - 1) x (forward + backward) are bubble on every stage; and
    `activations`, the max number of micro-batches that a stage holds.
    """
    programs = [RankProgram(rank) for rank in range(options.ranks)]
    activations = []
    for program in programs:
        previous, following = program.rank - 1, program.rank + 1
        active = max_active = 0
        last: list[int] = []
        received: dict[str, list[int]] = {"forward": [], "backward": []}
        for direction, number in build_stage_schedule(
            options.schedule, program.rank, options.ranks, options.micro_batches
        ):
            forward = direction == "forward"
            source, to = (previous, following) if forward else (following, previous)
            us = _FORWARD_US if forward else _BACKWARD_US
            tag = 2 * number + (not forward)
            after = list(last)
            if 0 <= source < options.ranks:
                received[direction] = [
                    program.receive(source, options.size, received[direction], tag=tag)
                ]
                after += received[direction]
            last = [program.compute(f"{direction} {number}", after, us=us)]
            if 0 <= to < options.ranks:
                program.send(to, options.size, last, tag=tag)
            active += 1 if forward else -1
            max_active = max(max_active, active)
        activations.append(max_active)
    both = _FORWARD_US + _BACKWARD_US
    totals = {
        "step_us": (options.micro_batches + options.ranks - 1) * both,
        "bubble_us": (options.ranks - 1) * both,
        "compute_us": [program.compute_us() for program in programs],
        "sent_bytes": [program.sent()[1] for program in programs],
        "activations": activations,
    }
    return Generated("pipeline", asdict(options), programs, {}, totals)


_ADAM_OPERATIONS, _ADAM_BYTES = (
    12,
    24,
)  # per parameter: moments and update; read and written in 4 bytes each
_ACTIVATIONS, _OPTIMIZER_BYTES = 17, 12
_TOKENS = 1024  # of a micro-batch, which is one sample
_ELEMENT_BYTES = 2  # of an activation, weight or gradient
_WEIGHTS = {"attention": 4, "mlp": 8}  # x hidden^2


@dataclass(frozen=True)
class TransformerOptions:
    """Options of `generate_transformer`.

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
    """The position of a rank: tensor-parallel ranks are adjacent, then data-parallel ones, then
    stages.
    """

    tensor: int
    data: int
    stage: int

    def rank(self, options: TransformerOptions) -> int:
        return (
            self.stage * options.data_parallel + self.data
        ) * options.tensor_parallel + self.tensor


def generate_transformer(options: TransformerOptions) -> Generated:
    """Returns one training step of a transformer.

    Known totals: `operations` and `compute_us` of every rank, `collective_bytes` (sum of comm_size
    by kind), `sent_bytes`.

    Raises:
        UsageError: `cannot-generate`: layers or width are not divisible.
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
    # Groups of one rank do not communicate; the group of all ranks has no name.
    members_by_key: dict[tuple[str, int, int], list[int]] = {}
    for position in positions:
        members_by_key.setdefault(("tensor", position.data, position.stage), []).append(
            position.rank(options)
        )
        members_by_key.setdefault(("data", position.tensor, position.stage), []).append(
            position.rank(options)
        )
    names: dict[tuple[int, ...], str | None] = {}
    for members in members_by_key.values():
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


def estimate_memory(options: TransformerOptions) -> int:
    """Returns the peak bytes of the rank that needs most memory, without libraries and
    fragmentation.

    Counts one element each for weights and gradients; 12 bytes per parameter for the optimizer (a
    copy of the weight and two moments, 4 bytes each); and the activations of the micro-batches in
    flight, 17 times tokens x width elements per layer, shared by the tensor-parallel ranks
    (attention scores are recomputed).

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models"
    (2022), equation 2 without the term of the scores, with sequence parallelism.
    """
    layers = options.layers // options.pipeline_parallel
    weights = sum(_WEIGHTS.values()) * options.hidden**2 * layers // options.tensor_parallel
    layer_bytes = (
        _ACTIVATIONS * _TOKENS * options.hidden * _ELEMENT_BYTES // options.tensor_parallel
    )
    ahead = (
        min(options.pipeline_parallel, options.micro_batches)
        if options.schedule == "1f1b"
        else options.micro_batches
    )
    return weights * (2 * _ELEMENT_BYTES + _OPTIMIZER_BYTES) + ahead * layers * layer_bytes


class _RankProgram:
    def __init__(
        self,
        program: RankProgram,
        position: _Position,
        options: TransformerOptions,
        names: dict[tuple[int, ...], str | None],
    ) -> None:
        self.program, self.position, self.options = program, position, options
        tensor = [
            _Position(k, position.data, position.stage).rank(options)
            for k in range(options.tensor_parallel)
        ]
        data = [
            _Position(position.tensor, k, position.stage).rank(options)
            for k in range(options.data_parallel)
        ]
        self.tensor_group, self.data_group = names.get(tuple(tensor)), names.get(tuple(data))
        self.activation = _TOKENS * options.hidden * _ELEMENT_BYTES
        self.own_layers = options.layers // options.pipeline_parallel
        self.last: list[int] = []  # the compute or collective node that the next one depends on
        self.gradients: list[int] = []

    def write(self) -> None:
        options, received = self.options, dict[str, list[int]]()
        steps = list(
            build_stage_schedule(
                options.schedule,
                self.position.stage,
                options.pipeline_parallel,
                options.micro_batches,
            )
        )
        for step_index, (direction, number) in enumerate(steps):
            forward = direction == "forward"
            tag = 2 * number + (not forward)
            source, to = self.neighbour(-1 if forward else 1), self.neighbour(1 if forward else -1)
            if source is not None:
                received[direction] = [
                    self.program.receive(
                        source, self.activation, received.get(direction, []), tag=tag
                    )
                ]
                self.last = [*self.last, *received[direction]]
            self.layers(number, forward=forward, final=step_index == len(steps) - 1)
            if to is not None:
                self.program.send(to, self.activation, self.last, tag=tag)
        weights = (
            sum(_WEIGHTS.values()) * options.hidden**2 * self.own_layers // options.tensor_parallel
        )
        operations, size = _ADAM_OPERATIONS * weights, _ADAM_BYTES * weights
        self.program.compute(
            "optimizer",
            [*self.last, *self.gradients],
            us=self.us(operations, size),
            operations=operations,
            size=size,
        )

    def neighbour(self, step: int) -> int | None:
        stage = self.position.stage + step
        return (
            _Position(self.position.tensor, self.position.data, stage).rank(self.options)
            if 0 <= stage < self.options.pipeline_parallel
            else None
        )

    def layers(self, number: int, *, forward: bool, final: bool) -> None:
        options, program = self.options, self.program
        first = self.position.stage * self.own_layers
        layers = range(first, first + self.own_layers)
        for layer in layers if forward else reversed(layers):
            for part in ("attention", "mlp") if forward else ("mlp", "attention"):
                # Matrix products: 2 FLOPs per weight and token, twice that backward; attention adds
                # its scores.
                name = f"layer {layer} {part} {'forward' if forward else 'backward'} {number}"
                weights = _WEIGHTS[part] * options.hidden**2
                operations = 2 * weights * _TOKENS
                if part == "attention":
                    operations += 4 * options.hidden * _TOKENS**2
                operations = operations * (1 if forward else 2) // options.tensor_parallel
                size = weights * _ELEMENT_BYTES // options.tensor_parallel + 2 * self.activation
                us = self.us(operations, size)
                self.last = [
                    program.compute(name, self.last, us=us, operations=operations, size=size)
                ]
                if options.tensor_parallel > 1:
                    name, group = f"{name} all-reduce", self.tensor_group
                    self.last = [
                        program.collective(
                            "ALL_REDUCE", self.activation, self.last, group=group, name=name
                        )
                    ]
            if final and options.data_parallel > 1:
                size = (
                    sum(_WEIGHTS.values())
                    * options.hidden**2
                    // options.tensor_parallel
                    * _ELEMENT_BYTES
                )
                after, name = [*self.last, *self.gradients[-1:]], f"layer {layer} gradients"
                self.gradients.append(
                    program.collective("ALL_REDUCE", size, after, group=self.data_group, name=name)
                )

    def us(self, operations: int, size: int) -> int:
        """Returns the roofline time in µs: the longer of computation and memory traffic, at least
        1.
        """
        return max(
            1,
            round(operations / (self.options.tflops * 1e6)),
            round(size / (self.options.memory_gbps * 1e3)),
        )


STAGE = "pre-transformed"  # the workload as specified, neither compiled nor run


def write_generated(
    generated: Generated, directory: str | Path, *, force: bool = False
) -> list[Path]:
    """Write `workload.<rank>.et` and the group file; the metadata of every file describes the whole
    workload.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    description = json.dumps(generated.to_dict())
    ranks = [
        (
            build_metadata(SCHEMA, {"rank": p.rank, "stage": STAGE, "generated": description}),
            p.plain(),
        )
        for p in generated.programs
    ]
    return write_simulator_nodes(Path(directory), ranks, generated.groups, force=force)
