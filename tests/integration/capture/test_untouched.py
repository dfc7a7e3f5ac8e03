"""The program is not changed by being recorded: output, exit code, modules, path, start-up."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def test_output_errors_and_exit_code_are_those_of_an_unrecorded_run(recorder: Any) -> None:
    (recorder.tmp_path / "site").mkdir()
    (recorder.tmp_path / "site/sitecustomize.py").write_text(
        "import builtins; builtins.mine = 'chained'\n"
    )
    recorder.source = f"{recorder.source}{os.pathsep}{recorder.tmp_path / 'site'}"
    script = recorder.script(
        """
        import os, sys, builtins, sitecustomize
        print("args", sys.argv[1:], builtins.mine, sitecustomize.__file__)
        for number in range(12):
            step()
            print("step", number)
            os.write(2, b"raw line\\n")
            print("to stderr", number, file=sys.stderr)
        heavy = {"polars", "msgspec", "isal", "rich", "numpy", "pyarrow"}
        print("heavy", sorted(heavy & set(sys.modules)))
        print("path", sys.path)
        print("loader", torch.__spec__.loader is torch.__loader__, type(torch.__loader__).__name__)
        sys.exit(3)
        """
    )
    command = [sys.executable, script, "a b", "--steps", "x"]
    plain, run = recorder.plain(command), recorder.record(command)
    assert "chained" in plain.out
    assert run.out == plain.out
    assert run.theirs == plain.err
    assert (run.code, plain.code) == (3, 3)
    assert len(run.ours) == 2
    assert run.rank()["ended"] == "exit"
    assert run.marks() == [3, 4, 5, 6, 7, 8]


@pytest.mark.thorough
def test_a_module_with_dashes_and_a_script_with_a_shebang_are_recorded(recorder: Any) -> None:
    package = recorder.tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = Path(recorder.script("for _ in range(2): step()"))
    (package / "__main__.py").write_text(source.read_text())
    run = recorder.record([sys.executable, "-m", "pkg"])
    assert len(run.rank()["steps"]["start_ns"]) == 2
    script = recorder.tmp_path / "tool"
    script.write_text(f"#!{sys.executable}\n{source.read_text()}")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    run = recorder.record([str(script)], "--force")
    assert len(run.rank()["steps"]["start_ns"]) == 2


@pytest.mark.parametrize(
    "options",
    [
        (),
        *(pytest.param(o, marks=pytest.mark.thorough) for o in (("--stacks",), ("--memory",))),
    ],
)
def test_the_users_own_profile_holds_no_event_of_ours(
    recorder: Any, options: tuple[str, ...]
) -> None:
    script = recorder.script(
        """
        import json
        cycle = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
        for stack in (False, True):
            kept = []
            def save(profiler):
                profiler.export_chrome_trace("theirs.json")
                kept.append([event.get("name", "") for event in json.load(open("theirs.json"))["traceEvents"]])
            with torch.profiler.profile(schedule=cycle, with_stack=stack, on_trace_ready=save) as profiler:
                for _ in range(10): step(); profiler.step()
            ours = [name for names in kept for name in names if "traceloom" in name]
            print(len(kept), sum(name.startswith("Optimizer.step") for names in kept for name in names), ours)
        """
    )
    run = recorder.record([sys.executable, script], *options)
    assert run.out == "2 4 []\n2 4 []\n", run.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("command", "slug"),
    [
        (["-c", "print('no torch here')"], "no-torch"),
        (["-E", "-c", "import torch"], "no-hook"),
        (["-I", "-c", "print(1)"], "no-hook"),
        (["-c", "import torch"], "no-torch-calls"),
        (
            ["-c", "import os, signal, torch; torch.ones(3); os.kill(os.getpid(), signal.SIGKILL)"],
            "ended-unseen",
        ),
        (["-c", "import os, torch, subprocess; os.execv('/bin/true', ['true'])"], "ended-unseen"),
    ],
)
def test_a_command_that_cannot_be_recorded_says_why(
    recorder: Any, command: list[str], slug: str
) -> None:
    run = recorder.record([sys.executable, *command])
    killed = "SIGKILL" in command[-1]
    assert run.code == (-9 if killed else 0), "the exit code is the command's"
    assert not killed or "SIGKILL ended the command" in run.ours[0]
    assert len(run.ours) == 1
    assert run.ours[0].endswith(f"[{slug}]")
    assert not run.directory.exists(), "an empty capture is not left behind"


def test_a_command_that_does_not_exist_and_a_capture_that_does_are_refused(recorder: Any) -> None:
    run = recorder.record(["no-such-command"])
    assert (run.code, "#command-not-found" in run.err) == (2, True)
    assert not run.directory.exists()
    run.directory.mkdir()
    (run.directory / "capture.json").write_text("{}")
    (run.directory / "mine.txt").write_text("keep me")
    run = recorder.record([sys.executable, "-c", "print(1)"])
    assert (run.code, run.out, "#capture-exists" in run.err) == (3, "", True)
    run = recorder.record([sys.executable, "-c", "print(1)"], "--force")
    assert (run.code, run.out) == (0, "1\n")
    assert run.files == {"capture.json", "mine.txt"}, "an empty recording replaces nothing"


ENDINGS = {
    "exception": ("raise KeyError('mine')", 1, "exception: KeyError"),
    "exit": ("import sys; sys.exit(4)", 4, "exit"),
    "os._exit": (
        "import os, threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nos._exit(5)",
        5,
        "os._exit",
    ),
    "own handler": (
        """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)""",
        9,
        "exit",
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_program_ends_what_was_recorded_is_kept(recorder: Any, ending: str) -> None:
    code, status, reason = ENDINGS[ending]
    run = recorder.python(f"for _ in range(6): step()\n{code}")
    assert run.code == status
    assert run.rank()["ended"] == reason
    assert run.rank()["window"]["step_count"] == 3
    assert run.marks()[:4] == [3, 4, 5, 6]
    assert run.names().count("Optimizer.step#Plain.step") == 3


def interrupt_when_ready(process: subprocess.Popen[str], sign: signal.Signals) -> tuple[str, str]:
    """Wait for the line `ready`, then press Ctrl-C in the terminal: the whole process group gets it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready"):
            break
    time.sleep(0.2)
    os.killpg(process.pid, sign)
    out, err = process.communicate(timeout=300)
    return "".join(lines) + out, err


FOREVER = "import time\nfor _ in range(6): step()\nprint('ready', flush=True)\nfor _ in range(6000): time.sleep(0.01)"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_ctrl_c_keeps_what_was_recorded(recorder: Any, launcher: str) -> None:
    script = recorder.script(FOREVER)
    command = [sys.executable, script] if launcher == "python" else recorder.torchrun(script, 1)
    process = recorder.popen(command, start_new_session=True)
    _, err = interrupt_when_ready(process, signal.SIGINT)
    assert process.returncode == (-signal.SIGINT if launcher == "python" else 1), err
    run = type(recorder.plain(["true"]))(process.returncode, "", err, recorder.directory)
    assert run.rank()["window"]["step_count"] == 3
    assert run.names().count("Optimizer.step#Plain.step") == 3


def test_a_forked_child_that_works_on_does_not_touch_the_recording(recorder: Any) -> None:
    run = recorder.python(
        """
        import os
        for number in range(12):
            step()
            if number in (1, 4, 7):  # in the early part, in the window, in the graph step
                child = os.fork()
                if child == 0:
                    for _ in range(3): step()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        """,
        "--graph",
    )
    assert run.code == 0
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert {part["rank"] for part in run.capture["ranks"]} == {0}
    nodes = run.json("rank0.host.json.gz")["nodes"]
    assert sum(node["name"].startswith("Optimizer.step#") for node in nodes) == 1
    assert run.files == {
        "capture.json",
        "rank0.capture.json",
        "rank0.kineto.json.gz",
        "rank0.graph.kineto.json.gz",
        "rank0.host.json.gz",
    }


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    """A file system of 64 kB."""
    place = tmp_path / "tiny"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("a tiny file system cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_nothing_is_lost(recorder: Any, tiny_disk: Path) -> None:
    recorder.directory = tiny_disk / "run"
    refuge = recorder.tmp_path / "tmp"
    refuge.mkdir()
    recorder.env["TMPDIR"] = str(refuge)
    run = recorder.python("for _ in range(40): step()\nimport sys; sys.exit(6)", "--steps", "3..33")
    assert run.code == 6
    assert any("[capture-moved]" in line for line in run.ours)
    kept = {path.name for path in refuge.rglob("*") if path.is_file()}
    assert "rank0.kineto.json.gz" in kept or "rank0.kineto.json" in kept


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["in Python", "in C"])
def test_sigterm_ends_a_program_at_once_and_what_was_written_stays(
    recorder: Any, where: str
) -> None:
    hangs = {
        "in Python": "while True: time.sleep(0.01)",
        # C code that does not come back for a signal, as a collective that waits for its peer.
        "in C": """library = ctypes.CDLL(None)
library.pthread_mutex_lock(ctypes.byref((mutex := (ctypes.c_char * 64)())))
library.pthread_mutex_lock(ctypes.byref(mutex))""",
    }
    text = """
import ctypes, os, threading, time
for _ in range(12): step()
while not os.path.exists("run/capture.json"): time.sleep(0.02)
def kill(): time.sleep(0.3); os.kill(os.getpid(), 15)
threading.Thread(target=kill, daemon=True).start()
"""
    run = recorder.python(text + hangs[where])
    assert run.code == -signal.SIGTERM
    assert run.theirs == ""
    assert run.rank()["window"]["step_count"] == 5
    assert run.marks() == [3, 4, 5, 6, 7, 8]


@pytest.mark.thorough
def test_a_program_that_ends_by_sigterm_before_anything_is_written_says_so(recorder: Any) -> None:
    run = recorder.python("import os\nfor _ in range(5): step()\nos.kill(os.getpid(), 15)")
    assert run.code == -signal.SIGTERM
    assert run.ours[-1].endswith("[ended-unseen]")
    assert not run.directory.exists()


@pytest.mark.thorough
def test_a_skipped_step_of_a_gradient_scaler_is_a_step(recorder: Any) -> None:
    run = recorder.python(
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(6):
            loss = model(torch.randn(8, 16)).square().mean()
            if number == 2: loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
        """,
        "--steps",
        "4..5",
    )
    assert len(run.rank()["steps"]["start_ns"]) == 6
    assert run.marks() == [4, 5]


def test_a_window_that_was_written_survives_sigkill(recorder: Any) -> None:
    run = recorder.python(
        """
        import os, signal, time
        for _ in range(10): step()
        while not os.path.exists("run/capture.json"): time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert run.code == -signal.SIGKILL
    assert run.rank()["ended"] == "running"
    assert run.capture["run"]["signal"] == signal.SIGKILL
    assert run.marks() == [3, 4, 5, 6, 7, 8]


@pytest.mark.thorough
def test_asking_for_torch_before_importing_it_hides_nothing(recorder: Any) -> None:
    run = recorder.python(
        """
        import importlib.util
        assert importlib.util.find_spec("torch") is not None
        import polars
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        """,
        "--steps",
        "0..2",
        train=False,
    )
    assert run.code == 0, run.err
    assert run.marks() == [0, 1, 2]
