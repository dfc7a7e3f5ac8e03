"""`traceloom.record`, `traceloom.step` and `traceloom.scope` inside a program."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def test_a_block_of_code_is_recorded_with_its_scopes(recorder: Any) -> None:
    script = recorder.script(
        """
        import sys, asyncio, traceloom
        @traceloom.scope("decorated")
        def decorated(): torch.ones(3) + 1
        @traceloom.scope("sliced")
        def sliced():
            torch.ones(3) + 1
            got = yield 1
            torch.ones(3) * got
            return "end"
        @traceloom.scope("task")
        async def task():
            for _ in range(2):
                torch.ones(3) + 1
                await asyncio.sleep(0)
            return 5
        async def both(): return await asyncio.gather(task(), task())
        before = set(sys.modules)
        with traceloom.record("block") as recording:
            with traceloom.scope("outer"):
                with traceloom.scope('say "hi"\\n'):
                    step()
                decorated()
            generator = sliced()
            assert next(generator) == 1
            try: generator.send(2)
            except StopIteration as end: assert end.value == "end"
            assert asyncio.run(both()) == [5, 5]
        print(recording.path, recording.active)
        print(sorted({"polars", "numpy", "rich"} & (set(sys.modules) - before)))
        """
    )
    run = recorder.plain([sys.executable, script])
    assert run.code == 0, run.err
    assert run.out.splitlines() == ["block False", "[]"]
    run.directory = recorder.tmp_path / "block"
    names = run.names()
    assert names.count("traceloom.scope:outer") == 1
    assert names.count("traceloom.scope:outer.say %22hi%22%0A") == 1
    assert names.count("traceloom.scope:outer.decorated") == 1
    assert names.count("traceloom.scope:sliced") == 2, "one region for each slice of a generator"
    assert names.count("traceloom.scope:task") == 6, "two tasks of three slices each"
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in run.events()
        if event.get("name") == "traceloom.scope:task"
    )
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert run.rank()["window"]["kind"] == "block"
    assert run.rank()["ended"] == "block"
    assert run.ours == ["traceloom: wrote `block`; next: traceloom report block"]
    assert run.theirs == ""
    again = recorder.plain(
        [sys.executable, "-c", "import traceloom; traceloom.record('block').__enter__()"]
    )
    assert (again.code, "holds a capture already" in again.err) == (1, True)


def test_a_process_is_recorded_once_and_what_was_never_reached_does_not_count(
    recorder: Any,
) -> None:
    script = recorder.script(
        """
        import traceloom
        with traceloom.record("never", steps="20..25", quiet=True): step()
        with traceloom.record("chosen", steps="2..4", graph_step=True) as chosen: [step() for _ in range(6)]
        for name in ("again", "chosen"):
            with traceloom.record(name, steps="2..4", force=True) as again: [step() for _ in range(6)]
            print(again.active, again.path)
        """
    )
    run = recorder.plain([sys.executable, script])
    assert (run.code, run.out, run.theirs) == (0, "False again\nFalse chosen\n", "")
    never, wrote, before = run.ours
    assert never.endswith("it made 1 steps [nothing-recorded]")
    assert wrote == "traceloom: wrote `chosen`; next: traceloom report chosen"
    assert before.endswith("[recorded-before]"), "it is said once"
    assert not (recorder.tmp_path / "again").exists()
    run.directory = recorder.tmp_path / "chosen"
    assert run.marks() == [2, 3, 4]
    assert run.rank()["graph_step"]["step"] == 4


def test_the_command_line_goes_on_where_the_program_records_itself(recorder: Any) -> None:
    run = recorder.python(
        """
        import traceloom
        with traceloom.record("inner", steps="1..3") as recording:
            for _ in range(10): step()
        print(recording.path.name, recording.active)
        """
    )
    assert run.out == "run False\n"
    assert any("[already-recording]" in line for line in run.ours)
    assert run.marks() == [3, 4, 5, 6, 7, 8]


def test_nothing_of_ours_stays_behind_after_a_block(recorder: Any) -> None:
    script = recorder.script(
        """
        import os, signal, threading, json, traceloom
        import torch.autograd.profiler as profiler
        from torch.optim import optimizer as hooks
        def state():
            module = torch.nn.modules.module
            return [
                str(os._exit), str(signal.getsignal(signal.SIGTERM)), profiler.profile.__exit__.__qualname__,
                torch.profiler.profile.step.__module__, len(hooks._global_optimizer_pre_hooks),
                len(hooks._global_optimizer_post_hooks), len(module._global_forward_pre_hooks),
            ]
        before = state()
        with traceloom.record("block", steps="1..3"): [step() for _ in range(5)]
        print(json.dumps([before, state()]))
        """
    )
    run = recorder.plain([sys.executable, script])
    before, after = json.loads(run.out)
    assert before == after


def test_without_torch_a_scope_does_nothing_and_a_recording_says_why(recorder: Any) -> None:
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import importlib.util, traceloom
importlib.util.find_spec = lambda name: None
with traceloom.scope("a"): print("in")
traceloom.step()
try: traceloom.record("x").__enter__()
except traceloom.CaptureError as error: print(error.slug)
"""
    run = recorder.plain([sys.executable, "-c", code])
    assert (run.out, run.err) == ("in\nno-torch\n", "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ('torch.__version__ = "2.7.1+cu118"', "torch 2.8 or newer is needed, this is 2.7.1+cu118"),
        ('torch.__version__ = "2.4.0a0+git1"', "torch 2.8 or newer is needed"),
        ("del torch._C._autograd._toggle_collection_dynamic", "it lacks `_toggle_collection_"),
        ("del torch.autograd.profiler.profile._prepare_trace", "it lacks `_prepare_trace`"),
    ],
)
def test_a_torch_that_cannot_be_recorded_safely_is_told_and_the_program_goes_on(
    recorder: Any, change: str, why: str
) -> None:
    script = recorder.script(
        f"""
        import traceloom
        {change}
        with traceloom.record("block") as recording: step()
        print(recording.active)
        """
    )
    run = recorder.plain([sys.executable, script])
    assert (run.code, run.out) == (0, "False\n")
    (line,) = run.ours
    assert line.startswith(f"traceloom: nothing is recorded: {why}")
    assert line.endswith("[unsupported-torch]")
    assert not (recorder.tmp_path / "block").exists()


def test_under_the_command_line_too(recorder: Any) -> None:
    """The version is looked at when torch is imported, so a package of that name stands for an old one."""
    folder = recorder.tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '2.7.0'")
    run = recorder.python("import torch; print(torch.__version__)", train=False)
    assert (run.code, run.out) == (0, "2.7.0\n")
    assert "[unsupported-torch]" in run.ours[0]
