"""A directory of a stranger holds data: no file in it is ever run, whatever it is called."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from traceloom.testing import TraceBuilder

UNIX_NS = 1_700_000_000 * 10**9
RUN = "import sys; from traceloom.__main__ import console; sys.exit(console())"
NAMES = """
import importlib, os, pkgutil, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import traceloom
for module in pkgutil.walk_packages(traceloom.__path__, "traceloom."):
    # What needs torch belongs to the user's process, and the hook of the recorder acts when it is imported.
    if not module.name.startswith(("traceloom.capture", "traceloom.__main__")):
        importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names))
"""


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Every name that any of our modules imports, and all of the standard library."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", NAMES], capture_output=True, text=True, check=True
    )
    names = {name for name in done.stdout.split() if name.isidentifier() and name != "__main__"}
    assert {"polars", "numpy", "msgspec", "isal", "json", "traceloom"} < names
    return names | {"sitecustomize", "usercustomize"}


@pytest.fixture
def archive(tmp_path: Path, imported: set[str]) -> Path:
    """An unpacked archive: two ranks, large enough to be read by a process each, and modules of all these names."""
    folder = tmp_path / "archive"
    folder.mkdir()
    for name in imported:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'flag')!r}, 'a').write({name!r} + ' ')\n"
        )
    for number in range(2):
        made = TraceBuilder(rank=number, world_size=2, base_ns=UNIX_NS, process=10 + number)
        for step in range(4):
            made.step(step, step * 100, 90).op("aten::mm", step * 100 + 10, 50)
            made.launch("cudaLaunchKernel", step * 100 + 20, 5, correlation=step + 1)
            made.kernel("gemm", step * 100 + 30, 40, correlation=step + 1)
        text = made.metadata(padding=os.urandom(1 << 20).hex()).text().encode()
        (folder / f"rank{number}.json.gz").write_bytes(gzip.compress(text, 0))
    return folder


@pytest.mark.skipif(
    os.cpu_count() == 1,
    reason="files are read by processes of their own where there are several cores",
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "."],
        *(
            pytest.param(words, marks=pytest.mark.thorough)
            for words in (
                ["anonymize", ".", "-o", "../shared"],
                [
                    "report",
                    ".",
                    "-o",
                    "../out.html",
                    "-o",
                    "../out.json",
                    "-o",
                    "../out.perfetto.json.gz",
                ],
                ["link", ".", "-o", "../out.graph"],
                ["whatif", ".", "--set", "kernels * 0.5"],
                ["memory", "."],
                ["diff", ".", "."],
                ["baseline", "save", "main", ".", "--store", "../baselines"],
            )
        ),
    ],
    ids=" ".join,
)
def test_no_module_that_lies_beside_traces_is_run(archive: Path, arguments: list[str]) -> None:
    uncached = [] if arguments[0] == "anonymize" else ["--no-cache"]
    env = {**os.environ, "TRACELOOM_CACHE_DIR": str(archive.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-I", "-c", RUN, *arguments, *uncached],
        cwd=archive,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    flag = archive.parent / "flag"
    assert not flag.exists(), f"run: {flag.read_text()}\n{done.stderr}"
    assert done.returncode == 0, done.stderr


def test_the_module_is_no_way_in_either(archive: Path) -> None:
    """`python -m` puts the directory first by itself; what Python imports before us is out of our hands."""
    for path in archive.glob("*.py"):
        if path.stem in sys.stdlib_module_names or path.stem in (
            "sitecustomize",
            "usercustomize",
            "traceloom",
        ):
            path.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "traceloom", "report", ".", "--no-cache"],
        cwd=archive,
        capture_output=True,
        text=True,
        check=False,
    )
    flag = archive.parent / "flag"
    assert not flag.exists(), f"run: {flag.read_text()}"
    assert done.returncode == 0, done.stderr
