"""Functions are where the linker put them; a damaged file gives an error, never a wrong place."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from support.probes import compiled, needs_compiler
from traceloom.system.elf import Elf

SOURCE = """
static int hidden(int x) { return x + 1; }
int counted_twice(int x) { return hidden(x) * 2; }
int counted(int x) { return x; }
int data = 3;
int elsewhere(void);
int uses(void) { return elsewhere() + hidden(2); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (apt-get install gcc)")
    return compiled(SOURCE, tmp_path_factory.mktemp("elf") / "lib.so", "-shared", "-fPIC")


def opened(path: Path) -> Elf:
    return Elf(os.open(path, os.O_RDONLY))


@needs_compiler
@pytest.mark.parametrize("name", ["hidden", "counted_twice", "uses"])
def test_functions_are_where_the_linker_put_them(library: Path, name: str) -> None:
    lines = subprocess.run(
        ["nm", str(library)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    address = next(int(line.split()[0], 16) for line in lines if line.split()[-1] == name)
    function = opened(library).find(name)
    assert function is not None
    assert (function.name, function.address) == (name, address)
    content = library.read_bytes()
    code = subprocess.run(
        ["objdump", "-d", f"--disassemble={name}", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    first = next(line for line in code.splitlines() if line.strip().startswith(f"{address:x}:"))
    begins = bytes.fromhex(first.split("\t")[1])
    assert content[function.offset : function.offset + len(begins)] == begins


@needs_compiler
def test_what_is_no_function_of_the_file_is_none(library: Path) -> None:
    elf = opened(library)
    assert elf.find("data") is None
    assert elf.find("elsewhere") is None  # another library's
    assert elf.find("nothing of the kind") is None
    function = elf.find("counted")
    assert function is not None
    assert function.name in {"counted", "counted_twice"}


@needs_compiler
def test_a_stripped_library_has_its_exported_functions_alone(library: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", str(stripped), str(library)], check=True)
    assert opened(stripped).find("counted_twice") is not None
    assert opened(stripped).find("hidden") is None


@needs_compiler
def test_a_long_table_is_searched_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from traceloom.system import elf as module

    source = "".join(
        f"int function_{number}(void) {{ return {number}; }}\n" for number in range(100)
    )
    elf = opened(compiled(source, tmp_path / "lib.so", "-shared", "-fPIC"))
    whole = [elf.find(f"function_{number}") for number in range(100)]
    assert None not in whole
    monkeypatch.setattr(
        module, "_CHUNK_BYTES", 24 * 3
    )  # names and rows are cut at every possible place
    assert [elf.find(f"function_{number}") for number in range(100)] == whole


@given(st.data())
def test_damage_gives_an_error_or_an_answer(data: st.DataObject) -> None:
    content = bytearray(Path("/bin/true").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.one_of(st.integers(0, 63), st.integers(0, len(content) - 1)))
        content[place] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    descriptor = os.memfd_create("damaged")
    try:
        os.write(descriptor, content)
        elf = Elf(descriptor)
    except OSError:
        return
    else:
        function = elf.find("m")
        assert function is None or function.offset >= 0
    finally:
        os.close(descriptor)
