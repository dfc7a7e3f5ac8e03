"""Programs that recording once harmed: recorded, they end, print and count as they do unrecorded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support.public_traces import DATA

PROGRAMS = DATA / "failing" / "recording"
OPTIONS: dict[str, tuple[str, ...]] = {
    "F1b_RecordFunctionFast_raises_with_steps.py": ("--steps", "3..8"),
    "n2_memory_epoch_annotation.py": ("--memory",),
    "n14_stacks_threads.py": ("--stacks",),
    "n3_own_observer_inside_annotation.py": ("--graph",),
    "F4_own_ETobserver_segv.py": ("--graph",),
    "n15_csr.py": ("--graph",),
}
ARGUMENTS = {"F2_oploop.py": ["0.5"], "n8_sigterm_in_long_operator.sh": [sys.executable]}
COUNTS = {"F2_oploop.py", "n5_child_stderr_lost.py", "n12_profilers_on_a_thread.py"}
"""Programs that print how far they came, which differs from run to run."""
NAMES = sorted(
    path.name
    for path in (PROGRAMS.iterdir() if PROGRAMS.is_dir() else ())
    if path.suffix in {".py", ".sh"} and path.name != "n9_small_disk.sh"
)

OFTEN = ("F1_R", "F3", "n2", "n5", "n15")
CASES = [
    pytest.param(name, marks=[] if name.startswith(OFTEN) else pytest.mark.thorough)
    for name in NAMES
]

pytestmark = [
    pytest.mark.torch,
    pytest.mark.data,
    pytest.mark.skipif(
        not NAMES, reason="the programs (../shared/data/failing) are not on this machine"
    ),
]


def without_counts(text: str) -> str:
    return re.sub(r"\d+", "N", text)


def without_times(text: str) -> str:
    """Lines that PyTorch writes from C++ have the time and the process in front."""
    return re.sub(r"^(\[[IWE]\d+|[A-Z]+:\d).*? (?=\S+\.cpp:)", "", text, flags=re.MULTILINE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_program_that_was_harmed_ends_as_it_does_unrecorded(recorder: Any, name: str) -> None:
    start = ["sh"] if name.endswith(".sh") else [sys.executable]
    command = [*start, str(PROGRAMS / name), *ARGUMENTS.get(name, [])]
    plain = recorder.plain(command)
    run = recorder.record(command, *OPTIONS.get(name, ()))
    if name in COUNTS:
        assert without_counts(run.out) == without_counts(plain.out)
        lines, others = (
            {line for line in without_times(text).splitlines() if "External init" not in line}
            for text in (run.theirs, plain.err)
        )
        assert lines == others
        if name.startswith("n5"):  # each child says a line
            assert run.out == f"children {run.theirs.count('child')}\n"
        plain.out, plain.err = run.out, run.theirs
    said, expected = without_times(run.theirs), without_times(plain.err)
    assert (run.code, run.out, said) == (plain.code, plain.out, expected), run.err
    assert plain.code in {0, 1, 124}, "the program itself must not be what fails"
    assert not any("[recorder-failed]" in line for line in run.ours) or name.startswith("n10")


@pytest.mark.thorough
def test_a_small_disk_keeps_room_for_the_program(recorder: Any) -> None:
    script = str(PROGRAMS / "n9_small_disk.sh")
    plain = recorder.plain(["sh", script, sys.executable])
    if plain.code == 99:
        pytest.skip("a small file system cannot be mounted here")
    traceloom = Path(sys.executable).with_name("traceloom")
    run = recorder.plain(["sh", script, sys.executable, str(traceloom), "--duration 2"])
    assert (run.code, run.out) == (plain.code, plain.out) == (0, "written\n"), run.err


MEASURE = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def test_recording_takes_no_more_memory_than_it_is_given(recorder: Any) -> None:
    """The largest process of all that a run has, forks too, against that of the unrecorded run."""
    program = [sys.executable, str(PROGRAMS / "F2_oploop.py"), "3"]
    shell = [sys.executable, "-c", "import sys; from traceloom.cli import main; sys.exit(main())"]
    options = ["record", "-o", str(recorder.directory), "--max-memory", "100MB", "--"]
    peaks = []
    for command in (program, [*shell, *options, *program]):
        run = recorder.plain([sys.executable, "-c", MEASURE, *command])
        code, peak = map(int, run.out.split())
        assert code == 0, run.err
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 110_000_000, [f"{peak / 1e6:.0f} MB" for peak in peaks]
    run.directory = recorder.directory
    assert "[budget-reached]" in run.err
    assert run.rank()["window"] is not None


THREADS = """
import os, sys, threading
seen = set()
def look(): seen.add((threading.active_count(), tuple(t.name for t in threading.enumerate())))
for number in range(14):
    step()
    if number > 1: look()
print(sorted(seen))
print(len(os.listdir("/proc/self/task")), file=sys.stderr)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [(), ("--graph",), ("--steps", "3..5"), ("--memory",)])
def test_a_program_that_steps_has_the_threads_that_it_had(
    recorder: Any, options: tuple[str, ...]
) -> None:
    script = recorder.script(THREADS)
    run = recorder.record([sys.executable, script], *options)
    plain = recorder.plain([sys.executable, script])
    assert run.out == "[(1, ('MainThread',))]\n" == plain.out
    assert int(run.theirs) <= int(plain.err) + 1, "Kineto has a thread of its own from its start on"
    assert run.rank()["window"]["kind"] == "steps"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [1, 10])
def test_a_fork_of_a_recorded_process_ends_by_itself(recorder: Any, at: int) -> None:
    """Kineto has a thread that a fork has not, for which its exit handler would wait."""
    run = recorder.python(
        f"""
        import os, sys
        for number in range(14):
            step()
            if number == {at} and not (child := os.fork()):
                print("in the fork")
                sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert (run.code, run.out, run.theirs) == (0, "in the fork\n3\n", "")
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert len(run.capture["ranks"]) == 1


def test_children_that_the_program_waits_for_are_its_own(recorder: Any) -> None:
    run = recorder.python(
        """
        import os
        for _ in range(12): step()
        try: print("a child of ours", os.waitpid(-1, os.WNOHANG))
        except ChildProcessError: print("none")
        """
    )
    assert run.out == "none\n"
    assert run.marks() == [3, 4, 5, 6, 7, 8]


@pytest.mark.thorough
def test_in_a_fork_a_profiler_of_the_program_works(recorder: Any) -> None:
    run = recorder.python(
        """
        import os
        from torch.profiler import profile, ProfilerActivity
        for number in range(12):
            step()
            if number in (0, 5, 10) and not (child := os.fork()):
                with profile(activities=[ProfilerActivity.CPU]) as mine: torch.ones(3) + 1
                print(sum(event.name == "aten::add" for event in mine.events()), flush=True)
                os._exit(0)
            if number in (0, 5, 10): os.waitpid(child, 0)
        """
    )
    assert (run.code, run.out) == (0, "1\n1\n1\n")


def test_signals_of_the_program_are_as_they_were(recorder: Any) -> None:
    text = """
import signal
def state(): return [(number, str(signal.getsignal(number))) for number in sorted(signal.valid_signals())]
before = state()
for _ in range(12): step()
print(state() == before, before)
"""
    script = recorder.script(text)
    run = recorder.record([sys.executable, script])
    assert run.out == recorder.plain([sys.executable, script]).out
