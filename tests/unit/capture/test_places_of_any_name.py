"""PyTorch writes to no path that is not UTF-8, so such a directory gets its traces by way of another."""

from __future__ import annotations

import os

from traceloom.capture.writing import CaptureFolders


def test_what_pytorch_writes_goes_through_a_path_that_is_text(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    directory = tmp_path / os.fsdecode(b"run\xff")
    directory.mkdir()
    places = CaptureFolders(directory)
    place = places.for_torch(1)
    str(place).encode("utf-8")
    assert places.choose(1) == directory
    plain = place / "rank0.kineto.json"
    plain.write_text("{}")
    assert places.compress(plain) == directory / "rank0.kineto.json.gz"
    places.leave()
    assert sorted(tmp_path.iterdir()) == [directory]


def test_a_directory_of_any_other_name_is_used_at_once(tmp_path):
    directory = tmp_path / "run ∑"
    directory.mkdir()
    assert CaptureFolders(directory).for_torch(1) == directory
