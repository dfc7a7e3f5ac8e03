"""The user's input files by rank: device trace, host trace, and for a capture the graph step that
joins the two.
"""

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from traceloom.errors import InputError, UsageError
from traceloom.formats.host_trace import HostTraceHead, peek_either
from traceloom.formats.inputs import (
    FileHead,
    InputFile,
    InputSet,
    choose_run_names,
    find,
    identify_job,
    list_windows,
    split_into_runs,
)
from traceloom.system.files import remember_input
from traceloom.trace.notice import Notice

AnyPath = str | os.PathLike[str]
Window = Literal["timed", "graph"]

_IGNORED_ERRORS = ("not-a-trace", "empty-file")  # files that may be in a directory of traces
_SUFFIXES = re.compile(r"(\.(json|gz|pt|zip|et))+$", re.IGNORECASE)
_SEPARATORS = re.compile(r"[^a-z0-9]+")
# Words in file names that indicate the kind of trace.
_KIND_WORDS = frozenset(
    {
        "host",
        "device",
        "kineto",
        "trace",
        "traces",
        "et",
        "eg",
        "pytorch",
        "torch",
        "execution",
        "graph",
        "gpu",
        "cpu",
        "profile",
        "profiler",
        "pt",
        "json",
    }
)


class RankInput(Struct, frozen=True):
    """The files of one rank.

    Attributes:
        rank: The rank; 0 where the only device trace does not state it.
        device: The device trace that becomes the graph.
        host: The host trace of that process.
        graph_step: For a capture: the device trace of the step that the host trace is of, where
            that is another than `device`.
    """

    rank: int
    device: InputFile
    host: InputFile | None = None
    graph_step: InputFile | None = None


class Inputs(Struct):
    """The files to link.

    Attributes:
        name: Short name of what the user gave.
        ranks: One entry per rank, ascending.
        notices: Notices about what is missing or left out.
        refused: Files that could not be used.
    """

    name: str
    ranks: list[RankInput] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    refused: list[InputError] = field(default_factory=list)


def find_inputs(*paths: AnyPath, window: Window = "timed") -> Inputs:
    """Finds out which files belong to which rank; kinds are recognized by content, so files may
    come in any order.

    Host traces go to the device trace of the same process id, else of the same rank, else of the
    same name.

    Args:
        paths: Files, directories, captures; `-` is a device trace from standard input.
        window: For a capture, what to link: the timed window, or the graph step.

    Raises:
        UsageError: `no-inputs`, `several-runs`, `stdin-among-files`.
        InputError: Nothing given is a device trace; a rank has two of something; ranks cannot be
            distinguished.
    """
    if not paths:
        raise UsageError("expected at least one file or directory, got none", slug="no-inputs")
    path_texts = tuple(os.fspath(path) for path in paths)
    sources = find(path_texts)
    if sources.captures:
        return _list_capture_inputs(sources, path_texts, window)
    if len(sources.inputs) > 1 and any(str(file.path) == "-" for file in sources.inputs):
        raise UsageError("standard input (`-`) can only be read alone", slug="stdin-among-files")
    devices: list[FileHead] = []
    hosts: list[HostTraceHead] = []
    refused: list[InputError] = []
    for file in sources.inputs:
        try:
            head = peek_either(file)
        except InputError as error:
            if file.given or error.slug not in _IGNORED_ERRORS:
                refused.append(error)
                remember_input(file.path)
            continue
        remember_input(file.path)
        if isinstance(head, HostTraceHead):
            hosts.append(head)
        else:
            devices.append(head)
    if not devices and hosts:
        raise InputError(
            f"only host traces were given ({_format_paths(host.source.path for host in hosts)}); they hold no times",
            slug="no-device-trace",
            hint="give the Kineto traces of the same processes with them",
        )
    if not devices and refused:
        raise refused[0]
    if not devices:
        location = ", ".join(path_texts)
        raise InputError(
            "the directory holds no trace among its .json files", slug="no-traces", where=location
        )
    runs = split_into_runs(devices)
    if len(runs) > 1:
        listing = "; ".join(choose_run_names(runs, path_texts)[:6])
        example = shlex.join(str(peek.source.path) for peek in runs[0][:4])
        raise UsageError(
            f"the inputs hold {len(runs)} runs, expected one: {listing}{'; ...' if len(runs) > 6 else ''}",
            slug="several-runs",
            hint=f"give the files of one run, as in: traceloom link {example}{' ...' if len(runs[0]) > 4 else ''}",
        )
    out = Inputs(choose_run_names(runs, path_texts)[0], refused=refused)
    ranks = _map_by_rank(devices)
    pairs = _match_host_traces(ranks, hosts, out.notices)
    for rank, device in sorted(ranks.items()):
        out.ranks.append(RankInput(rank, device.source, pairs.get(rank)))
    _add_missing_notices(out, max((device.world_size or 1 for device in devices), default=1))
    return out


# -- plain files -----------------------------------------------------------------------------------


def _map_by_rank(devices: list[FileHead]) -> dict[int, FileHead]:
    unknown = [device for device in devices if device.rank is None]
    if unknown and len(devices) > 1 and len({device.process for device in devices}) == len(devices):
        raise InputError(
            f"{len(unknown)} of {len(devices)} device traces do not say their rank: "
            f"{_format_paths(device.source.path for device in unknown)}",
            slug="unknown-ranks",
            hint="put the rank into the file names, as in rank0.json.gz",
        )
    ranks: dict[int, FileHead] = {}
    for device in devices:
        rank = device.rank or 0
        if rank in ranks:
            raise InputError(
                f"there are two device traces of rank {rank}: {_format_paths([ranks[rank].source.path, device.source.path])}",
                slug="several-windows",
                hint="a graph is of one window; give one device trace per rank",
            )
        ranks[rank] = device
    return ranks


def _match_host_traces(
    ranks: dict[int, FileHead], hosts: list[HostTraceHead], notices: list[Notice]
) -> dict[int, InputFile]:
    pairs: dict[int, HostTraceHead] = {}
    unmatched = []
    for host in hosts:
        rank = _find_rank(host, ranks)
        if rank is None:
            unmatched.append(host)
        elif rank in pairs:
            raise InputError(
                f"there are two host traces for rank {rank}: {_format_paths([pairs[rank].source.path, host.source.path])}",
                slug="two-host-traces",
                hint="give the one that was recorded together with the device trace",
            )
        else:
            pairs[rank] = host
    free = [rank for rank in ranks if rank not in pairs]
    if len(unmatched) == 1 and len(free) == 1:
        # The match itself checks whether they belong together.
        pairs[free[0]] = unmatched.pop()
    if unmatched:
        count_text = "1 host trace" if len(unmatched) == 1 else f"{len(unmatched)} host traces"
        text = f"no device trace goes with {count_text}: {_format_paths(unpaired.source.path for unpaired in unmatched)}"
        notices.append(
            Notice(
                "unpaired-host-trace",
                "warning",
                text,
                len(unmatched),
                where=str(unmatched[0].source.path),
            )
        )
    return {rank: host.source for rank, host in pairs.items()}


def _find_rank(host: HostTraceHead, ranks: dict[int, FileHead]) -> int | None:
    """Returns the rank whose device trace is of the same process, rank or name."""
    if host.process is not None:
        same = [rank for rank, device in ranks.items() if device.process == host.process]
        if len(same) == 1:
            return same[0]
        if host.rank in same:  # process ids of different machines may be equal
            return host.rank
    if host.rank is not None:
        return host.rank if host.rank in ranks else None
    name = _normalize_name(host.source.path)
    same = [rank for rank, device in ranks.items() if _normalize_name(device.source.path) == name]
    return same[0] if len(same) == 1 else None


def _normalize_name(path: Path) -> tuple[str, ...]:
    """Returns the parts of a name without the words that indicate the kind of trace."""
    parts = _SEPARATORS.split(_SUFFIXES.sub("", path.name).lower())
    return tuple(word for word in parts if word and word not in _KIND_WORDS)


# -- captures --------------------------------------------------------------------------------------


def _list_capture_inputs(sources: InputSet, paths: tuple[str, ...], window: Window) -> Inputs:
    folders = {
        directory.resolve() for directory in sources.captures
    }  # files in there may also be given next to the capture
    if len(sources.captures) > 1 or any(
        file.capture is None and file.path.resolve().parent not in folders
        for file in sources.inputs
    ):
        raise UsageError(
            "a capture was given together with other traces, expected one run",
            slug="several-runs",
            hint=f"as in: traceloom link {shlex.quote(str(next(iter(sources.captures))))}",
        )
    directory, document = next(iter(sources.captures.items()))
    out = Inputs(str(directory) if len(paths) > 1 else paths[0])
    out.notices.extend(sources.notices.get(directory, []))
    listed = document.get("ranks")
    entries = (
        [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    )
    jobs: dict[str | int, list[str]] = {}
    for name, entry in list_windows(document):
        jobs.setdefault(identify_job(entry), []).append(str(directory / name))
    if len(jobs) > 1:
        first, *_ = jobs.values()
        raise UsageError(
            f"the capture holds {len(jobs)} runs (processes of no common group), expected one: "
            f"{'; '.join(names[0] for names in list(jobs.values())[:6])}{'; ...' if len(jobs) > 6 else ''}",
            slug="several-runs",
            where=str(directory),
            hint=f"give the files of one run, as in: traceloom link {shlex.join(first[:4])}",
        )
    for entry in entries:
        _add_entry(out, directory, entry, window)
    if not out.ranks:
        raise InputError(
            "the capture holds no trace that can be linked", slug="no-traces", where=str(directory)
        )
    out.ranks.sort(key=lambda rank_input: rank_input.rank)
    _add_missing_notices(
        out, max((int(entry.get("world_size") or 1) for entry in entries), default=1)
    )
    if window == "graph":
        text = (
            "the graph step was recorded with PyTorch's observer, which slows every op down: dependencies are exact, "
            "durations contain its cost"
        )
        out.notices.append(
            Notice("observer-cost", "warning", text, len(out.ranks), where=str(directory))
        )
    return out


def _add_entry(out: Inputs, directory: Path, entry: dict[str, Any], window: Window) -> None:
    rank = entry.get("rank")
    rank = rank if isinstance(rank, int) and 0 <= rank < 2**31 else 0
    listed = entry.get("windows")
    timed_files = [
        file
        for listed_window in (listed if isinstance(listed, list) else [entry.get("window")])
        if (file := _find_capture_file(directory, listed_window))
    ]
    step = entry.get("graph_step")
    graph, host = (
        _find_capture_file(directory, step),
        _find_capture_file(directory, step, "host_file"),
    )
    if any(earlier.rank == rank for earlier in out.ranks):
        text = f"a second process of rank {rank} was recorded (a restart); it is left out"
        out.notices.append(
            Notice("several-windows", "warning", text, rank=rank, where=str(directory))
        )
        return

    def of(path: Path) -> InputFile:
        return InputFile(path, given=False, capture=directory, entry=entry)

    if window == "graph":
        if graph is None:
            text = f"rank {rank} has no graph step: it was not recorded, or the run ended before it"
            raise InputError(
                text,
                slug="graph-step-missing",
                where=str(directory),
                hint="link the timed window instead, or record with `traceloom record --graph`",
            )
        out.ranks.append(RankInput(rank, of(graph), of(host) if host else None))
        return
    if not timed_files:
        out.notices.append(
            Notice(
                "missing-window",
                "warning",
                f"rank {rank} has no timed window",
                rank=rank,
                where=str(directory),
            )
        )
        return
    if len(timed_files) > 1:
        text = f"rank {rank} has {len(timed_files)} timed windows; the first is linked"
        out.notices.append(
            Notice(
                "several-windows",
                "warning",
                text,
                len(timed_files),
                rank=rank,
                where=str(directory),
            )
        )
    has_pair = graph is not None and host is not None
    out.ranks.append(
        RankInput(
            rank,
            of(timed_files[0]),
            of(host) if has_pair and host else None,
            of(graph) if has_pair and graph else None,
        )
    )


def _find_capture_file(directory: Path, part: Any, key: str = "file") -> Path | None:
    """Returns a file that capture.json names, if it exists; a name never leads out of the
    directory.
    """
    name = part.get(key) if isinstance(part, dict) else None
    if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
        return None
    return directory / name


# -- what is missing -------------------------------------------------------------------------------


def _add_missing_notices(out: Inputs, world: int) -> None:
    have = {rank_input.rank for rank_input in out.ranks}
    absent = [rank for rank in range(min(world, 1 << 20)) if rank not in have]
    if absent and len(have) > 0 and world > 1:
        text = (
            f"{len(absent)} of {world} ranks {'are' if len(absent) > 1 else 'is'} missing ({_format_ranks(absent)}); "
            f"when {'they arrive' if len(absent) > 1 else 'it arrives'} at collectives is assumed"
        )
        out.notices.append(Notice("missing-ranks", "warning", text, len(absent)))
    without_host = [rank_input.rank for rank_input in out.ranks if rank_input.host is None]
    if without_host:
        rank_text = (
            ""
            if len(out.ranks) == 1
            else f" for rank{'s' if len(without_host) > 1 else ''} {_format_ranks(without_host)}"
        )
        text = (
            f"there is no host trace{rank_text}: it is not known which tensors ops use, and data edges are missing; "
            "`traceloom record --graph` records it"
        )
        out.notices.append(Notice("no-host-trace", "info", text, len(without_host)))


def _format_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _format_paths(paths: Iterable[Path]) -> str:
    texts = [str(path) for path in paths]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
