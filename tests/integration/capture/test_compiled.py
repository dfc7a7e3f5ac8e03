"""Programs that use torch.compile."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traceloom.workload.replay.kernels import KernelLoader
from traceloom.workload.replay.planning import make_plan

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def test_compiled_models_and_optimizers_are_recorded_and_nothing_is_said_about_our_hooks(
    recorder: Any,
) -> None:
    script = recorder.script(
        """
        import traceloom
        compiled = torch.compile(model, backend="eager")
        update = torch.compile(optimizer.step, backend="eager")
        def forward(batch):
            with traceloom.scope("forward"):
                return compiled(batch).square().mean()
        whole = torch.compile(forward, backend="eager")
        for _ in range(12):
            whole(torch.randn(8, 16)).backward()
            update()
            optimizer.zero_grad()
        print("done")
        """
    )
    plain, run = recorder.plain([sys.executable, script]), recorder.record([sys.executable, script])
    assert (run.code, run.out) == (0, plain.out)
    # Line numbers of processes and times differ; what is said must not.
    said = [re.sub(r"\d+", "N", text) for text in (run.theirs, plain.err)]
    assert said[0] == said[1]
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert len(run.rank()["steps"]["start_ns"]) == 12


LAUNCH = """
import sys
from pathlib import Path
import torch._inductor
from torch._C._profiler import _RecordFunctionFast
cache = Path(sys.argv[1])
source, unused = cache / "le" / "cletters0.py", cache / "le" / "cunused00.py"
source.parent.mkdir(parents=True)
unused.write_text("never launched")
source.write_text('''
class Doubles:
    def run(self, source, target, count, *, stream):
        target[:count].copy_(source[:count] * 2)


triton_poi_fused_mul_0 = Doubles()
''')
large = cache / "clarge000.py"
large.write_bytes(b"#" * ((1 << 20) + 1))
given, doubled = torch.ones(4), torch.empty(4)
# As the launcher of a compiled kernel tells the profiler of each launch, whatever device it is for.
def launch(name, file):
    about = {"kernel_file": str(file), "kernel_backend": "triton", "stream": 0}
    with _RecordFunctionFast(name, (given, doubled, 4), about):
        torch.mul(given, 2, out=doubled)
for number in range(7):
    launch("triton_poi_fused_mul_0", source)
    launch("triton_poi_fused_mul_1", large)
    launch("triton_poi_fused_mul_2", cache / "cgone0000.py")
    step()
"""


@pytest.mark.thorough
def test_sources_of_the_kernels_that_were_launched_come_with_the_graph_step(
    recorder: Any, tmp_path: Path
) -> None:
    script = recorder.script(LAUNCH)
    command = [sys.executable, script, str(tmp_path / "cache")]
    run = recorder.record(command, "--steps", "3..4", "--graph")
    assert run.code == 0
    step = run.rank()["graph_step"]
    assert step["sources"] == ["rank0.host_resources/cletters0.py"]
    text = (tmp_path / "cache" / "le" / "cletters0.py").read_text()
    assert (run.directory / step["sources"][0]).read_text() == text
    (notice,) = run.rank()["notices"]
    assert (notice["slug"], "not copied: 2 " in notice["message"]) == ("sources-left-out", True)
    plan = make_plan(run.directory).ranks[0]
    kernels = plan.kernels
    if not kernels.height:
        pytest.xfail("in a session of all threads PyTorch leaves out what a kernel is called with")
    assert dict(kernels.select("name", "source").iter_rows()) == {
        "triton_poi_fused_mul_0": text,
        "triton_poi_fused_mul_1": None,
        "triton_poi_fused_mul_2": None,
    }
    call = kernels.filter(pl.col("source").is_not_null())["call"][0]
    arguments = plan.calls["arguments"][call]
    assert json.loads(arguments)[2:] == [
        4
    ]  # the stream, which PyTorch puts behind the arguments, is the replay's own
    (tmp_path / "modules").mkdir()
    given, doubled = torch.ones(6), torch.zeros(6)
    loader = KernelLoader(
        plan, torch.device("cpu"), tmp_path / "modules", lacks=lambda _: None, stream=lambda _: 7
    )
    loader.bind(call, arguments)([given, doubled])
    assert doubled.tolist() == [2, 2, 2, 2, 0, 0]
    # Another recording takes its place, with no source; nothing of the earlier one stays.
    again = recorder.record(
        [sys.executable, script, str(tmp_path / "other")],
        "--steps",
        "3..4",
        "--force",
        "--graph",
        "--no-sources",
    )
    assert again.directory == run.directory
    assert "sources" not in again.rank()["graph_step"]
    assert not list(again.directory.glob("*_resources"))
