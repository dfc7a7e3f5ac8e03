"""One capture of all hosts from what each of them sent: unique names, one list of ranks, one clock.

The files stay as they came. The offset of each host's clock stands in `capture.json`, and whoever reads the capture
adds it; `link` refines it by collectives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from traceloom import __version__
from traceloom.agent.uplink.messages import ClockOffset
from traceloom.errors import InputError
from traceloom.read import capture_document

CAPTURE = "capture.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_TIMES_OF_WINDOW, _TIMES_OF_RANK = ("start_ns", "end_ns"), ("created_ns", "written_ns")


class HostPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a host sent for a request. `clock` None: how far its clock is off is not known."""

    host: str
    folder: Path
    clock: ClockOffset | None = None


def stitch(parts: Sequence[HostPart], folder: Path, request: Mapping[str, Any]) -> list[str]:
    """Join the parts in a new directory, by hard links where the file system has them.

    Args:
        parts: Of each host, at least one.
        folder: Made here; must not exist.
        request: What was asked for; `hosts` and `targets` are added to it.

    Returns:
        What was wrong with parts, a sentence each.

    Raises:
        InputError: `no-capture`: no part holds a capture that can be read.
        OSError: It cannot be written; the directory may hold a part then.
    """
    folder.mkdir()
    faults: list[str] = []
    taken: set[str] = {CAPTURE}
    ranks: list[dict[str, Any]] = []
    hosts: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    beside: dict[str, list[str]] = {}
    for part in parts:
        clock = None if part.clock is None else {"offset_ns": part.clock.offset_ns, "error_ns": part.clock.error_ns}
        hosts.append({"host": part.host, "clock": clock})
        try:
            decoded = capture_document.decode((part.folder / CAPTURE).read_bytes(), CAPTURE)
        except InputError as error:
            faults.append(f"{part.host}: {error.message}")
            continue
        except OSError:  # it did not come
            decoded = None
        if decoded is None:
            faults.append(f"{part.host}: its capture.json cannot be read")
            continue
        document, notices = decoded
        faults += [f"{part.host}: {notice.message}" for notice in notices]
        if not document["ranks"]:
            faults.append(f"{part.host}: its capture.json names no rank")
        names = _renamed(sorted(path.name for path in part.folder.iterdir()), taken, part.host)
        names = {name: new for name, new in names.items() if new not in taken}
        taken |= set(names.values())
        for name, new in names.items():
            source = part.folder / name
            if source.is_symlink() or not source.is_file():
                continue
            try:
                os.link(source, folder / new)
            except OSError:  # where the file system has no hard links
                shutil.copyfile(source, folder / new)
        names = {name: new for name, new in names.items() if (folder / new).exists()}
        for entry in document["ranks"]:
            window = entry.get("window") or {}
            if names.get(str(window.get("file"))) is None:
                faults.append(f"{part.host}: rank {entry.get('rank')} names a file that did not come")
                continue
            ranks.append(_on_clock(entry, names, part.host, clock))
        asked = document.get("request")
        listed = asked.get("targets") if isinstance(asked, dict) else None
        for target in listed if isinstance(listed, list) else ():
            if not isinstance(target, dict):
                continue
            file = target.get("file")
            targets.append({**target, "host": part.host, "file": names.get(file, "") if isinstance(file, str) else ""})
        for kind in ("stacks", "telemetry"):
            listed = document.get(kind)
            sent = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
            files = [names[name] for name in sent if name in names]
            beside.setdefault(kind, []).extend(files)
    if not ranks:
        raise InputError("no host sent a trace that can be read", slug="no-capture", hint="; ".join(faults)[:500])
    ranks.sort(key=lambda entry: (entry.get("rank") is None, entry.get("rank") or 0, str(entry.get("host"))))
    whole = {
        "format": capture_document.FORMAT, "version": capture_document.VERSION, "traceloom": __version__,
        "stage": "profiled", "run": {}, "ranks": ranks, "request": {**request, "hosts": hosts, "targets": targets},
        **{kind: files for kind, files in beside.items() if files},
    }  # fmt: skip
    (folder / CAPTURE).write_text(json.dumps(whole, indent=1), encoding="utf-8")
    return faults


def _renamed(names: Iterable[str], taken: set[str], host: str) -> dict[str, str]:
    """New name of each file: its own, with the host before all names of a process where one of them is taken."""
    usable = [name for name in names if _NAME.fullmatch(name) and name != CAPTURE]
    clashes = {name.partition(".")[0] for name in usable if name in taken}
    before = re.sub(r"[^A-Za-z0-9_-]", "_", host)
    return {name: f"{before}-{name}" if name.partition(".")[0] in clashes else name for name in usable}


def _on_clock(
    entry: dict[str, Any], names: Mapping[str, str], host: str, clock: dict[str, int] | None
) -> dict[str, Any]:
    """The entry of a rank with the new names of its files and its times on the capture's clock."""
    offset = clock["offset_ns"] if clock is not None else 0
    window = {**entry["window"], "file": names[entry["window"]["file"]]}
    moved = dict(entry)
    for place, keys in ((window, _TIMES_OF_WINDOW), (moved, _TIMES_OF_RANK)):
        for key in keys:
            if isinstance(place.get(key), int):
                place[key] += offset
    stem = window["file"].partition(".")[0]
    return {**moved, "name": stem, "host": host, "clock": clock, "window": window}
