"""Real runs of small scripts under `traceloom record`."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

SHELL = "import sys; from traceloom.cli import main; sys.exit(main())"

# A model that trains in a millisecond; `step()` is one step of it. Its optimizer is one that a user wrote: those of
# PyTorch import the compiler when they are made, which takes as long as everything else in such a run.
TRAIN = """
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
class Plain(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {})
    def add_param_group(self, group): self.param_groups.append({**group, "params": list(group["params"])})
    def zero_grad(self):
        for one in self.param_groups[0]["params"]: one.grad = None
    @torch.no_grad()
    def step(self):
        for one in self.param_groups[0]["params"]: one.sub_(one.grad, alpha=1e-3)
optimizer = Plain(model.parameters())
def step():
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@functools.cache
def torch_has(expression: str) -> bool:
    """Whether the installed PyTorch has something that older versions lack; an expression over `torch`."""
    probe = f"import torch, torch.distributed, torch.profiler; print(bool({expression}))"
    return (
        subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=True
        ).stdout
        == "True\n"
    )


@dataclass
class Run:
    """One finished run."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def capture(self) -> dict[str, Any]:
        return json.loads((self.directory / "capture.json").read_text())

    def rank(self, rank: int = 0) -> dict[str, Any]:
        return next(part for part in self.capture["ranks"] if part["rank"] == rank)

    @property
    def files(self) -> set[str]:
        """Its files, but those of stacks: whether there are any depends on how long its steps took."""
        if not self.directory.exists():
            return set()
        names = {path.name for path in self.directory.iterdir()}
        return {name for name in names if not name.endswith(".stacks.json.gz")}

    @property
    def ours(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("traceloom: ")]

    @property
    def theirs(self) -> str:
        return "".join(
            line
            for line in self.err.splitlines(keepends=True)
            if not line.startswith("traceloom: ")
        )

    def json(self, name: str) -> Any:
        path = self.directory / name
        opener = gzip.open if name.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as file:
            return json.load(file)

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        return self.json(self.rank(rank)["window"]["file"])["traceEvents"]

    def names(self, rank: int = 0) -> list[str]:
        return [event["name"] for event in self.events(rank) if event.get("ph") == "X"]

    def marks(self, rank: int = 0) -> list[int]:
        found = [
            event
            for event in self.events(rank)
            if str(event.get("name")).startswith("traceloom.step#")
        ]
        return [
            int(event["name"].split("#")[1])
            for event in sorted(found, key=lambda event: event["ts"])
        ]


class Recorder:
    """Runs commands with and without `traceloom record`."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        root = Path(__file__).resolve().parents[3]
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("TRACELOOM", "PYTHONPATH"))
        }
        self.env["OMP_NUM_THREADS"] = "1"
        self.source = root / "src"
        self.directory = tmp_path / "run"

    def script(self, text: str, name: str = "script.py", *, train: bool = True) -> str:
        path = self.tmp_path / name
        path.write_text((TRAIN if train else "") + textwrap.dedent(text))
        return str(path)

    def popen(self, command: list[str], *options: str, **kwargs: Any) -> subprocess.Popen[str]:
        env = {**self.env, "PYTHONPATH": str(self.source)}
        shell = [
            sys.executable,
            "-c",
            SHELL,
            "record",
            "-o",
            str(self.directory),
            *options,
            "--",
            *command,
        ]
        return subprocess.Popen(
            shell,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.tmp_path,
            **kwargs,
        )

    def record(self, command: list[str], *options: str) -> Run:
        process = self.popen(command, *options)
        out, err = process.communicate(timeout=300)
        return Run(process.returncode, out, err, self.directory)

    def has(self, expression: str) -> bool:
        return torch_has(expression)

    def python(self, text: str, *options: str, train: bool = True) -> Run:
        return self.record([sys.executable, self.script(text, train=train)], *options)

    def plain(self, command: list[str]) -> Run:
        env = {**self.env, "PYTHONPATH": str(self.source)}
        done = subprocess.run(
            command,
            env=env,
            text=True,
            capture_output=True,
            timeout=300,
            cwd=self.tmp_path,
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr, self.directory)

    def torchrun(self, script: str, ranks: int = 2) -> list[str]:
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            script,
        ]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return _recorder(tmp_path)


@pytest.fixture(scope="module")
def shared_recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """For runs that several tests of a module look at."""
    return _recorder(tmp_path_factory.mktemp("shared"))


def _recorder(directory: Path) -> Recorder:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return Recorder(directory)
