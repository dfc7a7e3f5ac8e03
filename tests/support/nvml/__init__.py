"""NVML as a library compiled against NVIDIA's own header, which does what a text says (stub.c)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

H100 = """\
g0.uuid GPU-aaaa
g0.name NVIDIA H100 80GB HBM3
g0.pci 00000000:19:00.0
g0.capability 9.0
g0.cores 16896
g0.max-clock 1980
g0.memory 85899345920 629145600 42949672960 42320527360
g0.use 97 41
g0.power 650250
g0.power-limit 700000
g0.energy 123456789
g0.temperature 61
g0.clock.sm 1500
g0.clock.memory 2619
g0.replays 3
g0.ecc.corrected 5
g0.ecc.uncorrected 1
g0.encoder 0
g0.decoder 12
g0.rows 1 2 0 1
g0.throttles-supported 0x1ff
g0.throttles 0x24
g0.field.82.0 74
g0.field.197.0 1000000
g0.field.198.0 2000000
g0.field.138.4294967295 10
g0.field.139.4294967295 20
g0.field.161.0 0
g0.field.162.0 0
g0.field.163.0 7
g0.field.74.0 2500000000
g0.field.76.0 3000000000
g0.field.77.0 4000000000
g0.field.79.0 5000000000
g0.field.75.0 9000000000
g0.field.269.0 1000000000
g0.field.270.0 6000000000
g0.field.271.0 7000000000
g0.gpm 1
g0.gpm.1 98
g0.gpm.2 90
g0.gpm.3 35
g0.gpm.4 10
g0.gpm.5 50
g0.gpm.6 0
g0.gpm.7 50
g0.gpm.8 0
g0.gpm.9 0
g0.gpm.10 40
g0.gpm.11 0
g0.gpm.12 10
g0.gpm.13 0
g0.gpm.20 100
g0.gpm.21 200
g0.gpm.60 300
g0.gpm.61 400
"""


def with_device(number: int, text: str = H100) -> str:
    """The same device once more, with an identity of its own."""
    return (
        text.replace("g0.", f"g{number}.")
        .replace("GPU-aaaa", f"GPU-{number}")
        .replace(":19:", f":{20 + number}:")
    )


def compiler() -> str:
    """The C compiler; skips the test where there is none."""
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler: apt-get install gcc")
    return found


@cache
def _header() -> Path:
    files = metadata.files("nvidia-nvml-dev") or []
    return Path(str(next(file for file in files if file.name == "nvml.h").locate())).parent


def compiled(directory: Path, *, old: bool = False) -> Path:
    """The directory that holds the library; `old`: without what drivers of 2019 did not have."""
    directory = directory / ("old" if old else "new")
    directory.mkdir()
    subprocess.run(
        [
            compiler(),
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            *(["-DOLD"] if old else []),
            "-I",
            str(_header()),
            "-o",
            str(directory / "libnvidia-ml.so.1"),
            str(HERE / "stub.c"),
        ],
        check=True,
    )
    return directory


def steps(library: Path, tmp_path: Path, *steps: dict[str, Any]) -> list[dict[str, Any]]:
    """What the collector says after each step, in a process that loads the library.

    A step has `script` (what the library does from now on); with `pause` it pauses for so many seconds, else it takes a
    sample. `later` moves the clock of retries by so many seconds; `limit` is the time-out in seconds.
    """
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "NVML_SCRIPT": str(tmp_path / "nvml.txt"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "steps.py")],
        env=environment,
        input=json.dumps(steps),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    for answer in answers:
        answer["values"] = {
            (metric, *labels): value for metric, labels, value in answer["readings"]
        }
    return answers
