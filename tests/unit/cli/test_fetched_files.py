"""Files that a service or an agent names are written within the directory that was asked for, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceloom.cli.trace import download
from traceloom.errors import OutputError


def _write(name: str, path: Path) -> None:
    path.write_text(name)


def test_files_in_folders_are_fetched(tmp_path: Path) -> None:
    download(tmp_path / "run", ["rank0.json", "sources/a@b.py"], _write)
    assert (tmp_path / "run" / "rank0.json").read_text() == "rank0.json"
    assert (tmp_path / "run" / "sources" / "a@b.py").read_text() == "sources/a@b.py"


@pytest.mark.parametrize(
    "name", ["../out", "a/../../out", "/out", "a//out", ".out", "a/", "", "a\nb", "a\\out"]
)
def test_a_name_that_leads_elsewhere_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "below").mkdir()
    with pytest.raises(OutputError) as refused:
        download(tmp_path / "below" / "run", ["rank0.json", name], _write)
    assert refused.value.slug == "unsafe-name"
    assert [path.name for path in tmp_path.rglob("*")] == ["below"]
