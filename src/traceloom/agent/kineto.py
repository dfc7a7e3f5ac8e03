"""Speaks with the profilers inside PyTorch processes over unix datagrams: the protocol of libkineto's daemon, and the server.

The protocol is dynolog's `ipcfabric`, as implemented by the libkineto of stock PyTorch.

A line without exactly one `=` makes libkineto schedule half a configuration, which kills the
process at its end. So every value with characters outside a small set is refused.

A client obeys everyone who can send to it. So the directory of a user is accessible to that user
only (mode 0700), and nothing is ever sent to a name outside of it. A path must be identical, byte
by byte, on both sides: libkineto ends its process if the sender's name differs from the expected
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from traceloom.agent.collectors.collector import read
from traceloom.errors import OutputError, UsageError
from traceloom.system.files import find_foreign_part

MAX_BYTES = 4096  # of a client's datagram; the longest known one has 100
MAX_ANCESTORS = 64
EVENTS, ACTIVITIES = 1, 2  # bits of a poll's mask: configurations that its process accepts now
_METADATA = struct.Struct("=Q32s")
_HELLO = struct.Struct("=iiq")
_POLL = struct.Struct("=iiq")
_NUMBER = struct.Struct("=i")


class MalformedDatagramError(ValueError):
    """It is not a datagram of libkineto."""


class Hello(msgspec.Struct, frozen=True):
    """A process registers; stock PyTorch never does."""

    device: int
    pid: int
    job: int


class Poll(msgspec.Struct, frozen=True):
    """A process polls for a configuration.

    `pids` are the process and its ancestors in its own pid namespace; `job` is its SLURM_JOB_ID or
    0.
    """

    mask: int
    job: int
    pids: tuple[int, ...]

    @property
    def busy(self) -> bool:
        """Whether its profiler is active: for a request of ours, or for the program itself."""
        return not self.mask & ACTIVITIES


def decode(datagram: bytes) -> Hello | Poll:
    """Decode a client's datagram.

    Raises:
        MalformedDatagramError: It is not a datagram of libkineto.
    """
    if len(datagram) < _METADATA.size:
        raise MalformedDatagramError("it is shorter than its metadata")
    size, name = _METADATA.unpack_from(datagram)
    payload = datagram[_METADATA.size :]
    if size != len(payload):
        raise MalformedDatagramError(f"it announces {size} bytes and has {len(payload)}")
    match name.rstrip(b"\0"):
        case b"ctxt" if len(payload) == _HELLO.size:
            return Hello(*_HELLO.unpack(payload))
        case b"req" if len(payload) >= _POLL.size:
            mask, number, job = _POLL.unpack_from(payload)
            if not 0 < number <= MAX_ANCESTORS or len(payload) != _POLL.size + 4 * number:
                raise MalformedDatagramError(f"{number} process ids in {len(payload)} bytes")
            return Poll(mask, job, struct.unpack_from(f"={number}i", payload, _POLL.size))
    raise MalformedDatagramError("it is neither `ctxt` nor `req`, or of another length")


def encode_configuration_reply(text: str) -> bytes:
    """Returns the reply to a poll; "" means that there is nothing to do."""
    payload = text.encode("ascii")
    return _METADATA.pack(len(payload), b"req") + payload


def encode_instances_reply(number: int) -> bytes:
    """Returns the reply to a hello: the number of registered processes."""
    return _METADATA.pack(_NUMBER.size, b"ctxt") + _NUMBER.pack(number)


# Excludes `=`, `#`, white space and control characters.
_PATH = re.compile(r"/[A-Za-z0-9._/@+-]{1,3000}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class TraceConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """One trace of one process. Either `duration_ms` or `steps`; `start_ms` (since the epoch) 0: at
    once.

    `fallback_ms`: duration of a trace by steps if the process has not stepped yet: libkineto then
    records by time. `start_step`: by the process's own count of steps; one that has passed means
    the next. `round_up`: steps start at a multiple of it, so that ranks that get it at different
    steps start at the same one. There is no key for memory snapshots: on a CPU they make libkineto
    spin until the process ends.
    """

    path: str
    trace_id: str
    group_id: str
    duration_ms: int = 0
    steps: int = 0
    fallback_ms: int = 0
    round_up: int = 1
    start_ms: int = 0
    start_step: int = 0
    warmup_s: int = 0
    shapes: bool = False
    stacks: bool = False
    flops: bool = False
    modules: bool = False

    def text(self) -> str:
        """Returns the lines of `KEY=VALUE`.

        Raises:
            UsageError: `unsafe-value`: a value could break it.
        """
        for value, allowed in ((self.path, _PATH), (self.trace_id, _NAME), (self.group_id, _NAME)):
            if not allowed.fullmatch(value) or ".." in value:
                raise UsageError(
                    f"`{value}` cannot be told to PyTorch's profiler",
                    slug="unsafe-value",
                    hint="paths and names need letters, digits and `._/@+-` alone",
                )
        if (self.duration_ms > 0) == (self.steps > 0) or min(
            self.duration_ms, self.steps, self.start_ms
        ) < 0:
            raise UsageError(
                "a trace has either a duration or a number of steps", slug="unsafe-value"
            )
        lines = {
            "ACTIVITIES_LOG_FILE": self.path,
            "REQUEST_TRACE_ID": self.trace_id,
            "REQUEST_GROUP_TRACE_ID": self.group_id,
            "ACTIVITIES_WARMUP_PERIOD_SECS": str(int(self.warmup_s)),
        }
        if self.steps:
            lines |= {
                "PROFILE_START_ITERATION": str(max(0, int(self.start_step))),
                "PROFILE_START_ITERATION_ROUNDUP": str(max(1, int(self.round_up))),
                "ACTIVITIES_ITERATIONS": str(int(self.steps)),
            }
            if self.fallback_ms:
                lines["ACTIVITIES_DURATION_MSECS"] = str(int(self.fallback_ms))
        else:
            lines["ACTIVITIES_DURATION_MSECS"] = str(int(self.duration_ms))
            if self.start_ms:
                lines["PROFILE_START_TIME"] = str(int(self.start_ms))
        flags = {
            "PROFILE_REPORT_INPUT_SHAPES": self.shapes,
            "PROFILE_WITH_STACK": self.stacks,
            "PROFILE_WITH_FLOPS": self.flops,
            "PROFILE_WITH_MODULES": self.modules,
        }
        lines |= {key: "true" for key, value in flags.items() if value}
        return "".join(f"{key}={value}\n" for key, value in lines.items())


MAX_CLIENTS = 8192
DEFAULT_INTERVAL_S = 5.0  # between polls, unless the process is configured otherwise
_MAX_ANCESTORS = 10
# A stopped process polls again when it continues; a client is dropped when it has ended.
_SILENCE_LIMIT_S = 900.0


class ProfilerClient(msgspec.Struct, kw_only=True):
    """A process that polls. Its identity is (boot, pid, start time); `key` is `PID@START` as for
    processes.

    `pid`, `uid` and `ancestors` come from the kernel, not from the process.
    """

    key: str
    pid: int
    uid: int
    gid: int
    start_ticks: int
    ancestors: tuple[int, ...] = ()
    address: str | bytes = ""
    busy: bool = False
    polls: int = 0
    first_ns: int = 0
    polled: float = 0.0  # on the monotonic clock
    interval_s: float = DEFAULT_INTERVAL_S


class PendingConfiguration(msgspec.Struct, kw_only=True):
    """A configuration that waits for the next poll of an idle process.

    `text` returns it at that time, or "" to wait for another poll; `delivered` is called after it
    was sent.
    """

    text: Callable[[ProfilerClient], str]
    delivered: Callable[[], None]


class ProfilerRegistry:
    """Answers polls from memory. Used from the loop's thread only.

    Args:
        proc: Mount point of `/proc`.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self.proc = proc
        self.clients: dict[str, ProfilerClient] = {}
        self.offers: dict[str, PendingConfiguration] = {}  # by key of the client
        self.listeners: list[Callable[[ProfilerClient], None]] = []  # called after each poll
        self._keys: dict[int, str] = {}

    def poll(
        self, poll: Poll, pid: int, uid: int, gid: int, address: str | bytes = ""
    ) -> ProfilerClient | None:
        """Record a poll of a process; None if it has ended meanwhile, or there are too many.

        `address` is unique per process: if it equals that of the last poll of this pid, it is the
        same process.
        """
        client = self.by_pid(pid)
        if client is None or not address or client.address != address:
            client = self._identified(pid, uid, gid)
            if client is None:
                return None
        now = time.monotonic()
        if client.polls:
            client.interval_s = min(max(now - client.polled, 0.1), 60.0)
        client.uid, client.gid, client.address = (
            uid,
            gid,
            address,
        )  # it may have dropped privileges since
        client.busy = poll.busy
        client.polls += 1
        client.polled = now
        return client

    def _identified(self, pid: int, uid: int, gid: int) -> ProfilerClient | None:
        """Returns the client of a process, a new one if it has not polled before."""
        try:
            parent, ticks = read_parent_and_start(self.proc, pid)
        except (OSError, ValueError, IndexError):
            return None
        key = f"{pid}@{ticks}"
        client = self.clients.get(key)
        if client is None:
            if self._is_full(uid):
                self.forget()
                if self._is_full(uid):
                    return None
            self.clients.pop(self._keys.get(pid, ""), None)  # an earlier process with this pid
            client = self.clients[key] = ProfilerClient(
                key=key,
                pid=pid,
                uid=uid,
                gid=gid,
                start_ticks=ticks,
                first_ns=time.time_ns(),
                ancestors=tuple(iterate_ancestors(self.proc, parent)),
            )
            self._keys[pid] = key
        return client

    def _is_full(self, uid: int) -> bool:
        """Whether there are too many clients, or a user has half of them."""
        own = sum(client.uid == uid for client in self.clients.values())
        return len(self.clients) >= MAX_CLIENTS or own >= MAX_CLIENTS // 2

    def answer(self, client: ProfilerClient) -> tuple[bytes, Callable[[], None] | None]:
        """Returns the reply to a client's poll, and a callback for when it is sent."""
        offer = self.offers.get(client.key)
        text = "" if offer is None or client.busy else offer.text(client)
        if offer is None or not text:
            return encode_configuration_reply(""), None
        return encode_configuration_reply(text), lambda: self._delivered(client.key, offer)

    def answered(self, client: ProfilerClient) -> None:
        """Notify the listeners of a poll."""
        for listener in list(self.listeners):
            listener(client)

    def by_pid(self, pid: int) -> ProfilerClient | None:
        return self.clients.get(self._keys.get(pid, ""))

    def forget(self) -> None:
        """Remove clients that have ended."""
        now = time.monotonic()
        for key, client in list(self.clients.items()):
            if now - client.polled < DEFAULT_INTERVAL_S:
                continue
            alive = False
            with contextlib.suppress(OSError, ValueError, IndexError):
                alive = read_parent_and_start(self.proc, client.pid)[1] == client.start_ticks
            if not alive or now - client.polled > _SILENCE_LIMIT_S:
                del self.clients[key]
                self.offers.pop(key, None)
                if self._keys.get(client.pid) == key:
                    del self._keys[client.pid]

    def _delivered(self, key: str, offer: PendingConfiguration) -> None:
        if self.offers.get(key) is offer:
            del self.offers[key]
        offer.delivered()


def read_parent_and_start(proc: str, pid: int) -> tuple[int, int]:
    """Returns the parent and start time (in ticks since boot) of a process.

    Raises:
        OSError: There is no such process.
    """
    fields = read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]), int(fields[19])


def iterate_ancestors(proc: str, parent: int) -> Iterator[int]:
    """Yields the parent of a process, its parent, and so on, without pid 1."""
    for _ in range(_MAX_ANCESTORS):
        if parent <= 1:
            return
        yield parent
        try:
            parent, _ticks = read_parent_and_start(proc, parent)
        except (OSError, ValueError, IndexError):
            return


def read_process_state(pid: int, start_ticks: int, proc: str = "/proc") -> str:
    """Returns the state of the process, as R, S, D, T or t; "" if it has ended: a reused pid has
    another start time.
    """
    try:
        fields = Path(proc, str(pid), "stat").read_bytes().rpartition(b")")[2].split()
        state, ticks = fields[0].decode("ascii"), int(fields[19])
    except (OSError, ValueError, IndexError):
        return ""
    return state if ticks == start_ticks and state not in ("Z", "X") else ""


LOG = logging.getLogger("traceloom.agent")
SOCKET_NAME = "dynolog"
ABSTRACT_SOCKET = f"\0{SOCKET_NAME}\0".encode()  # the last NUL is part of the name
SETTINGS_FILE = "libkineto.conf"
_CLIENT_NAME = re.compile(r"dynoconfigclient[0-9a-f-]{1,64}")
_MAX_CLIENT_CHARS = len("dynoconfigclient") + 36
_MAX_PATH_BYTES = 107  # of a unix socket
_CREDENTIALS = struct.Struct("3i")
_SNDBUFFORCE = 32  # SO_SNDBUFFORCE of Linux: exceeds the system limit, with CAP_NET_ADMIN
# Shared by all replies: a client that is stopped or reads slowly occupies a part of it.
_UNREAD_BYTES = 8 << 20
_MAX_SWEPT = 4096  # names checked per directory
_BATCH_WINDOW_S = 0.02  # datagrams within it are answered at one wake-up; a client waits for 90 ms
_MANY = 5  # per wake-up: half of the kernel's queue; if so many come, the batch window is skipped


class UserSocket:
    """The agent's socket in a user's directory, or the abstract one. `directory` is None for
    that.
    """

    def __init__(self, listener: socket.socket, uid: int | None, directory: Path | None) -> None:
        self.listener, self.uid, self.directory = listener, uid, directory
        self.handle = (
            None
            if directory is None
            else os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        )
        self.pause: asyncio.TimerHandle | None = None  # until the socket is read again

    def close(self) -> None:
        """Close it, and remove its name."""
        if self.pause is not None:
            self.pause.cancel()
        self.listener.close()
        if self.handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(SOCKET_NAME, dir_fd=self.handle)
            os.close(self.handle)


class KinetoSockets:
    """Receives polls and answers them at once, in the agent's loop; a client that does not read
    loses its reply.

    Args:
        root: The directory of the users' directories.
        registry: Knows the replies.
        abstract: Also listen at the abstract name, which clients without KINETO_IPC_SOCKET_DIR use:
            any user of the host can then control their clients.
        interval_s: Between polls of processes that `agent env` prepares.
        bound: Called with each socket's path once it exists.
    """

    def __init__(
        self,
        root: Path,
        registry: ProfilerRegistry,
        *,
        abstract: bool = False,
        interval_s: int = 1,
        bound: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.root, self.registry, self.abstract, self.interval_s = (
            root,
            registry,
            abstract,
            interval_s,
        )
        self.malformed = 0  # datagrams that are not libkineto's
        self.strangers = 0  # datagrams and addresses of others than the directory's user
        self.dropped = 0  # replies that a client did not read
        self.last_error = ""  # why there are no sockets
        self._bound = bound
        self._sockets: dict[int | None, UserSocket] = {}  # by user; None: the abstract one
        self._hellos = 0
        self._lock: int | None = None

    def start(self) -> None:
        """Create the directory, and the sockets of the agent's user and of all users of an earlier
        agent.

        Errors are stored in `last_error`: the agent continues.
        """
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            if find_foreign_part(self.root) or self.root.stat().st_mode & 0o022:  # sticky or not
                self.last_error = f"{self.root} can be written by others, so no socket is put there"
            else:
                self._lock = os.open(
                    self.root / ".lock",
                    os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                    0o600,
                )
                try:  # the kernel releases the lock of an agent that has ended
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.last_error = f"another agent has the sockets in {self.root}; `paths.kineto` names another place"
            if self.abstract and not self.last_error:
                self._listen(None, None)
            if not self.last_error:
                # Their jobs still poll there.
                before = {int(path.name) for path in self.root.iterdir() if path.name.isdigit()}
                self.prepare(os.geteuid())
                for uid in sorted(before if os.geteuid() == 0 else ()):
                    try:
                        self.prepare(uid)
                    except OutputError as error:  # noqa: PERF203  (what one has put there is in nobody else's way)
                        LOG.warning("user %d has no traces on demand: %s", uid, error)
        except (OSError, OutputError) as error:
            self.last_error = str(error)
        if self.last_error:
            LOG.warning("no traces on demand: %s", self.last_error)

    def prepare(self, uid: int) -> Path:
        """Returns the directory of a user with the agent's socket in it, created if necessary.

        Raises:
            OutputError: `socket-unusable`: it cannot be created.
        """
        directory = self.root / str(uid)
        if uid in self._sockets:
            return directory
        if self.last_error:
            raise OutputError(self.last_error, slug="socket-unusable")
        if len(os.fsencode(directory)) + 1 + _MAX_CLIENT_CHARS > _MAX_PATH_BYTES:
            raise OutputError(
                "the name is too long for sockets below it",
                slug="socket-unusable",
                where=str(directory),
                hint="set `paths.kineto` of agent.toml to a shorter one",
            )
        try:
            self._listen(uid, directory)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            text = f"PyTorch's profiler cannot be listened to there: {reason}"
            raise OutputError(text, slug="socket-unusable", where=str(directory)) from error
        return directory

    def close(self) -> None:
        """Close the sockets and remove their names, which would delay the end of every job that
        uses them.
        """
        for user_socket in self._sockets.values():
            asyncio.get_running_loop().remove_reader(user_socket.listener.fileno())
            user_socket.close()
        self._sockets.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sweep(self) -> None:
        """Remove the sockets that clients left behind; blocks, so it is called in a thread."""
        for user_socket in list(self._sockets.values()):
            if user_socket.handle is None:
                continue
            with contextlib.suppress(OSError), os.scandir(user_socket.handle) as entries:
                names = [entry.name for _, entry in zip(range(_MAX_SWEPT), entries, strict=False)]
                for name in filter(_CLIENT_NAME.fullmatch, names):
                    with (
                        contextlib.suppress(OSError),
                        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe,
                    ):
                        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=user_socket.handle)
                        try:
                            if stat.S_ISSOCK(os.fstat(handle).st_mode):
                                probe.connect(f"/proc/self/fd/{handle}")
                        except ConnectionRefusedError:  # no process has it open
                            os.unlink(name, dir_fd=user_socket.handle)
                        finally:
                            os.close(handle)

    def _listen(self, uid: int | None, directory: Path | None) -> None:
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            for option in (socket.SO_SNDBUF, _SNDBUFFORCE):
                with contextlib.suppress(OSError):
                    listener.setsockopt(socket.SOL_SOCKET, option, _UNREAD_BYTES)
            if directory is None:
                listener.bind(ABSTRACT_SOCKET)
            else:
                assert uid is not None
                self._bind(listener, uid, directory)
            user_socket = UserSocket(listener, uid, directory)
        except BaseException:
            listener.close()
            raise
        self._sockets[uid] = user_socket
        asyncio.get_running_loop().add_reader(listener.fileno(), self._answer, user_socket)
        if directory is not None:
            self._bound(directory / SOCKET_NAME)

    def _bind(self, listener: socket.socket, uid: int, directory: Path) -> None:
        """Bind while the agent owns the directory, so that its user cannot put a link in place of a
        name.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.geteuid() != uid:
                os.fchown(handle, os.geteuid(), -1)
            os.fchmod(handle, 0o700)
            for name in (SOCKET_NAME, SETTINGS_FILE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=handle)
            listener.bind(str(directory / SOCKET_NAME))
            os.chmod(SOCKET_NAME, 0o666, dir_fd=handle)  # noqa: S103  (the directory lets its user in alone)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            settings = os.open(SETTINGS_FILE, flags, 0o644, dir_fd=handle)
            try:
                os.fchmod(settings, 0o644)
                os.write(settings, b"ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=%d\n" % self.interval_s)
            finally:
                os.close(settings)
            if os.geteuid() != uid:
                os.fchown(handle, uid, -1)
        finally:
            os.close(handle)

    def _answer(self, user_socket: UserSocket) -> None:
        """Answer the queued datagrams, then pause to batch: a wake-up costs as much as an
        answer.
        """
        loop, listener = asyncio.get_running_loop(), user_socket.listener
        listening = user_socket.pause is None
        answered = 0
        while answered < _MANY and self._read(user_socket):
            answered += 1
        pauses = 0 < answered < _MANY
        if listening and pauses:
            loop.remove_reader(listener.fileno())
        elif not listening and not pauses:
            loop.add_reader(listener.fileno(), self._answer, user_socket)
        user_socket.pause = (
            loop.call_later(_BATCH_WINDOW_S, self._answer, user_socket) if pauses else None
        )

    def _read(self, user_socket: UserSocket) -> bool:
        """Answer one datagram; returns whether there was one."""
        try:
            # Space for the credentials only: the kernel closes file descriptors that a peer
            # attaches.
            datagram, ancillary, _, address = user_socket.listener.recvmsg(
                MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            LOG.warning("a datagram could not be read: %s", error)
            return False
        try:
            message = decode(datagram)  # a longer datagram is truncated, and then malformed
        except MalformedDatagramError:
            self.malformed += 1
            return True
        credentials = [
            data
            for level, kind, data in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        if not credentials or len(credentials[0]) != _CREDENTIALS.size or not address:
            self.strangers += 1
            return True
        pid, uid, gid = _CREDENTIALS.unpack(credentials[0])
        if pid <= 0 or (user_socket.uid is not None and uid != user_socket.uid):
            self.strangers += 1  # pid 0: from a pid namespace that is not visible here
            return True
        if isinstance(message, Hello):
            self._hellos += 1
            self._send(user_socket, encode_instances_reply(self._hellos), address)
            return True
        client = self.registry.poll(message, pid, uid, gid, address)
        if client is not None:
            reply, delivered = self.registry.answer(client)
            if self._send(user_socket, reply, address) and delivered is not None:
                delivered()
            self.registry.answered(client)
        return True

    def _send(self, user_socket: UserSocket, reply: bytes, address: str | bytes) -> bool:
        """Send a reply from the socket that was polled, to an address of the same kind; never
        blocks.

        Returns whether it was sent.
        """
        try:
            if user_socket.handle is None:
                if not isinstance(address, bytes) or not address.startswith(b"\0"):
                    self.strangers += 1
                    return False
                user_socket.listener.sendto(reply, socket.MSG_DONTWAIT, address)
                return True
            directory, _, name = (
                address.rpartition("/") if isinstance(address, str) else ("", "", "")
            )
            if directory != str(user_socket.directory) or not _CLIENT_NAME.fullmatch(name):
                self.strangers += 1
                return False
            handle = os.open(
                name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=user_socket.handle
            )
            try:
                status = os.fstat(handle)
                if not stat.S_ISSOCK(status.st_mode) or status.st_uid != user_socket.uid:
                    self.strangers += 1
                    return False
                user_socket.listener.sendto(reply, socket.MSG_DONTWAIT, f"/proc/self/fd/{handle}")
            finally:
                os.close(handle)
        except OSError:  # its queue is full, or it has ended: it polls again
            self.dropped += 1
            return False
        return True
