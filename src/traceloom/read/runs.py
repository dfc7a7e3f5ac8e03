"""Which files belong to one run, told from their first part only."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

from msgspec import Struct

from traceloom.files import with_addresses
from traceloom.read import metadata as md
from traceloom.read.damage import Damage
from traceloom.read.document import Document
from traceloom.read.inputs import Input, job_of
from traceloom.read.source import first_pieces, open_input
from traceloom.read.times import from_text

_NEAR_NS = 600 * 10**9  # ranks of one run start their windows within ten minutes
_FAR_NS = 3600 * 10**9
_JOB = re.compile(r"^(PT_PROFILER_JOB_\w*ID\w*|group_trace_id|mast_job_name|tw_job|job_id)$", re.IGNORECASE)


class Peek(Struct, frozen=True):
    """What the first part of a file tells.

    Attributes:
        source: The file.
        rank: From capture.json, `distributedInfo` or the file name.
        world_size: From the same.
        job: Job ids.
        part: Of a capture: what its parts of one job have in common.
        host: Host name.
        process: Process id of the first event.
        start_ns: Earliest time of the first slice; None where the clock is not Unix time.
        pattern: Directory and file name, digits replaced.
    """

    source: Input
    rank: int | None
    world_size: int | None
    job: tuple[tuple[str, str], ...]
    part: str | int | None
    host: str | None
    process: Any
    start_ns: int | None
    pattern: str


def peek(source: Input) -> Peek:
    """Read the metadata and the first slice of a file.

    Raises:
        InputError: It is no trace.
    """
    damage = Damage()
    with open_input(source.path) as stream:
        document = Document(partial(first_pieces, stream, damage), damage, str(source.path))
        slices = document.slices()
        first = next(slices, None)
        slices.close()
    metadata = document.metadata
    entries = [entry for entry in first.entries if entry.ph == "X"] if first else []
    process = next((entry.pid for entry in entries if isinstance(entry.pid, int) and entry.pid > 0), None)
    start = None
    if entries and first and first.exact:
        starts, _, good, _ = from_text([entry.ts for entry in entries], [b"0"] * len(entries))
        start = int(starts[good].min()) if good.any() else None
    elif times := [entry.ts for entry in entries if entry.ts == entry.ts]:  # no NaN
        start = int(min(times) * 1000)
    if start is not None:
        start += md.base_ns(metadata, source.entry)
    info = md.distributed(metadata)
    entry = source.entry or {}
    rank, _, _ = md.find_rank(metadata, None, str(source.path), source.entry)
    host = metadata.get("host_name")
    return Peek(
        source=source,
        rank=rank,
        world_size=md.whole(entry.get("world_size")) or md.whole(info.get("world_size")),
        part=None if source.entry is None else job_of(source.entry),
        job=tuple(sorted((key, str(value)) for key, value in metadata.items() if _JOB.match(key))),
        host=host if isinstance(host, str) and host else None,
        process=process,
        start_ns=start if start is not None and start > 10**18 else None,
        pattern=re.sub(r"\d+", "#", str(source.path)),
    )


def same_run(left: Peek, right: Peek) -> bool:
    """Whether two files are of one run: captures, job ids, world size, time, processes and names, in this order."""
    if left.source.capture is not None or right.source.capture is not None:
        return left.source.capture == right.source.capture and left.part == right.part
    jobs, others = dict(left.job), dict(right.job)
    if any(jobs[key] != others[key] for key in jobs.keys() & others.keys()):
        return False
    if left.world_size is not None and right.world_size is not None and left.world_size != right.world_size:
        return False
    gap = None if left.start_ns is None or right.start_ns is None else abs(left.start_ns - right.start_ns)
    alike = left.pattern == right.pattern
    if (left.world_size or 0) > 1 and (right.world_size or 0) > 1:
        return (gap is not None and gap <= (_FAR_NS if alike else _NEAR_NS)) or (gap is None and alike)
    same_process = left.process is not None and left.process == right.process and left.host == right.host
    if left.rank == right.rank:
        return alike and same_process and left.start_ns != right.start_ns
    return alike and None not in (left.rank, right.rank) and (gap is None or gap <= _FAR_NS)


def group(peeks: list[Peek]) -> list[list[Peek]]:
    """Files by run, in the order of their first file."""
    runs: list[list[Peek]] = []
    for candidate in peeks:
        home = next((run for run in runs if same_run(run[0], candidate) or same_run(run[-1], candidate)), None)
        if home is None:
            runs.append([candidate])
        else:
            home.append(candidate)
    return runs


def names(runs: list[list[Peek]], requested: tuple[str, ...]) -> list[str]:
    """A name for each run: what the user gave where there is one run, else what its files have in common."""
    if len(runs) == len(requested) == 1:
        return [requested[0]]
    homes = [run[0].source.capture for run in runs]  # that of all its files
    runs_in = Counter(homes)
    labels = []
    for run, home in zip(runs, homes, strict=True):
        paths = [peek.source.path for peek in run]
        if len(runs) > 1 and home is not None and runs_in[home] == 1:
            labels.append(str(home))
        elif len(set(paths)) == 1:
            labels.append(str(paths[0]))
        elif len({path.parent for path in paths}) > 1:
            parts = [with_addresses(path.as_posix()).split("/") for path in paths]
            shared = [column[0] for column in zip(*parts, strict=False) if len(set(column)) == 1]
            labels.append(("/".join(shared) or "/") if shared else str(paths[0]))
        else:
            masked = {re.sub(r"\d+", "*", path.name) for path in paths}
            labels.append(str(paths[0].parent / (masked.pop() if len(masked) == 1 else paths[0].name)))
    return labels
