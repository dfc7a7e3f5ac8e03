"""The agent's client: what was cut is no answer, and whose fault a failure was is said."""

from __future__ import annotations

import json
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from traceloom.cli import trace
from traceloom.cli.upload import FleetClient
from traceloom.errors import CaptureError, InputError, OutputError, PartialError, UsageError
from traceloom.server.client import AgentClient, decode_answer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="tl"))
    yield made
    shutil.rmtree(made)


@contextmanager
def answering(where: Path | socket.socket, *answers: bytes) -> Iterator[list[str]]:
    """Something that listens at `where/s` and sends these, one after the other; the first lines of what was asked."""
    asked: list[str] = []
    with where if isinstance(where, socket.socket) else socket.socket(socket.AF_UNIX) as listener:
        if isinstance(where, Path):
            listener.bind(str(where / "s"))
        listener.listen()
        listener.settimeout(20)

        def answer() -> None:
            for sent in answers:
                connection, _ = listener.accept()
                with connection:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += connection.recv(65_536)
                    first, _, rest = head.partition(b"\r\n\r\n")
                    length = re.search(rb"Content-Length: (\d+)", first)
                    while length and len(rest) < int(length[1]):
                        rest += connection.recv(65_536)
                    asked.append(first.decode().split("\r\n")[0])
                    with connection.makefile("wb") as file:
                        try:
                            file.write(sent)
                            file.flush()
                        except OSError:
                            continue  # the client went

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield asked
        finally:
            thread.join()
            if isinstance(where, Path):
                (where / "s").unlink()


def http(content: bytes, status: int = 200, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return f"HTTP/1.1 {status} X\r\nContent-Length: {size}\r\n\r\n".encode() + content


def as_json(value: object, status: int = 200) -> bytes:
    return http(json.dumps(value).encode(), status)


@pytest.mark.parametrize("sent", [1000, 10, 0])
def test_a_file_that_is_cut_on_its_way_is_no_file(folder: Path, sent: int) -> None:
    """As of an agent that is killed while it sends."""
    client = AgentClient(folder / "s", 30)
    with answering(folder, http(b"x" * sent, length=1000)):
        if sent == 1000:
            client.fetch("requests/1/files/a", folder / "a")
            assert (folder / "a").read_bytes() == b"x" * 1000
        else:
            with pytest.raises(InputError, match="does not answer"):
                client.fetch("requests/1/files/a", folder / "a")


def test_a_disk_that_is_full_is_not_the_agents_fault(folder: Path) -> None:
    """What cannot be written is said as that: the agent is there."""
    client, before = AgentClient(folder / "s", 30), resource.getrlimit(resource.RLIMIT_FSIZE)
    with answering(folder, http(b"x" * 5_000_000)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                client.fetch("requests/1/files/a", folder / "a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("sent", "most", "error"),
    [(1000, None, ""), (10, None, "no-service"), (5_000_000, 100_000, "disk")],
)
def test_of_the_service_too(folder: Path, sent: int, most: int | None, error: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    client = FleetClient(f"http://127.0.0.1:{listener.getsockname()[1]}", token="t", timeout_s=30)
    with answering(listener, http(b"x" * sent, length=max(sent, 1000))):
        if most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with (folder / "a").open("xb") as file:
                if not error:
                    client.fetch("captures/1/files/a", file)
                elif error == "disk":
                    with pytest.raises(OSError, match="File too large"):
                        client.fetch("captures/1/files/a", file)
                else:
                    with pytest.raises(InputError) as cut:
                        client.fetch("captures/1/files/a", file)
                    assert cut.value.slug == error
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ((folder / "a").stat().st_size == sent) is (error != "disk")


@pytest.mark.parametrize(
    ("answer", "slug"),
    [
        (b"", "no-agent"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no-agent"),
        (b"HTTP/1.1 200 OK\r\n", "agent-unclear"),
        (http(b"<html>"), "agent-unclear"),
        (http(b""), "agent-unclear"),
        (http(b"\xff"), "agent-unclear"),
        pytest.param(http(b"[" * 100_000 + b"]" * 100_000), "agent-unclear", id="depth"),
        (as_json({"error": "no"}, 500), "agent-unclear"),
        (as_json([], 404), "agent-unclear"),
        (as_json(None, 403), "agent-unclear"),
        (as_json({"error": {"message": "no"}}, 400), "agent-unclear"),
        (
            as_json({"error": {"slug": "quota", "message": "too many", "hint": "wait"}}, 429),
            "quota",
        ),
        (as_json({"error": {"slug": "quota", "message": ["odd"], "hint": 7}}, 429), "quota"),
        (http(b"{}", length=900), "no-agent"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no-agent"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500 + b"\r\n", "no-agent"),
    ],
)
def test_what_answers_otherwise_is_said(folder: Path, answer: bytes, slug: str) -> None:
    with answering(folder, answer), pytest.raises(InputError) as refused:
        AgentClient(folder / "s", 30).get("status")
    assert refused.value.slug == slug
    assert refused.value.message


def test_nobody_listens(folder: Path) -> None:
    for path in (folder / "nothing", folder / "dead"):
        if path.name == "dead":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        with pytest.raises(InputError, match="no agent runs here") as refused:
            AgentClient(path).get("status")
        assert (refused.value.slug, refused.value.where) == ("no-agent", str(path))


def test_what_is_asked_is_spelled_safely(folder: Path) -> None:
    with answering(folder, as_json({}), as_json({"a": [1]}), as_json({})) as asked:
        client = AgentClient(folder / "s", 30)
        assert client.get("query", where="job=a b&c", since="10m") == {}
        assert client.post("requests", {"job": "ö"}) == {"a": [1]}
        client.delete("requests/1")
    assert asked == [
        "GET /api/v1/query?where=job%3Da+b%26c&since=10m HTTP/1.1",
        "POST /api/v1/requests HTTP/1.1",
        "DELETE /api/v1/requests/1 HTTP/1.1",
    ]


@pytest.mark.parametrize("status", [200, 201, 399])
def test_an_answer_below_400_is_its_json(status: int) -> None:
    assert decode_answer(status, b'{"error": {"slug": "x"}}', "here") == {"error": {"slug": "x"}}


# `traceloom trace`, which asks until a request has ended.


def arguments(folder: Path, **more: object) -> Namespace:
    usual = {
        "server": None,
        "list": False,
        "cancel": None,
        "steps": 3,
        "duration": None,
        "pid": (7,),
        "job": None,
        "rank": None,
        "host": None,
        "profilers": "timeline",
        "shapes": False,
        "stacks": False,
        "at": None,
        "attach": False,
        "output": str(folder),
        "json": False,
        "quiet": False,
        "config": None,
        "socket": str(folder.parent / "s"),
    }
    return Namespace(**usual | more)


def target(state: str, profiler: str = "timeline", **more: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "stem": "rank0",
        "profiler": profiler,
        "state": state,
        "reason": "",
        "detail": "",
        "bytes": 9,
        "pause_ns": None,
        "held_ns": None,
        "file": "rank0.kineto.json.gz",
    }
    return usual | more


def state(*targets: dict[str, object], done: bool = True, files: tuple[str, ...] = ()) -> bytes:
    return as_json({"id": "abc", "targets": targets, "done": done, "files": files})


def test_a_trace_is_followed_to_its_end_and_fetched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = target("kept", pause_ns=1_500_000, held_ns=2_000_000)
    answers = [
        state(target("queued"), done=False),
        state(target("queued", reason="leased", detail="waits: kineto:7"), done=False),
        state(target("accepted"), done=False),
        state(kept, files=("capture.json", "rank0.kineto.json.gz")),
        http(b"{}"),
        http(b"trace"),
    ]
    with answering(folder, *answers) as asked:
        assert trace.run(arguments(folder / "run")) == 0
    assert {path.name: path.read_bytes() for path in (folder / "run").iterdir()} == {
        "capture.json": b"{}",
        "rank0.kineto.json.gz": b"trace",
    }
    assert asked[-1].startswith("GET /api/v1/requests/abc/files/rank0.kineto.json.gz ")
    printed = capsys.readouterr()
    states = [line.split()[4] for line in printed.err.splitlines()]
    assert states == ["queued", "queued", "accepted", "kept"]
    assert "waits: kineto:7 (leased)" in printed.err
    assert "9 bytes of 1 profiles" in printed.out
    assert (
        "rank0 timeline: stopped for 1.5 ms, and 2.0 ms to begin, to end and to write"
        in printed.out
    )
    assert f"traceloom report {folder}/run" in printed.out


@pytest.mark.parametrize(
    ("targets", "error", "words"),
    [
        (
            [target("failed", reason="exited", detail="the process has ended")],
            CaptureError,
            "rank0: the process has ended (exited)",
        ),
        (
            [target("cancelled", reason="cancelled", detail="it was cancelled")] * 3,
            CaptureError,
            "cancelled",
        ),
        (
            [target("kept"), target("failed", "stacks", reason="no-py-spy", detail="not there")],
            PartialError,
            "not there (no-py-spy)",
        ),
    ],
)
def test_what_was_not_traced_is_said_and_counts(
    folder: Path, targets: list[dict[str, object]], error: type[Exception], words: str
) -> None:
    is_kept = targets[0]["state"] == "kept"
    answers = [
        state(*targets, files=("rank0.kineto.json.gz",) if is_kept else ()),
        *([http(b"trace")] if is_kept else []),
    ]
    with answering(folder, *answers), pytest.raises(error) as raised:
        trace.run(arguments(folder / "run", quiet=True))
    assert words in str(raised.value)
    assert str(raised.value).count("it was cancelled") <= 1  # the same reason stands once
    assert (folder / "run").exists() is is_kept


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "..",
        ".hidden",
        "a/../../b",
        "a//b",
        "",
        "a\0b",
        "x" * 300,
        "a/b/c/d/e/f/g",
        "-rf",
        "a\nb",
    ],
)
def test_a_file_that_would_lie_elsewhere_is_not_written(folder: Path, name: str) -> None:
    with (
        answering(folder, state(target("kept"), files=("capture.json", name))),
        pytest.raises(OutputError) as refused,
    ):
        trace.run(arguments(folder / "run", quiet=True))
    assert refused.value.slug == "unsafe-name"
    assert list(folder.iterdir()) == []


def test_a_capture_that_cannot_be_fetched_whole_leaves_nothing(folder: Path) -> None:
    answers = [
        state(target("kept"), files=("a.json", "b.json")),
        http(b"1"),
        http(b"2", length=100),
    ]
    with answering(folder, *answers), pytest.raises(InputError, match="does not answer"):
        trace.run(arguments(folder / "run", quiet=True))
    assert list(folder.iterdir()) == []


def test_a_disk_that_fills_up_says_that_the_agent_keeps_it(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with answering(folder, state(target("kept"), files=("a.json",)), http(b"x" * 5_000_000)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(OutputError, match="file too large") as refused:
                trace.run(arguments(folder / "run", quiet=True))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.slug == "cannot-write"
    assert "traceloom trace --list shows request abc" in refused.value.hint
    assert list(folder.iterdir()) == []


def test_an_agent_that_is_started_again_is_waited_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = threading.Event()

    def ask() -> None:
        trace.run(arguments(folder / "run"))
        done.set()

    with answering(folder, state(target("queued"), done=False)):
        asking = threading.Thread(target=ask)
        asking.start()
    with answering(folder, state(target("kept"), files=("a.json",)), http(b"1")):
        asking.join(60)
    assert done.is_set()
    assert (folder / "run" / "a.json").read_text() == "1"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("more", "slug"),
    [
        ({"steps": None}, "wrong-usage"),
        ({"duration": 1.0}, "wrong-usage"),
        ({"pid": None}, "wrong-usage"),
        ({"output": None}, "wrong-usage"),
        ({"at": "+soon"}, "bad-time"),
        ({"at": "tomorrow"}, "bad-time"),
        ({"at": "2026-02-30"}, "bad-time"),
        ({"at": "+"}, "bad-time"),
        ({"at": "99999-01-01"}, "bad-time"),
        ({"cancel": "../x"}, "wrong-usage"),
        ({"cancel": "a b"}, "wrong-usage"),
        ({"cancel": "-x"}, "wrong-usage"),
    ],
)
def test_what_is_said_wrongly_is_refused_before_anybody_is_asked(
    folder: Path, more: dict[str, object], slug: str
) -> None:
    with pytest.raises(UsageError) as refused:
        trace.run(arguments(folder / "run", **more))
    assert refused.value.slug == slug


def test_an_output_that_is_there_is_not_touched(folder: Path) -> None:
    makers: list[Callable[[Path], object]] = [
        Path.mkdir,
        Path.touch,
        lambda path: path.symlink_to("nowhere"),
    ]
    for number, make in enumerate(makers):
        make(folder / f"run{number}")
        with pytest.raises(OutputError) as refused:
            trace.run(arguments(folder / f"run{number}"))
        assert refused.value.slug == "file-exists"
    with pytest.raises(OutputError) as refused:
        trace.run(arguments(folder / "no" / "run", socket=str(folder / "s")))
    assert refused.value.slug == "cannot-write"
