"""Which sources are copied out of what a trace names, and how they are told from other files of a capture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traceloom.capture import manifest, manifest as kernel_sources
from traceloom.capture.manifest import copy_sources


def named(folder: Path, *paths: object) -> Path:
    """A trace whose events name files, with enough between them that it is read in several pieces."""
    events = [
        {"name": "x" * 500_000, "args": {"kernel_backend": "triton", "kernel_file": str(path)}}
        for path in paths
    ]
    trace = folder / "rank0.graph.kineto.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    return trace


def test_only_files_that_a_trace_names_are_copied_each_once(tmp_path: Path) -> None:
    for place in ("a", 'b"\\b'):  # as JSON writes a name of any kind
        (tmp_path / place).mkdir()
    first, second, unnamed = (
        tmp_path / "a" / "cfirst.py",
        tmp_path / 'b"\\b' / "csecond.py",
        tmp_path / "a" / "cother.py",
    )
    for path in (first, second, unnamed):
        path.write_text(path.name)
    folder = tmp_path / "rank0.host_resources"
    copied = copy_sources(named(tmp_path, first, second, first, "", tmp_path / "a", second), folder)
    assert sorted(copied.files) == ["cfirst.py", "csecond.py"]
    assert copied.omitted == []
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: name for name in copied.files
    }


def test_what_cannot_be_copied_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sources, "MAX_TOTAL_BYTES", 12)
    (tmp_path / "c1.py").write_text("ten bytes!")
    (tmp_path / "c2.py").write_text("three")
    (tmp_path / "c3.py").mkdir()
    (tmp_path / "-c4.py").write_text("")
    names = ("c1.py", "c2.py", "c3.py", "-c4.py")
    copied = copy_sources(
        named(tmp_path, *(tmp_path / name for name in names)), tmp_path / "rank0.host_resources"
    )
    assert copied.files == ["c1.py"]
    assert dict(copied.omitted) == {
        "c2.py": "too large",
        "c3.py": "there is no such file any more",
        "-c4.py": "no name for a file of its own",
    }


def test_a_trace_without_kernels_makes_no_folder(tmp_path: Path) -> None:
    assert copy_sources(named(tmp_path), tmp_path / "rank0.host_resources").files == []
    assert not (tmp_path / "rank0.host_resources").exists()


def test_a_new_capture_takes_the_place_of_earlier_sources_and_of_nothing_else_there(
    tmp_path: Path,
) -> None:
    made = tmp_path / ".recording" / "new"
    for folder in (tmp_path, made):
        (folder / "rank0.host_resources").mkdir(parents=True)
        (folder / "rank0.host_resources" / "ckept.py").write_text(str(folder == made))
    (tmp_path / "rank0.host_resources" / "cold.py").write_text("")
    (tmp_path / "rank1.host_resources").mkdir()
    (tmp_path / "rank1.host_resources" / "cold.py").write_text("")
    (tmp_path / "rank0.host_resources" / "nid_1_tid_2.dat").write_text("of PyTorch")
    (made / "rank0.capture.json").write_text('{"ranks": [{"rank": 0}]}')
    manifest.replace_capture(made, tmp_path, manifest.list_files(tmp_path), {})
    assert sorted(path.name for path in (tmp_path / "rank0.host_resources").iterdir()) == [
        "ckept.py",
        "nid_1_tid_2.dat",
    ]
    assert (tmp_path / "rank0.host_resources" / "ckept.py").read_text() == "True"
    assert not (tmp_path / "rank1.host_resources").exists()
