"""A new format is a `Source` in the registry: files and directories of it are read like any others."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceloom.errors import InputError
from traceloom.formats import inputs, load
from traceloom.formats.inputs import FileHead, InputFile
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


class Lines:
    """One kernel per line: its name, start and duration in microseconds."""

    endings = (".kernels",)

    def matches(self, head: bytes) -> bool:
        return head.startswith(b"#kernels ")

    def peek(self, file: InputFile) -> FileHead:
        rank = int(self._text(file.path).split("\n")[0].split()[1])
        return FileHead(
            file, rank, 2, (("job_id", "7"),), None, None, None, None, str(file.path.parent)
        )

    def read(
        self,
        path: str | Path,
        *,
        capture: dict[str, Any] | None,
        step: object,
        processes: int | None,
    ) -> Trace:
        first, *lines = self._text(Path(path)).splitlines()
        builder = TraceBuilder(rank=int(first.split()[1]), world_size=2)
        for number, line in enumerate(lines, 1):
            name, start, duration = line.split()
            builder.kernel(name, float(start), float(duration), correlation=number)
        return builder.build()

    def _text(self, path: Path) -> str:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


@pytest.fixture(autouse=True)
def lines() -> Iterator[None]:
    inputs.SOURCES.insert(0, Lines())
    yield
    del inputs.SOURCES[0]


def test_a_file_of_a_new_format_is_read_with_others_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "rank0.kernels").write_text("#kernels 0\ngemm 1 5\nrelu 7 2\n")
    (tmp_path / "rank1.kernels").write_bytes(gzip.compress(b"#kernels 1\ngemm 2 5\n"))
    (tmp_path / "notes.txt").write_text("none of the formats")
    session = load(tmp_path)
    assert session.ranks == (0, 1)
    assert session.traces[0].events["name"].to_list() == ["gemm", "relu"]
    assert load(tmp_path / "rank1.kernels", cache=False).traces[0].events.height == 1


def test_other_files_go_to_the_last_format(tmp_path: Path) -> None:
    path = TraceBuilder().op("aten::mm", 1, 2).write(tmp_path / "a.json.gz")
    assert load(path).traces[0].events["name"].to_list() == ["aten::mm"]
    (tmp_path / "b.json").write_text("PAR1")
    with pytest.raises(InputError, match="a Parquet file"):
        load(tmp_path / "b.json")
