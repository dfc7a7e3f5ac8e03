"""Audit log of changes and refusals: one line of JSON each, append-only.

A full or read-only disk never stops the agent: lines that could not be written are counted, and
reported by the doctor.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

_MAX_LINE_BYTES = 4096
MAX_BYTES = 64 << 20  # then the file is renamed with a timestamp
MAX_FILES = 16  # the oldest ones beyond are deleted


class AuditLog:
    """Appends to the file; blocks, so it is called in a thread.

    Args:
        path: The file; its directory is created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self.last_error = ""  # why the last line could not be written; "" if it was

    def write(self, actor: str, action: str, result: str, **details: object) -> None:
        """Append a line.

        Args:
            actor: As `uid 1000` or `token prometheus`.
            action: The requested action.
            result: `done`, or the slug of the refusal.
            details: Further fields, such as pid or target.
        """
        entry = {"at_ns": time.time_ns(), "who": actor, "what": action, "result": result}
        line = msgspec.json.encode({**entry, **details}, enc_hook=str)  # JSON escapes newlines
        if len(line) > _MAX_LINE_BYTES:  # whoever asks for much does not fill the disk
            beginning = line[:_MAX_LINE_BYTES].decode("utf-8", "replace")
            line = msgspec.json.encode({**entry, "cut": beginning})
        line += b"\n"
        try:
            self.path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            # One write to a file opened for appending: lines of several threads never mix.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # also where it has been for others to read
                size = os.fstat(descriptor).st_size
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
            self.last_error = ""
        except OSError as error:
            self.lost += 1
            self.last_error = f"{self.path}: {(error.strerror or str(error)).lower()}"
            return
        if size > MAX_BYTES:
            with contextlib.suppress(OSError):  # retried with the next line
                for old in sorted(self.path.parent.glob(f"{self.path.name}.*"))[: 1 - MAX_FILES]:
                    old.unlink()
                self.path.rename(self.path.with_name(f"{self.path.name}.{time.time_ns()}"))
