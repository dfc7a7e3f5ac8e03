"""The sockets that libkineto's clients send to: one directory per user, a socket of ours in each.

Whoever can send to a client is obeyed by it. So the directory of a user is that user's alone (mode 0700), and nothing
is ever sent to a name outside of it. A path must be the same, letter by letter, on both sides: libkineto ends its
process where the sender's name is another one than it expects.
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
from collections.abc import Callable
from pathlib import Path

from traceloom.agent.ipc.datagrams import MOST_BYTES, Hello, MalformedDatagramError, decode, instances_reply
from traceloom.agent.registry import ProfilerRegistry
from traceloom.errors import OutputError

LOG = logging.getLogger("traceloom.agent")
NAME = "dynolog"
ABSTRACT = f"\0{NAME}\0".encode()  # the last NUL belongs to the name
SETTINGS = "libkineto.conf"
_CLIENT = re.compile(r"dynoconfigclient[0-9a-f-]{1,64}")
_LONGEST_CLIENT = len("dynoconfigclient") + 36
_LONGEST_PATH = 107  # of a unix socket
_CREDENTIALS = struct.Struct("3i")
_SNDBUFFORCE = 32  # of Linux: beyond what anybody may have, for who administers the network
_UNREAD_BYTES = 8 << 20  # of answers: whoever is stopped, or slow to read, takes some of it from all others
_MOST_SWEPT = 4096  # names of a directory that are looked at
_TOGETHER_S = 0.02  # what comes meanwhile is answered at one wake-up; a client waits for 90 ms
_MANY = 5  # at one wake-up: half of what the kernel keeps; where so many come, nothing waits for more


class UserSocket:
    """Our socket in the directory of a user, or the abstract one. `directory` is None for that."""

    def __init__(self, listener: socket.socket, uid: int | None, directory: Path | None) -> None:
        self.listener, self.uid, self.directory = listener, uid, directory
        self.handle = None if directory is None else os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self.pause: asyncio.TimerHandle | None = None  # until it is listened to again

    def close(self) -> None:
        """Let go of it, and remove its name."""
        if self.pause is not None:
            self.pause.cancel()
        self.listener.close()
        if self.handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(NAME, dir_fd=self.handle)
            os.close(self.handle)


class KinetoSockets:
    """Takes polls and answers them at once, in the agent's loop; a client that does not read loses its answer.

    Args:
        root: The directory with those of the users.
        registry: Knows the answers.
        abstract: Also the abstract name, which clients without KINETO_IPC_SOCKET_DIR use: any user of the host can
            then speak to their clients.
        interval_s: Between polls of processes that `agent env` prepares.
        bound: Called with each socket's path once it is there.
    """

    def __init__(
        self, root: Path, registry: ProfilerRegistry, *, abstract: bool = False, interval_s: int = 1,
        bound: Callable[[Path], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.root, self.registry, self.abstract, self.interval_s = root, registry, abstract, interval_s
        self.malformed = 0  # datagrams that nobody's libkineto sends
        self.strangers = 0  # datagrams and addresses that do not belong to the directory's user
        self.dropped = 0  # answers that a client did not take
        self.trouble = ""  # why there are no sockets
        self._bound = bound
        self._sockets: dict[int | None, UserSocket] = {}  # by user; None is the abstract one
        self._hellos = 0
        self._lock: int | None = None

    def start(self) -> None:
        """Make the directory, and the sockets of the own user and of all whom an earlier agent listened to.

        What goes wrong stands in `trouble`: the agent goes on.
        """
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            status = self.root.lstat()
            if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
                self.trouble = f"{self.root} can be written by others, so no socket is put there"
            else:
                self._lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:  # the kernel drops the lock of an agent that has ended
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.trouble = f"another agent has the sockets in {self.root}; `paths.kineto` names another place"
            if self.abstract and not self.trouble:
                self._listen(None, None)
            if not self.trouble:
                before = {int(path.name) for path in self.root.iterdir() if path.name.isdigit()}  # jobs poll there
                for uid in sorted({os.geteuid(), *(before if os.geteuid() == 0 else ())}):
                    self.prepare(uid)
        except (OSError, OutputError) as error:
            self.trouble = str(error)
        if self.trouble:
            LOG.warning("no traces on demand: %s", self.trouble)

    def prepare(self, uid: int) -> Path:
        """The directory of a user, with a socket of ours in it; made where it is not yet.

        Raises:
            OutputError: `socket-unusable`: it cannot be made.
        """
        directory = self.root / str(uid)
        if uid in self._sockets:
            return directory
        if self.trouble:
            raise OutputError(self.trouble, slug="socket-unusable")
        if len(os.fsencode(directory)) + 1 + _LONGEST_CLIENT > _LONGEST_PATH:
            raise OutputError(
                "the name is too long for sockets below it", slug="socket-unusable", where=str(directory),
                hint="set `paths.kineto` of agent.toml to a shorter one",
            )  # fmt: skip
        try:
            self._listen(uid, directory)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            text = f"PyTorch's profiler cannot be listened to there: {reason}"
            raise OutputError(text, slug="socket-unusable", where=str(directory)) from error
        return directory

    def close(self) -> None:
        """Listen no more, and leave no name behind: it would delay the end of every job that knows it."""
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
                names = [entry.name for _, entry in zip(range(_MOST_SWEPT), entries, strict=False)]
                for name in filter(_CLIENT.fullmatch, names):
                    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=user_socket.handle)
                        try:
                            if stat.S_ISSOCK(os.fstat(handle).st_mode):
                                probe.connect(f"/proc/self/fd/{handle}")
                        except ConnectionRefusedError:  # nobody has it open
                            os.unlink(name, dir_fd=user_socket.handle)
                        finally:
                            os.close(handle)

    def _listen(self, uid: int | None, directory: Path | None) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            for option in (socket.SO_SNDBUF, _SNDBUFFORCE):
                with contextlib.suppress(OSError):
                    listener.setsockopt(socket.SOL_SOCKET, option, _UNREAD_BYTES)
            if directory is None:
                listener.bind(ABSTRACT)
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
            self._bound(directory / NAME)

    def _bind(self, listener: socket.socket, uid: int, directory: Path) -> None:
        """While names are made in the directory it is ours: its user cannot put a link in their place."""
        directory.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.geteuid() != uid:
                os.fchown(handle, os.geteuid(), -1)
            os.fchmod(handle, 0o700)
            for name in (NAME, SETTINGS):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=handle)
            listener.bind(str(directory / NAME))
            os.chmod(NAME, 0o666, dir_fd=handle)  # noqa: S103  (the directory lets its user in alone)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            settings = os.open(SETTINGS, flags, 0o644, dir_fd=handle)
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
        """Answer what has come, then let some more come: to wake up costs as much as to answer."""
        loop, listener = asyncio.get_running_loop(), user_socket.listener
        listening = user_socket.pause is None
        taken = 0
        while taken < _MANY and self._read(user_socket):
            taken += 1
        pauses = 0 < taken < _MANY
        if listening and pauses:
            loop.remove_reader(listener.fileno())
        elif not listening and not pauses:
            loop.add_reader(listener.fileno(), self._answer, user_socket)
        user_socket.pause = loop.call_later(_TOGETHER_S, self._answer, user_socket) if pauses else None

    def _read(self, user_socket: UserSocket) -> bool:
        """Answer one datagram; whether there was one."""
        try:
            # Room for the credentials alone: descriptors that a stranger sends along are closed by the kernel.
            datagram, ancillary, _, address = user_socket.listener.recvmsg(
                MOST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            LOG.warning("a datagram could not be read: %s", error)
            return False
        try:
            message = decode(datagram)  # of a longer one than any its beginning, which is none either
        except MalformedDatagramError:
            self.malformed += 1
            return True
        credentials = [
            data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        ]
        if not credentials or len(credentials[0]) != _CREDENTIALS.size or not address:
            self.strangers += 1
            return True
        pid, uid, gid = _CREDENTIALS.unpack(credentials[0])
        if pid <= 0 or (user_socket.uid is not None and uid != user_socket.uid):
            self.strangers += 1  # 0: from a pid namespace that is none of ours
            return True
        if isinstance(message, Hello):
            self._hellos += 1
            self._send(user_socket, instances_reply(self._hellos), address)
            return True
        client = self.registry.poll(message, pid, uid, gid, address)
        if client is not None:
            reply, delivered = self.registry.answer(client)
            if self._send(user_socket, reply, address) and delivered is not None:
                delivered()
            self.registry.answered(client)
        return True

    def _send(self, user_socket: UserSocket, reply: bytes, address: str | bytes) -> bool:
        """Answer from the socket that was asked, to one of the same kind; never wait. Whether it went."""
        try:
            if user_socket.handle is None:
                if not isinstance(address, bytes) or not address.startswith(b"\0"):
                    self.strangers += 1
                    return False
                user_socket.listener.sendto(reply, socket.MSG_DONTWAIT, address)
                return True
            folder, _, name = address.rpartition("/") if isinstance(address, str) else ("", "", "")
            if folder != str(user_socket.directory) or not _CLIENT.fullmatch(name):
                self.strangers += 1
                return False
            handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=user_socket.handle)
            try:
                status = os.fstat(handle)
                if not stat.S_ISSOCK(status.st_mode) or status.st_uid != user_socket.uid:
                    self.strangers += 1
                    return False
                user_socket.listener.sendto(reply, socket.MSG_DONTWAIT, f"/proc/self/fd/{handle}")
            finally:
                os.close(handle)
        except OSError:  # its queue is full, or it has ended: it asks again
            self.dropped += 1
            return False
        return True
