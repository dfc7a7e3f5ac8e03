"""Ctrl-C at any instant of any verb: exit code 130, one word, no traceback, nothing half done, no process left."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from traceloom.system import process
from traceloom.testing import TraceBuilder

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks at processes as Linux shows them"
)

UNIX_NS = 1_700_000_000 * 10**9
# Presses Ctrl-C in the terminal, so that every process of the command gets it, at the Nth call of a Python function,
# of whatever module, in whatever state. Counting begins where the command can know of it.
PRESS = """
import atexit, os, signal, sys
at, sys.argv = int(sys.argv[1]), ["traceloom", *sys.argv[2:]]
if not at:
    atexit.register(lambda: print("calls:", calls))
calls = 0
def count(frame, event, argument):
    global calls
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        calls += 1
        if calls == at:
            os.killpg(0, signal.SIGINT)
sys.setprofile(count)
from traceloom.__main__ import console
sys.exit(console())
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that are read by a process each, one file that is decoded by several, and a graph step."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "ranks").mkdir()
    for rank in range(2):
        made = TraceBuilder(rank=rank, world_size=2, base_ns=UNIX_NS, process=10 + rank)
        for step in range(20):
            made.step(step, step * 100, 90).op("aten::mm", step * 100 + 10, 50)
            made.launch("cudaLaunchKernel", step * 100 + 20, 5, correlation=step + 1)
            made.kernel("gemm", step * 100 + 30, 40, correlation=step + 1)
        text = made.metadata(padding=os.urandom(1 << 20).hex()).text().encode()
        (folder / "ranks" / f"rank{rank}.json.gz").write_bytes(gzip.compress(text, 0))
    made.metadata(padding="0" * 30_000_000).write(folder / "large.json")
    return folder


def session(leader: int) -> list[str]:
    """Processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


VERBS = {
    "report of ranks": [
        "report",
        "ranks",
        "--no-cache",
        "-o",
        "{out}/a.html",
        "-o",
        "{out}/a.perfetto.json.gz",
    ],
    "report of one": ["report", "large.json", "-o", "{out}/a.html"],
    "link": ["link", "ranks", "--no-cache", "-o", "{out}/a.graph"],
    "link into a directory": ["link", "ranks", "-o", "{out}/workload"],
    "memory": ["memory", "ranks", "-o", "{out}/a.json"],
    "anonymize": ["anonymize", "ranks", "-o", "{out}/shared", "--map", "{out}/map.json"],
    "record": ["record", "-o", "{out}/run", "--", sys.executable, "-c", "pass"],
}


OFTEN = ("link", "record")  # the others take a minute each


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "verb", [v if v in OFTEN else pytest.param(v, marks=pytest.mark.thorough) for v in VERBS]
)
def test_ctrl_c_at_any_instant_ends_a_verb_at_once_with_130_and_leaves_nothing(
    verb: str, traces: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    def run(instant: int) -> tuple[int, str, str]:
        out, temporary, cache = (tmp_path / f"{name}{instant}" for name in ("out", "tmp", "cache"))
        for folder in (out, temporary, cache):
            folder.mkdir()
        arguments = [argument.format(out=out) for argument in VERBS[verb]]
        environment = {**os.environ, "TMPDIR": str(temporary), "TRACELOOM_CACHE_DIR": str(cache)}
        process = subprocess.Popen(
            [sys.executable, "-c", PRESS, str(instant), *arguments],
            cwd=traces,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        printed, said = process.communicate(timeout=300)
        for _ in range(500):
            if not (running := session(process.pid)):
                break
            time.sleep(0.01)
        assert running == [], f"at call {instant}"
        left = [path for path in (out, cache) for path in path.rglob("*")]
        half = [
            path.name
            for path in left
            if path.name.endswith((".partial", ".old")) or path.name.startswith(".making")
        ]
        assert half + list(map(str, temporary.iterdir())) == [], f"at call {instant}"
        return process.returncode, printed, said

    code, printed, said = run(0)
    assert code == 0, said
    calls = int(printed.rpartition("calls:")[2])
    many = 40 if pytestconfig.getoption("--thorough") else 2
    early = {int(calls ** (part / many)) for part in range(1, many)}
    late = {calls * part // many for part in range(2, many)} | {calls * 97 // 100}
    for instant in sorted(early | late):
        code, _, said = run(instant)
        assert code == (130 if verb != "record" or "interrupted" in said else -signal.SIGINT), (
            f"at {instant}:\n{said}"
        )
        if verb != "record":
            assert said == "traceloom: interrupted\n", f"at {instant}:\n{said}"


def test_what_must_not_be_cut_in_two_is_not(tmp_path: Path) -> None:
    code = """
import os, signal
from traceloom.system import process as leaving
leaving.install_signal_handlers()
with leaving.clean_up_on_exit(lambda: os.write(1, b"undone ")), leaving.defer_signals():
    os.kill(os.getpid(), signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    print("whole", end=" ", flush=True)
print("not here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "whole undone ",
        "traceloom: interrupted\n",
    )


def test_sigterm_cleans_up_too_and_is_still_what_ended_the_process(tmp_path: Path) -> None:
    code = """
import os, signal
from traceloom.system import process as leaving
leaving.install_signal_handlers()
with leaving.clean_up_on_exit(lambda: os.write(1, b"undone")):
    os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "undone")


def test_who_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    code = "from traceloom.system import process as leaving; leaving.install_signal_handlers(); import signal; print(signal.getsignal(signal.SIGINT))"
    command = f"trap '' INT; {sys.executable} -c '{code}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "SIG_IGN" in done.stdout or done.stdout == "1\n"


def test_a_process_that_reads_ends_when_its_parent_is_killed(traces: Path, tmp_path: Path) -> None:
    code = """
import os, signal, sys, threading
from traceloom.system import processes as workers
started = workers.WorkerProcess.__init__
def start(worker, main):
    started(worker, main)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
workers.WorkerProcess.__init__ = start
from traceloom.formats import load
load(sys.argv[1], cache=False)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(traces / "ranks")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    _, said = process.communicate(
        timeout=300
    )  # comes to its end with the last process that could say something
    assert process.returncode == -signal.SIGKILL
    assert said == ""
    for _ in range(1000):
        if not session(process.pid):
            break
        time.sleep(0.01)
    assert session(process.pid) == []


def test_an_embedding_program_unwinds_as_ever() -> None:
    assert signal.getsignal(signal.SIGINT) is not process._exit_on_signal
