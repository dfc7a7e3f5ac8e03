"""The loop stays light: nothing that it imports brings arrays, frames, torch or gRPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import traceloom

HEAVY = {"numpy", "polars", "torch", "pandas", "pyarrow", "grpc"}
IN_A_WORKER = {"traceloom.agent.worker"}  # runs in processes of its own


def test_no_module_of_the_agent_imports_arrays_or_frames() -> None:
    package = Path(traceloom.__file__).parent / "agent"
    names = sorted(
        "traceloom." + ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in package.rglob("*.py")
    )
    modules = [name.removesuffix(".__init__") for name in names if name not in IN_A_WORKER]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
