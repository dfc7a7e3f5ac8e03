"""capture.json of any content: what fits is kept, what does not is told with its place, or the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.fuzzing.seeds import FORMATS
from traceloom import load, load_runs
from traceloom.cli import main
from traceloom.errors import InputError
from traceloom.formats import capture_document


def changed(tmp_path: Path, **values: Any) -> Path:
    """A capture of two ranks, in which these values of the first rank are others."""
    folder = FORMATS["capture"](tmp_path)
    document = json.loads((folder / "capture.json").read_text())
    document["ranks"][0] |= values
    (folder / "capture.json").write_text(json.dumps(document))
    return folder


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("groups", 3),
        ("groups", [3, {"name": "0", "ranks": 5}, {"name": "1", "ranks": ["x"]}]),
        ("rank", "first"),
        ("world_size", {"a": 1}),
        ("world_size", 2**70),
        ("graph_step", [1]),
        ("graph_step", {"file": 3}),
        ("steps", "none"),
        ("collectives", [[]]),
        ("notices", 0.5),
        ("host", ["h"]),
        ("devices", {"0": 1}),
    ],
)
def test_a_value_of_another_type_is_left_out_and_told_with_its_place(tmp_path, capsys, key, value):
    folder = changed(tmp_path, **{key: value})
    sessions = load_runs(
        folder, cache=False
    )  # what does not say how many it belongs to is a run of its own
    notice = next(notice for notice in sessions[0].notices if notice.slug == "odd-capture")
    assert notice.where.startswith(f"$.ranks[0].{key}")
    assert sum(len(session.traces) for session in sessions) == 2
    if key in {"groups", "rank", "graph_step"}:  # what a graph is made of
        out = str(tmp_path / "out.graph")
        assert main(["link", str(folder), "-o", out, "--no-cache"]) in {0, 2, 3}
        assert "defect" not in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [5, "x", {"0": {}}, None])
@pytest.mark.parametrize("verb", [["report"], ["link"], ["memory"], ["anonymize", "-o", "out"]])
def test_ranks_that_are_no_list_are_refused(tmp_path, monkeypatch, capsys, ranks, verb):
    folder = FORMATS["capture"](tmp_path)
    document = json.loads((folder / "capture.json").read_text())
    (folder / "capture.json").write_text(json.dumps({**document, "ranks": ranks}))
    monkeypatch.chdir(tmp_path)
    assert main([*verb, str(folder)]) == 3
    assert "damaged-capture" in capsys.readouterr().err


def test_a_rank_that_is_no_object_costs_that_rank(tmp_path):
    folder = FORMATS["capture"](tmp_path)
    document = json.loads((folder / "capture.json").read_text())
    document["ranks"][1] = 7
    (folder / "capture.json").write_text(json.dumps(document))
    session = load(folder, cache=False)
    assert session.ranks == (0,)
    assert [notice.where for notice in session.notices if notice.slug == "odd-capture"] == [
        "$.ranks[1]"
    ]


def test_a_whole_document_is_taken_as_it_is(tmp_path):
    text = (FORMATS["capture"](tmp_path) / "capture.json").read_bytes()
    assert capture_document.decode(text, "capture.json") == (json.loads(text), [])


@pytest.mark.parametrize("version", [0, 2, "1", None, 10**30])
@pytest.mark.parametrize("name", ["capture.json", "rank0.capture.json"])
def test_another_version_is_refused(tmp_path, version, name):
    folder = FORMATS["capture"](tmp_path)
    document = json.loads((folder / "capture.json").read_text())
    (folder / "capture.json").unlink()
    (folder / name).write_text(json.dumps({**document, "version": version}))
    with pytest.raises(InputError) as refused:
        load(folder, cache=False)
    assert (refused.value.slug, refused.value.where) == ("other-version", str(folder / name))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"3", b'{"ranks": [', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_what_is_no_document_is_none(text):
    assert capture_document.decode(text, "capture.json") is None


def test_a_capture_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "capture.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError) as refused:
        load(tmp_path)
    assert refused.value.slug == "damaged-capture"
