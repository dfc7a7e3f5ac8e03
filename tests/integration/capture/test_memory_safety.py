"""Recording never writes into the program's memory: freed blocks keep their canaries, whatever crosses a recorder's end.

PyTorch writes the end of an annotation or operator into memory of the recorder under which it began. `quarantine.c` never
gives such blocks back, but fills them with canaries, so that one write is enough to be found.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
# One step with a `with` around what stands for BODY; LOOP is the whole program.
AROUND = {
    "the step": "for _ in range(12):\n    with record_function('train_step'): step()",
    "two steps": "for _ in range(6):\n    with record_function('two'): step(); step()",
    "every step": "with record_function('epoch'):\n    for _ in range(12): step()",
    "a step that raises": """
for number in range(12):
    try:
        with record_function('raises'):
            step()
            raise ValueError
    except ValueError: pass""",
    "a slice of a generator": """
def batches():
    with record_function('loader'):
        while True: yield torch.ones(3).sum()
source = batches()
for _ in range(12): next(source); step()""",
    "what another thread does": """
import threading
over = threading.Event()
def work():
    while not over.is_set():
        with record_function('thread'):
            for _ in range(20): torch.ones(50, 50) @ torch.ones(50, 50)
            over.wait(0.002)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(12): step()
over.set()
for thread in threads: thread.join()""",
    "the backward pass that makes the step": """
first = next(model.parameters())
first.register_post_accumulate_grad_hook(lambda _: optimizer.step())
for _ in range(12): model(torch.randn(4, 16)).sum().backward()""",
    "a compiled step": """
@torch.compile(backend="eager")
def whole(batch):
    loss = model(batch).square().mean()
    torch._dynamo.graph_break()
    step()
    return loss
for _ in range(12): whole(torch.randn(8, 16))""",
    "the user's profiler": """
def profiled(**schedule):
    with torch.profiler.profile(schedule=torch.profiler.schedule(**schedule)) as profiler:
        for _ in range(12): step(); profiler.step()
for wait, warmup, active, repeat in ((1, 1, 2, 0), (2, 1, 1, 1), (0, 1, 3, 2), (4, 1, 1, 0), (0, 0, 20, 1)):
    profiled(wait=wait, warmup=warmup, active=active, repeat=repeat)""",
    "a profiler around an annotation around steps": """
for _ in range(3):
    with record_function('outer'):
        step()
        with torch.profiler.profile():
            with record_function('inner'):
                for _ in range(6): step()
        step()""",
    "a collective that is under way": """
import torch.distributed as dist
store = dist.HashStore()
dist.init_process_group('gloo', store=store, rank=0, world_size=1)
for _ in range(12):
    work = dist.all_reduce(torch.ones(10), async_op=True)
    step()
    work.wait()""",
}


@pytest.fixture(scope="session")
def quarantine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that finds writes into freed memory."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("quarantine") / "quarantine.so"
    source = HERE / "quarantine.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def dead_canaries(report: Path) -> tuple[int, int]:
    """How many blocks were looked at, and how many of them had been written to."""
    counts = [tuple(map(int, line.split())) for line in report.read_text().splitlines()]
    return sum(kept for kept, _ in counts), sum(dead for _, dead in counts)


def test_the_quarantine_finds_what_pytorch_does_by_itself(recorder: Any, quarantine: Path) -> None:
    text = """
    import torch
    def profiler(): return torch.autograd.profiler.profile(use_kineto=True)
    first = profiler().__enter__()
    annotation = torch.profiler.record_function("open").__enter__()
    first.__exit__(None, None, None)
    second = profiler().__enter__()
    annotation.__exit__(None, None, None)
    second.__exit__(None, None, None)
    """
    report = recorder.tmp_path / "report"
    recorder.env |= {"LD_PRELOAD": str(quarantine), "QUARANTINE": str(report)}
    assert recorder.plain([sys.executable, recorder.script(text, train=False)]).code == 0
    kept, dead = dead_canaries(report)
    assert (kept > 0, dead) == (True, 1), "the tests below could not fail"


OPTIONS = {
    "plain": (),
    "memory": ("--memory",),
    "stacks": ("--stacks",),
    "graph": ("--graph",),
}
OFTEN = {
    ("the step", "stacks"),
    ("two steps", "memory"),
    ("a slice of a generator", "plain"),
    ("what another thread does", "plain"),
    ("the backward pass that makes the step", "plain"),
}
CASES = [
    pytest.param(
        around,
        options,
        id=f"{around}-{name}",
        marks=[] if (around, name) in OFTEN else pytest.mark.thorough,
    )
    for around in AROUND
    for name, options in OPTIONS.items()
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("around", "options"), CASES)
def test_no_freed_block_is_written_to(
    recorder: Any, quarantine: Path, around: str, options: tuple[str, ...]
) -> None:
    report = recorder.tmp_path / "report"
    script = recorder.script(
        "from torch.profiler import record_function\n" + AROUND[around] + "\nprint('done')"
    )
    program = ["env", f"LD_PRELOAD={quarantine}", f"QUARANTINE={report}", sys.executable, script]
    run = recorder.record(program, *options)
    assert (run.code, run.out) == (0, "done\n"), run.err
    kept, dead = dead_canaries(report)
    assert (kept > 100, dead) == (True, 0), run.err
    if around == "the user's profiler":  # there is no moment without one
        assert "[never-reached]" in run.err or run.rank()["window"] is not None, run.err
    else:
        assert run.rank()["window"] is not None, run.err


CHANCES = [
    (),
    ("--memory",),
    ("--stacks",),
    ("--graph",),
    ("--graph", "--memory"),
    ("--steps", "0..2"),
    ("--steps", "1..3"),
    ("--steps", "2..4", "--stacks"),
    ("--after", "0", "--duration", "0.2"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(1, 1001, 50))
def test_programs_made_by_chance_do_the_same_recorded(
    recorder: Any, quarantine: Path, first: int
) -> None:
    script = str(HERE / "nestings.py")
    for seed in range(first, first + 50):
        chance = random.Random(seed)
        options, report = chance.choice(CHANCES), recorder.tmp_path / f"report{seed}"
        checked = [f"LD_PRELOAD={quarantine}", f"QUARANTINE={report}"]
        words = chance.choice([["MALLOC_PERTURB_=165"], ["PYTHONMALLOC=debug"], checked, checked])
        program = ["env", "OMP_NUM_THREADS=1", *words, sys.executable, script, str(seed)]
        dead, results = [], []
        for run in (recorder.plain(program), recorder.record(program, "--force", *options)):
            results.append((run.code, run.out))
            dead.append(dead_canaries(report)[1] if report.exists() else 0)
            report.unlink(missing_ok=True)
        assert results[0] == results[1], (seed, options, words, run.err[-2000:])
        assert dead[1] <= dead[0], (seed, options, "PyTorch alone may do harm to itself, we not")
