"""Repeats: stretches that do the same to other registers."""

from __future__ import annotations

import random

from traceloom.workload.replay.folding import FoldedProgram, ProgramLine, find_repeats


def layers(layers: int, batches: int, forward: int = 12, backward: int = 15) -> list[ProgramLine]:
    """A model of equal layers, forward and backward, for some batches."""
    lines: list[ProgramLine] = []
    registers = iter(range(10**6))
    weights = [[next(registers) for _ in range(3)] for _ in range(layers)]
    for _ in range(batches):
        x = next(registers)
        lines.append(ProgramLine(99, (), (x,), len(lines)))
        saved: list[list[int]] = []
        for layer in range(layers):
            saved.append([])
            for k in range(forward):
                y = next(registers)
                lines.append(ProgramLine(k, (x, weights[layer][k % 3]), (y,), len(lines)))
                saved[-1].append(x)
                x = y
        for layer in reversed(range(layers)):
            for k in range(backward):
                y = next(registers)
                lines.append(ProgramLine(100 + k, (x, saved[layer][k % forward]), (y,), len(lines)))
                x = y
    return lines


def unfolded(
    folded: FoldedProgram, body: int = 0, registers: dict[int, int] | None = None
) -> list[tuple[int, ...]]:
    """What the folded program does: each line's number and the registers it reads, numbered by when they are made."""
    out: list[tuple[int, ...]] = []
    made = iter(range(10**6, 2 * 10**6))

    def run(body: int, registers: dict[int, int]) -> None:
        for line in folded.bodies[body]:
            reads = [registers[r] for r in line.reads]
            if line.what >= 0:
                registers.update((r, next(made)) for r in line.writes if r not in line.reads)
                out.append((line.what, *reads, *(registers[r] for r in line.writes)))
            else:
                inner = dict(enumerate(reads))
                run(-1 - line.what, inner)
                first = folded.parameters[-1 - line.what]
                registers.update((r, inner[first + k]) for k, r in enumerate(line.writes))

    run(body, registers if registers is not None else {})
    return out


def as_it_is(lines: list[ProgramLine]) -> FoldedProgram:
    return FoldedProgram([lines], [0])


def outside(lines: list[ProgramLine]) -> dict[int, int]:
    return {r: r for line in lines for r in line.reads}


def test_layers_and_batches_are_blocks() -> None:
    lines = layers(4, 2)
    folded = find_repeats(lines)
    assert sorted(folded.calls()[1:]) == [2, 8, 8]
    assert unfolded(folded, registers=outside(lines)) == unfolded(
        as_it_is(lines), registers=outside(lines)
    )


def test_equal_names_with_other_registers_are_no_repeat() -> None:
    chain = [ProgramLine(k % 8, (k,), (k + 1,), k) for k in range(16)]
    apart = [ProgramLine(k % 8, (0,), (k + 1,), k) for k in range(16)]
    assert len(find_repeats([*chain[:8], *apart[8:]]).bodies) == 1


def test_programs_without_repeats_stay() -> None:
    lines = [ProgramLine(k, (k,), (k + 1,), k) for k in range(100)]
    assert find_repeats(lines).bodies == [lines]
    assert find_repeats([]).bodies == [[]]


def test_folding_changes_nothing_of_what_is_done() -> None:
    pick = random.Random(3)
    for _ in range(20):
        stretch = [pick.randrange(6) for _ in range(pick.randrange(5, 12))]
        lines: list[ProgramLine] = []
        last = 0
        for _ in range(pick.randrange(2, 6)):
            for what in [*stretch, *([pick.randrange(6)] * pick.randrange(3))]:
                reads = (last, pick.choice([last, 0]))
                write = last if pick.random() < 0.2 else len(lines) + 1
                lines.append(ProgramLine(what, reads, (write,), len(lines)))
                last = write
        folded = find_repeats(lines)
        assert unfolded(folded, registers=outside(lines)) == unfolded(
            as_it_is(lines), registers=outside(lines)
        )
