"""Pipelines: stages on ranks, micro-batches through them and back, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from traceloom.chakra.generate.program import Generated, RankProgram

Step = tuple[Literal["forward", "backward"], int]
SCHEDULES = ("1f1b", "gpipe")
_FORWARD_US, _BACKWARD_US = 100, 200  # of a micro-batch on a stage


@dataclass(frozen=True)
class PipelineOptions:
    """What to generate.

    Attributes:
        ranks: Stages, one per rank, >= 2.
        micro_batches: How many go through.
        schedule: `1f1b` (one forward, one backward) or `gpipe` (all forward, then all backward).
        size: Bytes of the activations between stages, and of their gradients.
    """

    ranks: int = 4
    micro_batches: int = 8
    schedule: str = "1f1b"
    size: int = 1 << 20


def schedule_of(schedule: str, stage: int, stages: int, micro_batches: int) -> Iterator[Step]:
    """What a stage does, one thing after the other."""
    ahead = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    for number in range(ahead):
        yield "forward", number
    for number in range(ahead, micro_batches):
        yield "forward", number
        yield "backward", number - ahead
    for number in range(micro_batches - ahead, micro_batches):
        yield "backward", number


def pipeline(options: PipelineOptions) -> Generated:
    """A training step of a pipeline; of a micro-batch a stage takes 100 µs forward and 200 µs backward.

    Known, for messages that take no time: `step_us` = (micro-batches + stages - 1) x (forward + backward), of which
    (stages - 1) x (forward + backward) are bubble on every stage; and `activations`, the micro-batches that a stage
    holds at most.
    """
    programs = [RankProgram(rank) for rank in range(options.ranks)]
    activations = []
    for program in programs:
        previous, following = program.rank - 1, program.rank + 1
        held = most = 0
        last: list[int] = []
        got: dict[str, list[int]] = {"forward": [], "backward": []}
        for direction, number in schedule_of(options.schedule, program.rank, options.ranks, options.micro_batches):
            forward = direction == "forward"
            source, to = (previous, following) if forward else (following, previous)
            us = _FORWARD_US if forward else _BACKWARD_US
            tag = 2 * number + (not forward)
            after = list(last)
            if 0 <= source < options.ranks:
                got[direction] = [program.receive(source, options.size, got[direction], tag=tag)]
                after += got[direction]
            last = [program.compute(f"{direction} {number}", after, us=us)]
            if 0 <= to < options.ranks:
                program.send(to, options.size, last, tag=tag)
            held += 1 if forward else -1
            most = max(most, held)
        activations.append(most)
    both = _FORWARD_US + _BACKWARD_US
    totals = {
        "step_us": (options.micro_batches + options.ranks - 1) * both,
        "bubble_us": (options.ranks - 1) * both,
        "compute_us": [program.compute_us() for program in programs],
        "sent_bytes": [program.sent()[1] for program in programs],
        "activations": activations,
    }
    return Generated("pipeline", asdict(options), programs, {}, totals)
