"""Files whose bytes were changed anywhere are read or refused in one sentence, never anything else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from support.small_graph import small_graph
from traceloom.errors import TraceloomError
from traceloom.graph import graph as graph_store
from traceloom.workload.chakra.convert import ConversionInput, open_messages, write_messages
from traceloom.workload.chakra.graph_read import read_graph, write_rank


@cache
def whole(ending: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, et = Path(folder) / f"a.0{ending}", Path(folder) / "b.0.et"
        if ending == ".graph":
            graph_store.save(small_graph(1), path)
        else:
            write_rank(small_graph(1), et)
            with open_messages(et) as reader:
                write_messages(path, reader.metadata, reader)
        return path.read_bytes()


def one_side(path: Path) -> None:
    with ConversionInput(path) as source:
        list(source.one_side(0, "communication")[1])


def graph(path: Path) -> None:
    with ConversionInput(path) as source:
        source.graph()


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "et": (".et", lambda path: read_graph([path])),
    "one side": (".et", one_side),
    "gzip": (".et.gz", graph),
    "json": (".json", graph),
    "lines": (".jsonl", graph),
    "saved": (".graph", graph_store.load),
}
# Where (as a share of the file), how many bytes go, what comes instead.
CHANGES = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 6), st.binary(max_size=5)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", READERS)
@given(changes=CHANGES)
def test_changed_bytes_are_read_or_refused(
    name: str, changes: list[tuple[float, int, bytes]]
) -> None:
    ending, reader = READERS[name]
    data = whole(ending)
    for share, gone, fresh in changes:
        at = int(len(data) * share)
        data = data[:at] + fresh + data[at + gone :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.0{ending}"
        path.write_bytes(data)
        said = ""
        try:
            reader(path)
        except TraceloomError as error:
            said = error.message
            assert error.exit_code == 3  # noqa: PT017  (reading well is as good)
        assert "\n" not in said
