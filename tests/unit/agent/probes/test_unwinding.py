"""The way to a caller is the one that the compiler's tables have, as binutils reads them; damaged ones lead nowhere."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from support.probes import compiled, needs_compiler, needs_probes
from traceloom.agent.probes.calls import MOST_IN_WINDOW, RECORD, CallProbes, CallStacks, ProbedCall
from traceloom.agent.probes.ebpf import get_architecture
from traceloom.agent.probes.symbols import END_RULE, FrameOrigin, Symbols, find_unwind_rule
from traceloom.system.elf import Elf

# Functions whose frames differ: none, one of a size that is not known, one that begins at a multiple of 64, many saved
# registers, and one that calls itself.
SOURCE = """
#include <alloca.h>
#include <string.h>
int calls;
void watched(int depth) { calls += depth; }
int plain(int depth) { watched(depth); return ++calls; }
int roomy(int depth) { volatile char room[5000]; memset((void *)room, depth, sizeof room); plain(depth); return room[7]; }
int sized(int depth) { volatile char *room = alloca(100 + depth); room[3] = 1; roomy(depth); return room[3] + calls; }
int aligned(int depth) {
    volatile char room[64] __attribute__((aligned(64))); volatile char *more = alloca(64 + depth);
    room[5] = more[5] = 2; sized(depth); return room[5] + more[5] + calls;
}
int busy(int depth) {
    int a = calls, b = a * 3, c = b * 5, d = c * 7, e = d * 11;
    aligned(depth); return a + b * 2 + c * 3 + d * 4 + e * 5;
}
int deep(int depth) { return depth ? deep(depth - 1) + calls : busy(3); }
"""
CHAIN = ["plain", "roomy", "sized", "aligned", "busy", *["deep"] * 4]
REGISTERS = {"rsp": FrameOrigin.STACK, "rbp": FrameOrigin.FRAME}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unwound") / "lib.so"
    return compiled(
        SOURCE, path, "-shared", "-fPIC", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"
    )


def rows_of(library: Path) -> Iterator[tuple[int, int, str, str, str]]:
    """Rows of the tables: from an address to another, the frame's end, where the frame register and the return are."""
    text = subprocess.run(
        ["readelf", "--wide", "--debug-dump=frames-interp", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for entry in text.split("\n\n"):
        match = re.search(r"FDE .*pc=[0-9a-f]+\.\.([0-9a-f]+)\n(.+)", entry, re.DOTALL)
        if match is None:
            continue  # of a common entry, or of a function whose row is the common one
        end = int(match[1], 16)
        header, *lines = match[2].strip().splitlines()
        columns = [dict(zip(header.split(), line.split(), strict=True)) for line in lines]
        starts = [int(row["LOC"], 16) for row in columns]
        for row, start, following in zip(columns, starts, [*starts[1:], end], strict=True):
            yield start, following, row["CFA"], row.get("rbp", "u"), row["ra"]


@needs_compiler
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="registers have the names of x86-64")
def test_rules_are_the_rows_of_the_tables(library: Path) -> None:
    descriptor = os.open(library, os.O_RDONLY)
    elf = Elf(descriptor)
    seen = set()
    for start, end, frame_end, kept, returns in rows_of(library):
        for address in {start, (start + end) // 2, end - 1}:
            way = find_unwind_rule(elf, address)
            if frame_end == "exp":
                assert way.base in {
                    FrameOrigin.BEHIND_FRAME,
                    FrameOrigin.END,
                }  # END: of the linker's own stubs, nobody returns there
            else:
                register, _, offset = frame_end.partition("+")
                if register not in REGISTERS or kept == "exp":
                    assert way.base == FrameOrigin.END
                    continue
                assert (way.base, way.offset) == (REGISTERS[register], int(offset))
                assert way.frame == (0 if kept == "u" else int(kept[1:]))
                assert way.returns_to == int(returns[1:])
            seen.add(way.base)
    os.close(descriptor)
    assert {FrameOrigin.STACK, FrameOrigin.FRAME, FrameOrigin.BEHIND_FRAME} <= seen


@needs_compiler
def test_a_stripped_library_has_its_tables(library: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", str(stripped), str(library)], check=True)
    descriptors = [os.open(path, os.O_RDONLY) for path in (library, stripped)]
    whole, bare = map(Elf, descriptors)
    for name in ("plain", "sized", "aligned", "busy", "deep"):
        function = whole.find(f"{name}\0")
        assert function is not None
        ways = [find_unwind_rule(elf, function.address) for elf in (whole, bare)]
        assert ways[0] == ways[1] != END_RULE
    for descriptor in descriptors:
        os.close(descriptor)


@needs_compiler
def test_what_no_table_has_leads_nowhere(library: Path, tmp_path: Path) -> None:
    for path, address in ((library, 0), (library, 1 << 40), (library, (1 << 64) - 1)):
        descriptor = os.open(path, os.O_RDONLY)
        assert find_unwind_rule(Elf(descriptor), address).base == FrameOrigin.END
        os.close(descriptor)
    bare = compiled(
        "int f(void) { return 1; }",
        tmp_path / "bare.so",
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-Wl,--no-eh-frame-hdr",
    )
    descriptor = os.open(bare, os.O_RDONLY)
    elf = Elf(descriptor)
    function = elf.find("f\0")
    assert function is not None
    assert find_unwind_rule(elf, function.address).base == FrameOrigin.END
    os.close(descriptor)


@needs_compiler
@given(st.data())
def test_damaged_tables_give_a_rule_or_none(library: Path, data: st.DataObject) -> None:
    content = bytearray(library.read_bytes())
    descriptor = os.open(library, os.O_RDONLY)
    whole = Elf(descriptor)
    os.close(descriptor)
    assert whole.unwind_index is not None
    # The tables lie behind their index.
    damaged = st.integers(
        whole.unwind_index.offset, min(whole.unwind_index.offset + 1200, len(content) - 1)
    )
    for position in data.draw(st.lists(damaged, min_size=1, max_size=12)):
        content[position] = data.draw(
            st.sampled_from([0, 1, 0x0F, 0x7F, 0x80, 0xFF, data.draw(st.integers(0, 255))])
        )
    descriptor = os.memfd_create("damaged")
    os.write(descriptor, content)
    elf = Elf(descriptor)
    for name in ("plain", "sized", "aligned", "busy", "deep"):
        function = elf.find(f"{name}\0")
        assert function is not None
        way = find_unwind_rule(elf, function.address + 12)
        assert max(abs(way.offset), abs(way.frame), abs(way.returns_to)) <= 1 << 20
    os.close(descriptor)


class Watched:
    """The library in this process, with a probe that takes stacks."""

    def __init__(self, library: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.functions = ctypes.CDLL(str(library))
        self.symbols = Symbols(os.getpid())
        self.symbols.refresh()
        self.stacks = CallStacks(os.getpid(), self.symbols, None)
        self.probes = CallProbes(os.getpid(), self.stacks)
        self.probes.attach(
            os.open(library, os.O_RDONLY), [(7, ProbedCall("watched\0", (), stacks=True))]
        )

    def numbers(self) -> list[int]:
        numbers = [number for _, _, _, number, *_ in RECORD.iter_unpack(self.probes.ring.take())]
        self.stacks.take()
        return numbers

    def names(self, number: int) -> list[str]:
        return [self.symbols.name(address - 1)[0] for address in self.stacks.stacks[number].native]

    def close(self) -> None:
        self.probes.close()
        self.stacks.close()


@pytest.fixture
def watched(library: Path) -> Iterator[Watched]:
    made = Watched(library)
    yield made
    made.close()


@needs_probes
@needs_compiler
def test_a_stack_is_unwound_here_first_and_by_the_kernel_then(watched: Watched) -> None:
    watched.functions.deep(3)
    (first,) = watched.numbers()
    assert watched.names(first)[: len(CHAIN)] == CHAIN
    # The rules are with the kernel now: what it hands over has no piece of the stack any more, and is the same.
    watched.functions.deep(3)
    watched.functions.deep(3)
    second, third = watched.numbers()
    assert second == third
    assert watched.names(second)[: len(CHAIN)] == CHAIN
    assert (
        watched.stacks.stacks[second].native[: len(CHAIN)]
        == watched.stacks.stacks[first].native[: len(CHAIN)]
    )
    watched.functions.deep(2)
    (other,) = watched.numbers()
    assert watched.names(other)[: len(CHAIN) - 1] == CHAIN[:-1]
    assert other not in {first, second}


@needs_probes
@needs_compiler
def test_a_stack_that_is_too_deep_ends(watched: Watched) -> None:
    for _ in range(3):
        watched.functions.deep(500)
    numbers = watched.numbers()
    watched.functions.deep(500)
    for number in (*numbers, *watched.numbers()):
        names = watched.names(number)
        assert names[:5] == CHAIN[:5]
        assert set(names[5:]) == {"deep"}
        assert len(names) <= 48


@needs_probes
@needs_compiler
def test_calls_that_come_too_quickly_are_recorded_without_stacks_and_counted(
    watched: Watched,
) -> None:
    total = 30_000
    numbers: list[int] = []
    for _ in range(total // 1000):
        for _ in range(1000):
            watched.functions.plain(1)
        numbers += watched.numbers()
    assert len(numbers) == total
    assert watched.stacks.refused() == numbers.count(0)
    assert numbers.count(0) + sum(number in watched.stacks.stacks for number in numbers) == total
    assert len(numbers) - numbers.count(0) >= MOST_IN_WINDOW


def test_numbers_of_registers_are_those_of_this_machine() -> None:
    assert get_architecture().unwound in {(7, 6), (31, 29)}
