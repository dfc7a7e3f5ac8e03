"""Flight records are had from processes that let them be read: by socket, pipe, or a file that is theirs."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.users import ANNA, BERT, needs_users
from support.waiting import until
from traceloom.agent.hangs import flight_recorder
from traceloom.agent.hangs.flight_recorder import NoFlightDumpError, fetch_flight_record
from traceloom.agent.ownership.environment import create_flight_variables
from traceloom.agent.ownership.model import Owner, Process
from traceloom.formats.flight_recorder import MAX_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is for Linux")
RECORD = {"version": "2.10", "entries": [], "pg_status": {}, "pg_config": {}}
# As ProcessGroupNCCL does: it makes the pipe, looks at it again and again, and writes a file when it reads something.
NCCL = """
import os, pickle, sys, time
pipe, dump = sys.argv[1:]
os.mkfifo(pipe)
handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("up", flush=True)
while not os.read(handle, 128):
    time.sleep(0.02)
content = pickle.dumps({"version": "2.10", "entries": [], "asked": True}, 2)
with open(dump, "wb") as file:
    file.write(content[:20])
    file.flush()
    time.sleep(0.6)
    file.write(content[20:])
time.sleep(3600)
"""
# As torch's control server, but that its answers are the test's.
SERVER = """
import http.server, socketserver, sys
path, answer = sys.argv[1], sys.argv[2]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/handler/fr_trace_json"
        self.send_response(int(answer) if answer.isdecimal() else 200)
        self.end_headers()
        if answer == "endless":
            while True:
                self.wfile.write(b" " * (1 << 20))
        self.wfile.write(b'{"version": "2.10", "entries": []}')
    def address_string(self):
        return ""
    def log_message(self, *_):
        pass

with socketserver.UnixStreamServer(path, Handler) as server:
    print("up", flush=True)
    server.serve_forever()
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tl") as name:
        yield Path(name)


def rank(pid: int, *, uid: int = -1, **declared: str) -> Process:
    return Process(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=0,
        parent_pid=1,
        uid=os.geteuid() if uid < 0 else uid,
        command="",
        declared=declared,
        owner=Owner(job="j", rank=3),
    )


def test_a_process_that_was_not_started_for_it() -> None:
    with pytest.raises(NoFlightDumpError, match="it was not started for that"):
        fetch_flight_record(rank(os.getpid()), time.time_ns())


def test_the_pipe_makes_it_write_a_dump_that_is_read_when_it_is_whole(short: Path) -> None:
    nccl = started(NCCL, f"{short}/fr3.pipe", f"{short}/dump3")
    process = rank(
        nccl.pid,
        TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{short}/fr",
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE=f"{short}/dump",
    )
    try:
        dump = fetch_flight_record(process, time.time_ns())
    finally:
        nccl.kill()
        nccl.communicate()
    assert pickle.loads(dump.data) == {"version": "2.10", "entries": [], "asked": True}
    assert (dump.kind, dump.how) == ("pickle", "asked by its pipe")


def test_what_agent_env_prepares_is_what_is_asked_for() -> None:
    variables, others = create_flight_variables(), create_flight_variables()
    assert variables != others  # of two jobs on one host neither takes the other's pipe away
    pipe = Path(f"{variables['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}3.pipe")
    dump = Path(f"{variables['TORCH_FR_DUMP_TEMP_FILE']}3")
    nccl = started(NCCL, str(pipe), str(dump))
    try:
        assert (
            fetch_flight_record(rank(nccl.pid, **variables), time.time_ns()).how
            == "asked by its pipe"
        )
    finally:
        nccl.kill()
        nccl.communicate()
        pipe.unlink()
        dump.unlink(missing_ok=True)


def test_a_pipe_that_another_process_has_is_not_written_to(short: Path) -> None:
    os.mkfifo(short / "fr3.pipe")
    reader = os.open(short / "fr3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = started("print('up', flush=True); import time; time.sleep(3600)")
    try:
        with pytest.raises(NoFlightDumpError, match="has not opened the pipe"):
            fetch_flight_record(
                rank(child.pid, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{short}/fr"), time.time_ns()
            )
        assert os.read(reader, 10) == b""  # nobody has written
    finally:
        os.close(reader)
        child.kill()
        child.communicate()


def test_what_the_watchdog_has_written_counts_if_it_is_of_this_hang(tmp_path: Path) -> None:
    path = tmp_path / "fr3"
    path.write_bytes(pickle.dumps(RECORD, 2))
    process = rank(os.getpid(), TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/fr")
    since_ns = path.stat().st_mtime_ns
    dump = fetch_flight_record(process, since_ns)
    assert (dump.kind, dump.how) == ("pickle", "its watchdog has written it")
    with pytest.raises(NoFlightDumpError):
        fetch_flight_record(process, since_ns + 1)


def link(path: Path) -> None:
    target = path.with_name("secret")
    target.write_bytes(pickle.dumps(RECORD, 2))
    path.symlink_to(target)


def second_name(path: Path) -> None:
    other = path.with_name("secret")
    other.write_bytes(pickle.dumps(RECORD, 2))
    path.hardlink_to(other)


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    path.write_bytes(pickle.dumps(RECORD, 2))
    os.chown(path, 4001, 4001)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)


def with_code(path: Path) -> None:
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")


@pytest.mark.parametrize(
    "make", [link, second_name, of_another_user, large, with_code, os.mkfifo, Path.mkdir]
)
def test_no_other_file_is_read(tmp_path: Path, make: object) -> None:
    make(tmp_path / "fr3")  # type: ignore[operator]
    with pytest.raises(NoFlightDumpError) as raised:
        fetch_flight_record(rank(os.getpid(), TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/fr"), 0)
    assert str(raised.value)


@pytest.mark.parametrize("answer", ["record", "endless", "500"])
def test_a_control_server_is_asked(short: Path, answer: str) -> None:
    server = started(SERVER, f"{short}/w", answer)
    try:
        process = rank(server.pid, TORCH_WORKER_SERVER_SOCKET=f"{short}/w")
        if answer == "record":
            dump = fetch_flight_record(process, 0)
            assert (dump.kind, dump.how) == ("json", "asked its control server")
        else:
            with pytest.raises(NoFlightDumpError, match=r"does not come to an end|answers 500"):
                fetch_flight_record(process, 0)
    finally:
        server.kill()
        server.communicate()


def test_a_socket_of_another_process_is_not_asked(short: Path) -> None:
    server = started(SERVER, f"{short}/w", "record")
    child = started("print('up', flush=True); import time; time.sleep(3600)")
    try:
        until((short / "w").exists)
        with pytest.raises(NoFlightDumpError, match="another process listens"):
            fetch_flight_record(rank(child.pid, TORCH_WORKER_SERVER_SOCKET=f"{short}/w"), 0)
    finally:
        for process in (server, child):
            process.kill()
            process.communicate()


def test_without_a_rank_there_is_none() -> None:
    import msgspec

    process = msgspec.structs.replace(rank(os.getpid()), owner=Owner(job="j"))
    with pytest.raises(NoFlightDumpError, match="no rank"):
        fetch_flight_record(process, 0)


@needs_users
def test_nothing_is_written_into_a_pipe_of_another_user(short: Path) -> None:
    """Who can name a pipe can have it open without the right to use it, by O_PATH."""
    short.chmod(0o755)
    os.mkfifo(short / "fr3.pipe", 0o600)
    os.chown(short / "fr3.pipe", ANNA, ANNA)
    reader = os.open(short / "fr3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    text = "import os, sys; f = os.open(sys.argv[1], os.O_PATH); print('up', flush=True); input()"
    command = ["setpriv", f"--reuid={BERT}", f"--regid={BERT}", "--clear-groups"]
    command += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    holder = subprocess.Popen(
        [*command, sys.executable, "-c", text, str(short / "fr3.pipe")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        process = rank(holder.pid, uid=BERT, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=f"{short}/fr")
        with pytest.raises(NoFlightDumpError, match=f"no file of user {BERT}"):
            fetch_flight_record(process, time.time_ns())
        assert os.read(reader, 10) == b""  # nobody has written
    finally:
        os.close(reader)
        holder.kill()
        holder.communicate()


def test_a_control_server_that_drips_is_waited_for_as_long_as_for_one_that_is_silent(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_SERVER_TIMEOUT_S", 0.5)
    sent = 0

    def drip(listener: socket.socket) -> None:
        nonlocal sent
        peer, _ = listener.accept()
        with contextlib.suppress(OSError):
            while sent < 200:
                peer.sendall(b"H")
                sent += 1
                time.sleep(0.05)
        peer.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{short}/s")
        listener.listen()
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        with pytest.raises(NoFlightDumpError):
            fetch_flight_record(
                rank(os.getpid(), TORCH_WORKER_SERVER_SOCKET=f"{short}/s"), time.time_ns()
            )
        dripping.join()
    assert sent < 200, "it was waited for as long as it dripped"
