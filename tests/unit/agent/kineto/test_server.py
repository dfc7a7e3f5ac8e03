"""Sockets for libkineto's clients: answered at once, by whose they are, and nobody reaches another's."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kineto_clients import KinetoClient, request
from traceloom.agent.kineto import (
    _BATCH_WINDOW_S,
    KinetoSockets,
    PendingConfiguration,
    ProfilerClient,
    ProfilerRegistry,
)
from traceloom.errors import OutputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="unix credentials are Linux's")
root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to be other users"
)
ANNA, BERT = 40_001, 40_002
WAIT_S = 30.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose name is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="tl"))
    folder.chmod(0o755)
    yield folder / "k"
    shutil.rmtree(folder)


def served(sockets: KinetoSockets, work: Callable[[], Any]) -> Any:
    """Do blocking work in a thread while the sockets answer in a loop."""

    async def live() -> Any:
        sockets.start()
        try:
            return await asyncio.to_thread(work)
        finally:
            sockets.close()

    return asyncio.run(live())


def test_a_poll_is_answered_and_the_kernel_says_who_asks(place: Path) -> None:
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)

    def work() -> str | None:
        client = KinetoClient(place / str(os.geteuid()))
        client.poll(pids=(1, 77))  # as a process in a pid namespace calls itself
        answer = client.answer()
        client.poll(mask=1)
        client.answer()
        client.close()
        return answer

    assert served(sockets, work) == ""
    (client,) = registry.clients.values()
    assert (client.pid, client.uid, client.busy) == (os.getpid(), os.geteuid(), True)
    assert client.key.startswith(f"{os.getpid()}@")
    assert client.ancestors[0] == os.getppid()
    assert client.polls == 2
    assert not (place / str(os.geteuid()) / "dynolog").exists()


def test_an_offer_waits_for_an_idle_poll_and_is_handed_over_once(place: Path) -> None:
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)
    delivered: list[str] = []
    seen: list[tuple[int, bool]] = []
    registry.listeners.append(lambda client: seen.append((client.polls, client.busy)))

    def work() -> list[str | None]:
        client = KinetoClient(place / str(os.geteuid()))
        client.poll()
        answers = [client.answer()]
        key = next(iter(registry.clients))
        registry.offers[key] = PendingConfiguration(
            text=lambda of: f"A={of.polls}\n", delivered=lambda: delivered.append(key)
        )
        for mask in (1, 3, 3):
            client.poll(mask)
            answers.append(client.answer())
        client.close()
        return answers

    assert served(sockets, work) == ["", "", "A=3\n", ""]
    assert len(delivered) == 1
    assert seen == [(1, False), (2, True), (3, False), (4, False)]


def test_many_polls_at_once_are_all_answered_and_so_is_who_comes_long_after_them(
    place: Path,
) -> None:
    """More than are taken at one wake-up, and one when nothing came for longer than the sockets wait for more."""
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)

    def work() -> list[str | None]:
        clients = [KinetoClient(place / str(os.geteuid())) for _ in range(30)]
        senders = [threading.Thread(target=client.poll) for client in clients]
        for sender in senders:
            sender.start()
        answers = [client.answer() for client in clients]
        for sender in senders:
            sender.join()
        time.sleep(5 * _BATCH_WINDOW_S)
        clients[0].poll()
        answers.append(clients[0].answer())
        for client in clients:
            client.close()
        return answers

    assert served(sockets, work) == [""] * 31
    assert (sockets.malformed, sockets.strangers, sockets.dropped) == (0, 0, 0)


def test_malformed_datagrams_change_nothing(place: Path) -> None:
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)
    chance = random.Random(9)

    def work() -> str | None:
        client = KinetoClient(place / str(os.geteuid()))
        for number in range(10_000):
            body = (
                chance.randbytes(chance.randrange(1, 300))
                if number % 100
                else chance.randbytes(60_000)
            )
            client.socket.sendto(body, client.daemon)
        client.poll()
        answer = client.answer()
        client.close()
        return answer

    assert served(sockets, work) == ""
    assert sockets.malformed == 10_000
    assert len(registry.clients) == 1


def test_many_clients_at_once_are_all_answered(place: Path) -> None:
    """The kernel queues ten datagrams; who finds the queue full waits, as libkineto does. Nobody reads until all asked."""
    number = (
        600 if os.geteuid() == 0 else 200
    )  # as many unread answers as a buffer of root's, or anybody's, holds
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)

    def work() -> list[str | None]:
        clients = [KinetoClient(place / str(os.geteuid())) for _ in range(number)]
        answers: list[str | None] = []
        try:
            for _ in range(3):
                for client in clients:
                    client.poll()
                for client in clients:
                    answers.append(client.answer())
                    if answers[-1] is None:
                        return answers
        finally:
            for client in clients:
                client.close()
        return answers

    assert served(sockets, work) == [""] * (3 * number)
    (client,) = registry.clients.values()
    assert (client.polls, sockets.dropped, sockets.strangers, sockets.malformed) == (
        3 * number,
        0,
        0,
        0,
    )


def test_a_client_that_does_not_read_holds_up_nobody(place: Path) -> None:
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)

    def work() -> tuple[str | None, int]:
        directory = place / str(os.geteuid())
        deaf, other = KinetoClient(directory), KinetoClient(directory)
        for _ in range(2000):
            deaf.poll()
        other.poll()
        answer = other.answer()
        deaf.close()
        other.close()
        return answer, sockets.dropped

    answer, dropped = served(sockets, work)
    assert answer == ""
    assert dropped > 0


def test_nothing_is_sent_to_a_name_outside_of_the_directory(place: Path) -> None:
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)

    def work() -> list[str | None]:
        directory = place / str(os.geteuid())
        outside, odd = KinetoClient(place), KinetoClient(directory, "somebody")
        outside.daemon = odd.daemon
        linked = KinetoClient(directory)
        victim = KinetoClient(place, "victim")
        assert isinstance(linked.address, str)
        Path(linked.address).unlink()
        Path(linked.address).symlink_to(str(victim.address))
        nameless = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for client in (outside, odd, linked):
            client.poll()
        nameless.sendto(request(3, 0, (1,)), str(directory / "dynolog"))
        good = KinetoClient(directory)
        good.poll()  # the last: the others have been dealt with when it is answered
        answers = [client.answer(0.2) for client in (outside, odd, linked, victim)] + [
            good.answer()
        ]
        for client in (outside, odd, linked, victim, good):
            client.close()
        nameless.close()
        return answers

    assert served(sockets, work) == [None, None, None, None, ""]
    assert sockets.strangers == 4


def test_the_abstract_name_is_there_where_it_is_switched_on(place: Path) -> None:
    registry = ProfilerRegistry()

    def work() -> tuple[str | None, str | None]:
        client = KinetoClient(None)
        client.poll()
        crossed = KinetoClient(place / str(os.geteuid()))
        crossed.daemon = b"\0dynolog\0"
        crossed.poll()  # libkineto ends its process where an answer comes from a socket of the other kind
        answers = client.answer(), crossed.answer(0.2)
        client.close()
        crossed.close()
        return answers

    sockets = KinetoSockets(place, registry, abstract=True)
    assert served(sockets, work) == ("", None)
    without = KinetoSockets(place, ProfilerRegistry())

    def nobody() -> None:
        client = KinetoClient(None)
        with pytest.raises(ConnectionRefusedError):
            client.poll()
        client.close()

    served(without, nobody)


def test_sockets_that_clients_left_are_swept_and_living_ones_stay(place: Path) -> None:
    sockets = KinetoSockets(place, ProfilerRegistry())

    def work() -> list[str]:
        directory = place / str(os.geteuid())
        dead, alive = (
            KinetoClient(directory, "dynoconfigclientdead"),
            KinetoClient(directory, "dynoconfigclienta"),
        )
        dead.close()
        (directory / "dynoconfigclientbee").write_text("no socket", encoding="utf-8")
        sockets.sweep()
        names = sorted(path.name for path in directory.iterdir())
        alive.close()
        return names

    assert served(sockets, work) == [
        "dynoconfigclienta",
        "dynoconfigclientbee",
        "dynolog",
        "libkineto.conf",
    ]


def test_a_directory_with_a_long_name_or_open_to_others_gets_no_socket(place: Path) -> None:
    long = KinetoSockets(place / ("n" * 60), ProfilerRegistry())
    served(long, lambda: None)
    assert "too long" in long.last_error
    opened = place.parent / "open"
    opened.mkdir()
    opened.chmod(0o777)
    shared = KinetoSockets(opened, ProfilerRegistry())
    served(shared, lambda: None)
    assert "written by others" in shared.last_error


AS_USER = (
    "import os, sys; uid = int(sys.argv.pop(1)); os.setgroups([]); os.setgid(uid); os.setuid(uid)\n"
)
OTHER = """
import socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
try:
    s.sendto(b"x", sys.argv[1])
except PermissionError:
    sys.exit(7)
"""
POLLS = """
from pathlib import Path
client = KinetoClient(Path(sys.argv[1])); client.poll(); print(repr(client.answer()))
"""


@root
def test_a_user_has_a_directory_alone_and_reaches_no_other(place: Path) -> None:
    registry = ProfilerRegistry()
    sockets = KinetoSockets(place, registry)

    tests = str(Path(__file__).resolve().parents[3])

    def of_user(uid: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Its interpreter may lie where only root reads: it becomes the user once it has imported what it needs.
        imports = f"import sys; sys.path.insert(0, {tests!r}); from support.kineto_clients import KinetoClient\n"
        command = [sys.executable, "-c", imports + AS_USER + code, str(uid), *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")

    def work() -> None:
        answers = of_user(ANNA, POLLS, str(place / str(ANNA)))
        assert answers.stdout == "''\n", answers.stderr
        assert of_user(BERT, OTHER, str(place / str(ANNA) / "dynolog")).returncode == 7
        victim = KinetoClient(place / str(ANNA))
        assert of_user(BERT, OTHER, str(victim.address)).returncode == 7
        victim.poll()  # of root, whom the directory does not keep out: it is none of hers
        assert victim.answer(0.2) is None
        victim.close()

    async def live() -> None:
        sockets.start()
        for uid in (ANNA, BERT):
            sockets.prepare(uid)
        try:
            for uid in (ANNA, BERT):
                status = (place / str(uid)).stat()
                assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (uid, 0o700)
            await asyncio.to_thread(work)
        finally:
            sockets.close()

    asyncio.run(live())
    assert {client.uid for client in registry.clients.values()} == {ANNA}


@root
def test_a_user_who_changes_the_directory_changes_nothing_of_others(place: Path) -> None:
    """A link in the place of our socket, made while no agent runs, is replaced, not followed."""
    target = place.parent / "precious"
    target.write_text("kept", encoding="utf-8")

    async def live() -> None:
        sockets = KinetoSockets(place, ProfilerRegistry())
        sockets.start()
        sockets.prepare(ANNA)
        sockets.close()
        for name in ("dynolog", "libkineto.conf"):
            (place / str(ANNA) / name).unlink(missing_ok=True)
            (place / str(ANNA) / name).symlink_to(target)
        again = KinetoSockets(place, ProfilerRegistry())
        again.start()  # jobs of hers may poll there
        assert not again.last_error
        assert stat.S_ISSOCK((place / str(ANNA) / "dynolog").lstat().st_mode)
        assert "UPDATE_INTERVAL" in (place / str(ANNA) / "libkineto.conf").read_text(
            encoding="utf-8"
        )
        again.close()

    asyncio.run(live())
    assert target.read_text(encoding="utf-8") == "kept"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_pid_that_is_given_again_is_another_client(tmp_path: Path) -> None:
    from traceloom.agent.kineto import Poll

    def process(pid: int, parent: int, start: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 17, str(start), "0"]
        (tmp_path / str(pid) / "stat").write_text(
            f"{pid} (a ) b) {' '.join(fields)}\n", encoding="utf-8"
        )

    registry = ProfilerRegistry(str(tmp_path))
    process(50, 40, 900)
    process(40, 30, 800)
    process(30, 1, 700)
    poll = Poll(3, 0, (50,))
    first = registry.poll(poll, 50, 1, 1)
    assert first is not None
    assert (first.key, first.ancestors) == ("50@900", (40, 30))
    registry.offers[first.key] = PendingConfiguration(
        text=lambda _: "A=1\n", delivered=lambda: None
    )
    process(50, 40, 901)
    second: ProfilerClient | None = registry.poll(poll, 50, 2, 2)
    assert second is not None
    assert (second.key, second.polls, list(registry.clients)) == ("50@901", 1, ["50@901"])
    assert registry.by_pid(50) is second
    assert registry.answer(second)[0][40:] == b""  # what was for the first is not for this one
    assert registry.poll(poll, 51, 1, 1) is None  # it has ended
    second.polled -= 60
    shutil.rmtree(tmp_path / "50")
    registry.forget()
    assert not registry.clients


def test_a_second_agent_takes_no_sockets_of_the_first(place: Path) -> None:
    first, second = (
        KinetoSockets(place, ProfilerRegistry()),
        KinetoSockets(place, ProfilerRegistry()),
    )

    def work() -> str | None:
        client = KinetoClient(place / str(os.geteuid()))
        client.poll()
        answer = client.answer()
        client.close()
        return answer

    async def live() -> str | None:
        first.start()
        second.start()
        assert second.last_error.startswith("another agent has the sockets")
        with pytest.raises(OutputError, match="another agent"):
            second.prepare(os.geteuid())
        second.close()
        answer = await asyncio.to_thread(work)
        first.close()
        third = KinetoSockets(place, ProfilerRegistry())
        third.start()
        assert not third.last_error, "the first has ended"
        third.close()
        return answer

    assert asyncio.run(live()) == ""


@root
def test_what_a_user_puts_in_place_of_the_socket_is_in_nobody_elses_way(place: Path) -> None:
    def begin(*users: int) -> tuple[str, list[bool]]:
        sockets = KinetoSockets(place, ProfilerRegistry())

        async def live() -> tuple[str, list[bool]]:
            sockets.start()
            try:
                for uid in users:
                    sockets.prepare(uid)
                return sockets.last_error, [
                    (place / str(uid) / "dynolog").is_socket() for uid in (0, ANNA, BERT)
                ]
            finally:
                sockets.close()

        return asyncio.run(live())

    assert begin(ANNA, BERT) == ("", [True] * 3)
    own = str(place / str(ANNA) / "dynolog")
    subprocess.run(
        [
            "setpriv",
            f"--reuid={ANNA}",
            f"--regid={ANNA}",
            "--clear-groups",
            "mkdir",
            "-p",
            f"{own}/x",
        ],
        check=True,
    )
    assert begin() == ("", [True, False, True])
