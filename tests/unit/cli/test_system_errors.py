"""What the system refuses ends in a sentence and exit code 3, never in a defect of ours."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.fuzzing.seeds import FORMATS, trace
from traceloom.cli import main
from traceloom.errors import InputError

FULL = Path("/dev/full")
ENDLESS = Path("/dev/zero")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "trace.json"
    made.write_text(trace().text())
    return made


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], slug: str) -> str:
    assert main(argv) == 3
    told = capsys.readouterr().err
    assert f"#{slug}" in told
    assert "defect" not in told
    return told


@pytest.mark.parametrize("verb", ["report", "memory", "link"])
def test_a_directory_without_permission_is_told(tmp_path, monkeypatch, capsys, verb):
    def forbidden(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    assert "permission denied" in refused(capsys, [verb, str(tmp_path)], "unreadable")


@pytest.mark.parametrize("verb", ["report", "memory", "validate", "show", "anonymize"])
def test_a_disk_that_fails_is_told(path, tmp_path, monkeypatch, capsys, verb):
    import io

    real = io.open

    def failing(file, mode="r", *more, **named):
        opened = real(file, mode, *more, **named)
        if str(file) == str(place) and "r" in mode:
            opened.close()
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return opened

    place = path if verb != "validate" else path.rename(path.with_suffix(".et"))
    monkeypatch.setattr(io, "open", failing)
    extra = ["-o", str(tmp_path / "out")] if verb == "anonymize" else []
    assert "input/output error" in refused(capsys, [verb, str(place), *extra], "unreadable")


@pytest.mark.sampled(1)
@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_standard_output_is_told(path, more):
    with FULL.open("w") as full:
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "traceloom",
                "report",
                str(path),
                "--no-cache",
                "--only",
                "core",
                *more,
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 3
    assert "standard output cannot be written: no space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


@pytest.mark.parametrize("length", [250, 255])
def test_long_names_of_outputs_are_written(path, tmp_path, length):
    for ending in (".html", ".json"):
        name = "n" * (length - len(ending)) + ending
        assert (
            main(
                [
                    "report",
                    str(path),
                    "--only",
                    "core",
                    "--no-cache",
                    "--quiet",
                    "-o",
                    str(tmp_path / name),
                ]
            )
            == 0
        )
        assert (tmp_path / name).stat().st_size > 100
        assert (
            main(
                [
                    "report",
                    str(path),
                    "--only",
                    "core",
                    "--no-cache",
                    "--quiet",
                    "-o",
                    str(tmp_path / name),
                ]
            )
            == 3
        )


@pytest.mark.parametrize("length", [256, 5000])
def test_names_that_are_too_long_are_refused(path, tmp_path, capsys, length):
    name = str(tmp_path / ("n" * (length - 5) + ".html"))
    assert "file name too long" in refused(
        capsys, ["report", str(path), "--no-cache", "-o", name], "cannot-write"
    )
    assert "file name too long" in refused(capsys, ["report", name], "unreadable")
    assert "file name too long" in refused(
        capsys, ["link", str(path), "-o", name[:-5] + ".graph"], "cannot-write"
    )
    assert "file name too long" in refused(
        capsys, ["anonymize", str(path), "-o", name[:-5]], "cannot-write"
    )
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.sampled(4)
@pytest.mark.skipif(not ENDLESS.exists(), reason="this system has no /dev/zero")
@pytest.mark.parametrize(
    "verb",
    ["report", "memory", "link", "diff", "whatif", "validate", "show", "convert", "anonymize"],
)
def test_a_device_is_not_read(path, tmp_path, capsys, verb):
    more = {
        "diff": [str(path)],
        "whatif": ["--set", "gpu * 0.5"],
        "convert": [str(tmp_path / "out.graph")],
        "anonymize": ["-o", str(tmp_path / "out")],
    }
    for ending in ("json", "et", "pickle", "graph"):
        link = tmp_path / f"endless.{ending}"
        link.symlink_to(ENDLESS)
        assert "device" in refused(capsys, [verb, str(link), *more.get(verb, [])], "unreadable")


@pytest.mark.sampled(1)
@pytest.mark.skipif(not ENDLESS.exists(), reason="this system has no /dev/zero")
@pytest.mark.parametrize("kind", ["capture", "et", "directory", "host"])
def test_a_device_beside_good_files_is_not_read(tmp_path, kind):
    from support.fuzzing.trying import VERBS, captured

    folder = FORMATS[kind](tmp_path)
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        kept = file.read_bytes()
        file.unlink()
        file.symlink_to(ENDLESS)
        for verb in ("memory", "link", "validate", "show", "anonymize"):
            if verb in VERBS[kind]:
                out = tmp_path / "out" / str(len(list(tmp_path.rglob("*"))))
                argv = [
                    word.replace("{in}", str(folder)).replace("{out}", str(out))
                    for word in VERBS[kind][verb]
                ]
                with captured() as (_, said):
                    assert main(argv) != 1, said.getvalue().decode()[-1000:]
        file.unlink()
        file.write_bytes(kept)


def test_functions_raise_input_errors(tmp_path):
    import traceloom

    with pytest.raises(InputError) as caught:
        traceloom.load(str(tmp_path / ("n" * 300)))
    assert caught.value.slug == "unreadable"
