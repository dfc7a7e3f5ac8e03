"""What tests of probes need: the rights and the kernel for them, processes and libraries to look into."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from traceloom.agent.probes.calls import explain_unsupported

WHY_NOT = "; ".join(filter(None, explain_unsupported()))
needs_probes = pytest.mark.skipif(bool(WHY_NOT), reason=f"no probes of functions here: {WHY_NOT}")
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="there is no C compiler (apt-get install gcc)"
)


def compiled(source: str, path: Path, *options: str) -> Path:
    """Compile C into a program, or into a library with `-shared -fPIC`."""
    command = [
        "cc",
        "-x",
        "c",
        "-",
        "-o",
        str(path),
        "-O1",
        "-fno-omit-frame-pointer",
        "-fno-inline",
        "-x",
        "none",
        *options,
    ]
    subprocess.run(command, input=source, text=True, check=True)
    return path
