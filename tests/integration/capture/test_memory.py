"""Whose memory it is, in real runs whose sizes are known to the byte."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom.analyze.memory import memory as summary
from traceloom.analyze.memory_answers import explain_allocations
from traceloom.cli import main
from traceloom.report.memory import build
from traceloom.report.memory_sources import MemoryOptions

pytestmark = pytest.mark.torch

THREE_LINES = """
import torch, traceloom
@traceloom.scope("function1")
def function1(x):
    y = torch.relu(x)
    z = torch.relu(y)
    with traceloom.scope("sec1"):
        return torch.exp(z)
x = torch.ones(100)
with traceloom.record({directory!r}, memory=True):
    function1(x)
"""

MLP = """
import sys, torch, traceloom
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0); torch.set_num_threads(1)
mode = {mode!r}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(64, 10)
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=mode == "reentrant") if "reentrant" in mode else block(x)
        return self.head(x)
net = Net()
run = torch.compile(net, backend="aot_eager") if mode == "compile" else net
optimizer = torch.optim.Adam(net.parameters())
kept = []
for step in range(10):
    with traceloom.scope("fwd"):
        loss = run(torch.randn(32, 64, requires_grad=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if mode == "leak":
        with traceloom.scope("cache"):
            kept.append(torch.zeros(1000))
    if mode == "oom" and step == 6:
        torch.empty(10**14)
"""
PARAMETERS = 2 * (64 * 256 + 256 + 256 * 64 + 64) + 64 * 10 + 10
TENSORS = 2 * 4 + 2


def _document(directory: Path, **options: Any) -> dict[str, Any]:
    return build(traceloom.load(directory), MemoryOptions(**options))


def _cpu(document: dict[str, Any]) -> dict[str, Any]:
    return next(m for m in document["ranks"][0]["memories"] if m["device_type"] == "cpu")


def _rows(directory: Path, tmp_path: Path) -> list[dict[str, str]]:
    path = tmp_path / "all.csv"
    assert main(["memory", str(directory), "-o", str(path), "--all", "--force", "--quiet"]) == 0
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_three_line_example_gives_exactly_these_identifiers(
    recorder: Any, tmp_path: Path
) -> None:
    target = tmp_path / "example"
    script = recorder.script(THREE_LINES.format(directory=str(target)), train=False)
    subprocess.run(
        [sys.executable, script],
        check=True,
        env={**recorder.env, "PYTHONPATH": str(recorder.source)},
    )
    path = tmp_path / "allocations.csv"
    assert main(["memory", str(target), "-o", str(path), "--quiet"]) == 0
    assert path.read_text().splitlines() == [
        "name,bytes",
        "function1.relu.1,400",
        "function1.relu.2,400",
        "function1.sec1.exp.1,400",
    ]


@pytest.fixture(scope="module")
def plain(shared_recorder: Any) -> Any:
    return shared_recorder.python(MLP.format(mode="plain"), "--memory", train=False)


def test_sizes_are_those_of_the_model_to_the_byte(plain: Any) -> None:
    assert plain.code == 0
    assert plain.theirs == ""
    memory = _cpu(_document(plain.directory))
    held = {(row["category"], row["evidence"]): row["bytes"] for row in memory["categories"]}
    assert held["parameter", "census"] == 4 * PARAMETERS
    of_input = 4 * 32 * 64  # the input has a gradient too
    assert (
        sum(size for (name, _), size in held.items() if name == "gradient")
        == 4 * PARAMETERS + of_input
    )
    # two moments of each parameter, and the count of steps of each
    assert (
        sum(size for (name, _), size in held.items() if name == "optimizer_state")
        == 8 * PARAMETERS + 4 * TENSORS
    )
    assert sum(held.values()) == memory["peak_bytes"] == memory["tree"][0]["bytes"]


def test_a_module_owns_parameters_gradients_and_states(plain: Any) -> None:
    memory = _cpu(_document(plain.directory, by="module", at="peak"))
    held = {row["name"]: row["bytes"] for row in memory["parts"]}
    weights = 64 * 256 + 256
    assert held["Net.blocks.0.fc1"] == 4 * 4 * weights + 2 * 4  # with two step counters


def test_activations_are_those_that_backward_needs(plain: Any, tmp_path: Path) -> None:
    rows = [row for row in _rows(plain.directory, tmp_path) if row["step"] == "3"]
    kept = {row["site"]: int(row["bytes"]) for row in rows if row["category"] == "activation"}
    assert kept["fwd.Net.blocks.0.relu.1"] == 4 * 32 * 256
    assert kept["fwd.Net.blocks.1.relu.1"] == 4 * 32 * 256
    assert "fwd.Net.blocks.0.fc1.linear.1" not in kept  # the result of the relu is enough
    assert len({row["name"] for row in rows}) == len(rows)


def test_a_planted_leak_is_found_by_its_line(
    recorder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorder.python(MLP.format(mode="leak"), "--memory", train=False)
    growth = _cpu(_document(run.directory))["growth"]
    assert (growth[0]["site"], growth[0]["bytes_per_step"]) == ("cache.zeros.1", 4000.0)
    assert main(["memory", str(run.directory)]) == 0
    shown = capsys.readouterr().out
    assert "cache.zeros.1 leaves 4.00 kB per step" in " ".join(shown.split())


def test_the_model_without_a_leak_has_none(plain: Any) -> None:
    assert _cpu(_document(plain.directory))["growth"] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mode", ["not reentrant", pytest.param("reentrant", marks=pytest.mark.thorough)]
)
def test_checkpointed_code_is_named_as_in_eager(
    mode: str, plain: Any, recorder: Any, tmp_path: Path
) -> None:
    eager = {row["name"].rpartition(".")[0] for row in _rows(plain.directory, tmp_path)}
    run = recorder.python(MLP.format(mode=mode), "--memory", train=False)
    rows = _rows(run.directory, tmp_path)
    names = {row["name"].rpartition(".")[0] for row in rows}
    early = "before."  # where the first torch call lies may differ by a little
    own = {
        name for name in names - eager if "Checkpoint" not in name and not name.endswith(".none")
    }
    own = {name for name in own if not name.startswith(early)}
    assert own == set()
    again = [
        row
        for row in rows
        if row["backward"] == "true" and row["name"].startswith("fwd.Net.blocks.0.fc1.linear")
    ]
    assert again


@pytest.mark.thorough
def test_compiled_code_is_said_to_have_lost_its_scopes(recorder: Any) -> None:
    run = recorder.python(MLP.format(mode="compile"), "--memory", train=False)
    assert run.code == 0
    assert run.theirs == ""
    assert "compiled-allocations" in {
        notice["slug"] for notice in _document(run.directory)["notices"]
    }
    held = run.rank()["live_storages_at_end"]["name"]
    assert "Net.blocks.0.fc1.weight" in held
    assert not [name for name in held if "_orig_mod" in name]


@pytest.fixture(scope="module")
def ran_out(shared_recorder: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    beside = type(shared_recorder)(
        tmp_path_factory.mktemp("ran-out")
    )  # that of `plain` has its capture already
    return beside.python(MLP.format(mode="oom"), "--memory", train=False)


def test_running_out_of_memory_leaves_a_report(ran_out: Any) -> None:
    run = ran_out
    assert run.code == 1
    assert "DefaultCPUAllocator" in run.theirs
    assert any("memory ran out" in line for line in run.ours)
    report = json.loads((run.directory / "rank0.oom.json").read_text())
    assert (report["format"], report["asked_bytes"], report["step"]) == (
        "traceloom-out-of-memory",
        4 * 10**14,
        7,
    )
    owners = dict(
        zip(report["live_storages"]["name"], report["live_storages"]["bytes"], strict=True)
    )
    assert owners["Net.blocks.0.fc1.weight"] == 4 * 64 * 256
    assert any("script.py" in frame for frame in report["stack"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("class", "fwd.Net.Block.Linear.linear"),
        pytest.param("off", "fwd.linear", marks=pytest.mark.thorough),
    ],
)
def test_modules_are_named_as_asked(
    names: str, expected: str, recorder: Any, tmp_path: Path
) -> None:
    run = recorder.python(
        MLP.format(mode="plain"), "--memory", "--module-names", names, train=False
    )
    assert expected in {row["name"].rpartition(".")[0] for row in _rows(run.directory, tmp_path)}


def test_the_two_ways_to_follow_memory_agree_on_a_recording(plain: Any) -> None:
    (trace,) = traceloom.load(plain.directory).traces
    columns = ["device_type", "device", "peak_bytes", "end_bytes"]
    summed = sorted(summary(trace).devices.select(columns).rows())
    assert sorted(explain_allocations(trace).pools.select(columns).rows()) == summed


def test_a_run_that_ended_for_want_of_memory_is_explained_on_one_screen(
    ran_out: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ran_out
    (end,) = _document(run.directory)["out_of_memory"]
    assert (end["asked_bytes"], end["step"]) == (4 * 10**14, 7)
    assert sum(row["self_bytes"] for row in end["tree"]) == end["bytes"]
    held = {row["name"]: row["bytes"] for row in end["kinds"]}
    assert held["parameters"] == 4 * PARAMETERS
    assert end["advice"][0]["action"] == "shrink-request"
    assert main(["memory", str(run.directory), "--quiet"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any("What to try first" in line for line in shown[:40])
    assert any("script.py" in line for line in shown[:40])


WRAPPED = """
import warnings, torch, traceloom
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as Sharded, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
class Net(nn.Module):
    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.blocks = nn.ModuleList([wrap(nn.Linear(64, 64)), nn.Linear(64, 64)])
    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x
cpu = torch.device("cpu")
shard = lambda module: Sharded(module, device_id=cpu)
ways = {
    "plain": Net(), "parallel": DataParallel(Net()), "distributed": DistributedDataParallel(Net(checkpoint_wrapper)),
    "sharded": shard(Net(shard)), "in_place": fully_shard(Net(), mesh=dist.init_device_mesh("cpu", (1,))),
}
optimizers = [torch.optim.SGD(net.parameters()) for net in ways.values()]
for step in range(3):
    for name, net in ways.items():
        with traceloom.scope(name):
            loss = net(torch.randn(32, 64)).square().mean()
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
"""


@pytest.fixture(scope="module")
def wrapped(shared_recorder: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not shared_recorder.has(
        "hasattr(__import__('torch.distributed.fsdp').distributed.fsdp, 'fully_shard')"
    ):
        pytest.skip("this PyTorch has no `fully_shard` yet")
    beside = type(shared_recorder)(
        tmp_path_factory.mktemp("wrapped")
    )  # that of `plain` has its capture already
    return beside.python(WRAPPED, "--memory", train=False)


def _ops_by_scope(rows: list[dict[str, str]]) -> dict[str, set[str]]:
    """The names below each outermost scope, without their counters."""
    out: dict[str, set[str]] = {}
    for row in rows:
        outer, _, rest = row["name"].rpartition(".")[0].partition(".")
        out.setdefault(outer, set()).add(rest)
    return out


@pytest.mark.thorough
def test_wrappers_of_modules_leave_no_trace_in_names(wrapped: Any, tmp_path: Path) -> None:
    assert wrapped.code == 0
    assert wrapped.theirs == ""
    ops = _ops_by_scope(_rows(wrapped.directory, tmp_path))
    assert {"Net.blocks.0.linear", "Net.blocks.1.AddmmBackward0", "Net.relu"} <= ops["plain"]
    assert ops["parallel"] == ops["plain"]
    forward = {name for name in ops["plain"] if "Backward" not in name}
    own_of = {
        "distributed": "Net.empty",
        "sharded": "Net.FullyShardedDataParallel._pre_forward",
        "in_place": "Net.FSDP::",
    }
    for way, own in own_of.items():
        assert forward <= ops[way]
        more = {name for name in ops[way] - ops["plain"] if not name.startswith("Net.blocks.")}
        assert all(
            name.startswith((own, "MeanBackward0")) for name in more
        )  # what the wrapper itself allocates
        assert not {
            name
            for name in ops[way]
            if any(word in name for word in ("module", "Net.Net", "Parallel.forward"))
        }


@pytest.mark.thorough
def test_the_census_names_modules_as_without_their_wrappers(wrapped: Any) -> None:
    held = wrapped.rank()["live_storages_at_end"]
    names = [
        name for owner, name in zip(held["owner"], held["name"], strict=True) if owner != "other"
    ]
    # the shard in the parameter of `fully_shard` is one of these; that of FSDP is flat
    assert names.count("Net.blocks.1.weight") == 4
    assert names.count("Net._flat_param") == 1
    assert {"Net.blocks.0.weight", "Net.blocks.1.bias.grad", "Net.blocks.0._flat_param"} <= set(
        names
    )
    assert {name.split(".")[0] for name in names} == {"Net"}
    assert not [name for name in names if "module" in name]


BESIDE = """
import threading, torch, traceloom
from torch import nn
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
loss, kept = net(torch.randn(32, 64)).sum(), []
with traceloom.record({directory!r}, memory=True):
    thread = threading.Thread(target=lambda: kept.append(torch.zeros(50_000)))
    thread.start()
    thread.join()
    loss.backward()
"""


@pytest.fixture(scope="module")
def beside(shared_recorder: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A graph that is alive when the recording begins, and a thread that allocates beside it."""
    target = tmp_path_factory.mktemp("beside") / "run"
    script = shared_recorder.script(BESIDE.format(directory=str(target)), "beside.py", train=False)
    done = shared_recorder.plain([sys.executable, script])
    assert done.code == 0, done.err
    return _document(target, at="start")


@pytest.mark.thorough
def test_what_other_threads_allocate_is_counted_in_a_notice(beside: dict[str, Any]) -> None:
    said = {notice["slug"]: notice for notice in beside["notices"]}
    assert said["unrecorded-allocations"]["count"] == 1
    assert "(200 kB)" in said["unrecorded-allocations"]["message"]


@pytest.mark.thorough
def test_activations_of_a_graph_from_before_the_window_are_known(
    beside: dict[str, Any], shared_recorder: Any
) -> None:
    if not shared_recorder.has("hasattr(torch._C._autograd.SavedTensor, 'data')"):
        pytest.skip(
            "this PyTorch shows saved tensors only to those who unpack them, which may compute"
        )
    held = {(row["category"], row["evidence"]): row["bytes"] for row in _cpu(beside)["categories"]}
    # the input of the linear layer and the result of the relu
    assert held["activation", "census"] == 4 * 32 * 64 + 4 * 32 * 256
    assert held["parameter", "census"] == 4 * (64 * 256 + 256)
    (gone,) = [notice for notice in beside["notices"] if notice["slug"] == "unrecorded-frees"]
    assert gone["count"] >= 1


@pytest.mark.thorough
def test_a_leak_is_told_with_the_line_of_the_program(tmp_path: Path, shared_data: Path) -> None:
    script = shared_data / "failing" / "scripts" / "leak.py"
    run = tmp_path / "run"
    command = [sys.executable, "-m", "traceloom", "record", "--memory", "--stacks", "-o", str(run)]
    subprocess.run(
        [*command, "--", sys.executable, str(script)], capture_output=True, timeout=300, check=True
    )
    (entry,) = build(traceloom.load(run))["ranks"]
    stacks = [row["stack"] for memory in entry["memories"] for row in memory["growth"]]
    assert stacks
    assert all(str(stack).startswith("leak.py(") for stack in stacks)
