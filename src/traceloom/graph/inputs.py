"""What the user gave, by rank: device trace, host trace, and of a capture the graph step that joins the two."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from traceloom.errors import InputError, UsageError
from traceloom.formats.host_trace import HostPeek, peek_either
from traceloom.formats.inputs import FileHead, InputFile, InputSet, find, group, job_of, name_runs, windows
from traceloom.system.files import note_input
from traceloom.trace.notice import Notice

AnyPath = str | os.PathLike[str]
Window = Literal["timed", "graph"]

_BESIDE = ("not-a-trace", "empty-file")  # files that may lie beside traces in a directory
_ENDINGS = re.compile(r"(\.(json|gz|pt|zip|et))+$", re.IGNORECASE)
_WORDS = re.compile(r"[^a-z0-9]+")
# Words in names of files that say which of the two traces it is.
_KIND_WORDS = frozenset({
    "host", "device", "kineto", "trace", "traces", "et", "eg", "pytorch", "torch", "execution", "graph", "gpu", "cpu",
    "profile", "profiler", "pt", "json",
})  # fmt: skip


class RankInput(Struct, frozen=True):
    """The files of one rank.

    Attributes:
        rank: The rank; 0 where the only device trace does not say it.
        device: The device trace that becomes the graph.
        host: The host trace of that process.
        graph_step: Of a capture: the device trace of the step that the host trace is of, where that is another than
            `device`.
    """

    rank: int
    device: InputFile
    host: InputFile | None = None
    graph_step: InputFile | None = None


class Inputs(Struct):
    """What there is to link.

    Attributes:
        name: What the user gave, in a word.
        ranks: One entry per rank, ascending.
        notices: What is missing or left out.
        refused: Files that could not be used.
    """

    name: str
    ranks: list[RankInput] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    refused: list[InputError] = field(default_factory=list)


def find_inputs(*paths: AnyPath, window: Window = "timed") -> Inputs:
    """Find out which files belong to which rank; kinds are told by content, so files may come in any order.

    Host traces go to the device trace of the same process id, else of the same rank, else of the same name.

    Args:
        paths: Files, directories, captures; `-` is a device trace from standard input.
        window: Of a capture, what to link: the timed window, or the graph step.

    Raises:
        UsageError: `no-inputs`, `several-runs`, `stdin-among-files`.
        InputError: Nothing given is a device trace; a rank has two of something; ranks cannot be distinguished.
    """
    if not paths:
        raise UsageError("expected at least one file or directory, got none", slug="no-inputs")
    path_texts = tuple(os.fspath(path) for path in paths)
    sources = find(path_texts)
    if sources.captures:
        return _of_capture(sources, path_texts, window)
    if len(sources.inputs) > 1 and any(str(file.path) == "-" for file in sources.inputs):
        raise UsageError("standard input (`-`) can only be read alone", slug="stdin-among-files")
    devices: list[FileHead] = []
    hosts: list[HostPeek] = []
    refused: list[InputError] = []
    for file in sources.inputs:
        try:
            seen = peek_either(file)
        except InputError as error:
            if file.given or error.slug not in _BESIDE:
                refused.append(error)
                note_input(file.path)
            continue
        note_input(file.path)
        if isinstance(seen, HostPeek):
            hosts.append(seen)
        else:
            devices.append(seen)
    if not devices and hosts:
        raise InputError(
            f"only host traces were given ({_listed(host.source.path for host in hosts)}); they hold no times",
            slug="no-device-trace",
            hint="give the Kineto traces of the same processes with them",
        )
    if not devices and refused:
        raise refused[0]
    if not devices:
        where = ", ".join(path_texts)
        raise InputError("the directory holds no trace among its .json files", slug="no-traces", where=where)
    runs = group(devices)
    if len(runs) > 1:
        shown = "; ".join(name_runs(runs, path_texts)[:6])
        example = shlex.join(str(peek.source.path) for peek in runs[0][:4])
        raise UsageError(
            f"the inputs hold {len(runs)} runs, expected one: {shown}{'; ...' if len(runs) > 6 else ''}",
            slug="several-runs",
            hint=f"give the files of one run, as in: traceloom link {example}{' ...' if len(runs[0]) > 4 else ''}",
        )
    out = Inputs(name_runs(runs, path_texts)[0], refused=refused)
    ranks = _ranks(devices)
    pairs = _paired(ranks, hosts, out.notices)
    for rank, device in sorted(ranks.items()):
        out.ranks.append(RankInput(rank, device.source, pairs.get(rank)))
    _say_missing(out, max((device.world_size or 1 for device in devices), default=1))
    return out


# -- plain files ------------------------------------------------------------------------------------------------------


def _ranks(devices: list[FileHead]) -> dict[int, FileHead]:
    """Device traces by rank; each rank has one."""
    unknown = [device for device in devices if device.rank is None]
    if unknown and len(devices) > 1 and len({device.process for device in devices}) == len(devices):
        raise InputError(
            f"{len(unknown)} of {len(devices)} device traces do not say their rank: "
            f"{_listed(device.source.path for device in unknown)}",
            slug="unknown-ranks",
            hint="put the rank into the file names, as in rank0.json.gz",
        )
    ranks: dict[int, FileHead] = {}
    for device in devices:
        rank = device.rank or 0
        if rank in ranks:
            raise InputError(
                f"there are two device traces of rank {rank}: {_listed([ranks[rank].source.path, device.source.path])}",
                slug="several-windows",
                hint="a graph is of one window; give one device trace per rank",
            )
        ranks[rank] = device
    return ranks


def _paired(ranks: dict[int, FileHead], hosts: list[HostPeek], notices: list[Notice]) -> dict[int, InputFile]:
    """The host trace of each rank."""
    pairs: dict[int, HostPeek] = {}
    left = []
    for host in hosts:
        rank = _rank_of(host, ranks)
        if rank is None:
            left.append(host)
        elif rank in pairs:
            raise InputError(
                f"there are two host traces for rank {rank}: {_listed([pairs[rank].source.path, host.source.path])}",
                slug="two-host-traces",
                hint="give the one that was recorded together with the device trace",
            )
        else:
            pairs[rank] = host
    free = [rank for rank in ranks if rank not in pairs]
    if len(left) == 1 and len(free) == 1:
        # Whether they belong together is seen when they are matched.
        pairs[free[0]] = left.pop()
    if left:
        count_text = "1 host trace" if len(left) == 1 else f"{len(left)} host traces"
        text = f"no device trace goes with {count_text}: {_listed(unpaired.source.path for unpaired in left)}"
        notices.append(Notice("unpaired-host-trace", "warning", text, len(left), where=str(left[0].source.path)))
    return {rank: host.source for rank, host in pairs.items()}


def _rank_of(host: HostPeek, ranks: dict[int, FileHead]) -> int | None:
    """The rank whose device trace is of the same process, rank or name."""
    if host.process is not None:
        same = [rank for rank, device in ranks.items() if device.process == host.process]
        if len(same) == 1:
            return same[0]
        if host.rank in same:  # process ids of different machines may be equal
            return host.rank
    if host.rank is not None:
        return host.rank if host.rank in ranks else None
    name = _stem(host.source.path)
    same = [rank for rank, device in ranks.items() if _stem(device.source.path) == name]
    return same[0] if len(same) == 1 else None


def _stem(path: Path) -> tuple[str, ...]:
    """What is left of a name without the words that say what kind of trace it is."""
    words = _WORDS.split(_ENDINGS.sub("", path.name).lower())
    return tuple(word for word in words if word and word not in _KIND_WORDS)


# -- captures ---------------------------------------------------------------------------------------------------------


def _of_capture(sources: InputSet, paths: tuple[str, ...], window: Window) -> Inputs:
    folders = {folder.resolve() for folder in sources.captures}  # files in there may be named beside the capture
    if len(sources.captures) > 1 or any(
        file.capture is None and file.path.resolve().parent not in folders for file in sources.inputs
    ):
        raise UsageError(
            "a capture was given together with other traces, expected one run",
            slug="several-runs",
            hint=f"as in: traceloom link {shlex.quote(str(next(iter(sources.captures))))}",
        )
    folder, document = next(iter(sources.captures.items()))
    out = Inputs(str(folder) if len(paths) > 1 else paths[0])
    out.notices.extend(sources.notices.get(folder, []))
    listed = document.get("ranks")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    jobs: dict[str | int, list[str]] = {}
    for name, entry in windows(document):
        jobs.setdefault(job_of(entry), []).append(str(folder / name))
    if len(jobs) > 1:
        first, *_ = jobs.values()
        raise UsageError(
            f"the capture holds {len(jobs)} runs (processes of no common group), expected one: "
            f"{'; '.join(names[0] for names in list(jobs.values())[:6])}{'; ...' if len(jobs) > 6 else ''}",
            slug="several-runs",
            where=str(folder),
            hint=f"give the files of one run, as in: traceloom link {shlex.join(first[:4])}",
        )
    for entry in entries:
        _add_entry(out, folder, entry, window)
    if not out.ranks:
        raise InputError("the capture holds no trace that can be linked", slug="no-traces", where=str(folder))
    out.ranks.sort(key=lambda rank_input: rank_input.rank)
    _say_missing(out, max((int(entry.get("world_size") or 1) for entry in entries), default=1))
    if window == "graph":
        text = (
            "the graph step was recorded with PyTorch's observer, which slows every op down: dependencies are exact, "
            "durations contain its cost"
        )
        out.notices.append(Notice("observer-cost", "warning", text, len(out.ranks), where=str(folder)))
    return out


def _add_entry(out: Inputs, folder: Path, entry: dict[str, Any], window: Window) -> None:
    rank = entry.get("rank")
    rank = rank if isinstance(rank, int) and 0 <= rank < 2**31 else 0
    listed = entry.get("windows")
    timed = [
        file
        for listed_window in (listed if isinstance(listed, list) else [entry.get("window")])
        if (file := _file(folder, listed_window))
    ]
    step = entry.get("graph_step")
    graph, host = _file(folder, step), _file(folder, step, "host_file")
    if any(earlier.rank == rank for earlier in out.ranks):
        text = f"a second process of rank {rank} was recorded (a restart); it is left out"
        out.notices.append(Notice("several-windows", "warning", text, rank=rank, where=str(folder)))
        return

    def of(path: Path) -> InputFile:
        return InputFile(path, given=False, capture=folder, entry=entry)

    if window == "graph":
        if graph is None:
            text = f"rank {rank} has no graph step: it was not recorded, or the run ended before it"
            raise InputError(text, slug="graph-step-missing", where=str(folder), hint="link the timed window instead")
        out.ranks.append(RankInput(rank, of(graph), of(host) if host else None))
        return
    if not timed:
        out.notices.append(
            Notice("missing-window", "warning", f"rank {rank} has no timed window", rank=rank, where=str(folder))
        )
        return
    if len(timed) > 1:
        text = f"rank {rank} has {len(timed)} timed windows; the first is linked"
        out.notices.append(Notice("several-windows", "warning", text, len(timed), rank=rank, where=str(folder)))
    whole = graph is not None and host is not None
    out.ranks.append(
        RankInput(rank, of(timed[0]), of(host) if whole and host else None, of(graph) if whole and graph else None)
    )


def _file(folder: Path, part: Any, key: str = "file") -> Path | None:
    """A file that capture.json names, if it is there; a name never leads out of the directory."""
    name = part.get(key) if isinstance(part, dict) else None
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        return None
    return folder / name


# -- what is missing --------------------------------------------------------------------------------------------------


def _say_missing(out: Inputs, world: int) -> None:
    have = {rank_input.rank for rank_input in out.ranks}
    absent = [rank for rank in range(min(world, 1 << 20)) if rank not in have]
    if absent and len(have) > 0 and world > 1:
        text = (
            f"{len(absent)} of {world} ranks {'are' if len(absent) > 1 else 'is'} missing ({_numbers(absent)}); "
            f"when {'they arrive' if len(absent) > 1 else 'it arrives'} at collectives is assumed"
        )
        out.notices.append(Notice("missing-ranks", "warning", text, len(absent)))
    alone = [rank_input.rank for rank_input in out.ranks if rank_input.host is None]
    if alone:
        of_ranks = "" if len(out.ranks) == 1 else f" for rank{'s' if len(alone) > 1 else ''} {_numbers(alone)}"
        text = f"there is no host trace{of_ranks}: ops have no tensors, and data edges are missing"
        out.notices.append(Notice("no-host-trace", "info", text, len(alone)))


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _listed(paths: Iterable[Path]) -> str:
    every = [str(path) for path in paths]
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")
