"""Runs verbs on damaged inputs, in this process, and judges how they end."""

from __future__ import annotations

import contextlib
import io
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.fuzzing.damages import damage
from support.fuzzing.seeds import FORMATS, trace
from support.tolerant import is_event, is_node, whole_objects
from traceloom.cli import main
from traceloom.errors import InputError

MOST_BYTES = 2 << 30
MOST_SECONDS = 20
LOST = "lost"  # a pseudo verb: are all whole entries there?
_TRACE = {
    "report": ["report", "{in}"],
    "report --json": ["report", "{in}", "--json"],
    "report -o html": ["report", "{in}", "-o", "{out}.html"],
    "report -o perfetto": ["report", "{in}", "-o", "{out}.perfetto.json.gz"],
    "whatif": ["whatif", "{in}", "--set", "kernels * 0.5"],
    "memory": ["memory", "{in}"],
    "memory -o html": ["memory", "{in}", "-o", "{out}.html"],
    "diff": ["diff", "{good}", "{in}"],
    "diff -o md": ["diff", "{in}", "{good}", "-o", "{out}.md"],
    "baseline": ["baseline", "save", "main", "{in}", "--store", "{out}"],
    "link": ["link", "{in}", "-o", "{out}.graph"],
    "anonymize": ["anonymize", "{in}", "-o", "{out}"],
}
_CHAKRA = {
    "validate": ["validate", "{in}"],
    "validate --json": ["validate", "{in}", "--json", "--target", "astra-sim"],
    "show": ["show", "{in}"],
    "show -o html": ["show", "{in}", "-o", "{out}.html"],
    "convert to graph": ["convert", "{in}", "{out}.graph"],
    "convert to perfetto": ["convert", "{in}", "{out}.perfetto.json.gz"],
    "convert to et": ["convert", "{in}", "{out}"],
}
_MEMORY = {
    "memory": ["memory", "{in}"],
    "memory --json": ["memory", "{in}", "--json", "--by", "stack"],
    "memory -o html": ["memory", "{in}", "-o", "{out}.html"],
    "memory -o csv": ["memory", "{in}", "-o", "{out}.csv", "--all"],
    "report": ["report", "{in}"],
}
_REPLAY = {"replay": ["replay", "{in}", "--plan-only", "-o", "{out}.plan"]}
_GRAPH = {name: words for name, words in _CHAKRA.items() if name.startswith(("show", "convert"))}
VERBS: dict[str, dict[str, list[str]]] = {
    "kineto": {LOST: [], **_TRACE},
    "host": {LOST: [], **_TRACE, **_REPLAY},
    "et": {
        **_CHAKRA,
        "anonymize": ["anonymize", "{in}", "-o", "{out}"],
        "report": ["report", "{in}"],
        **_REPLAY,
    },
    "snapshot": _MEMORY,
    "timeline": _MEMORY,
    "capture": {**_TRACE, **_REPLAY},
    "graph": {**_GRAPH, "report": ["report", "{in}"], "validate": ["validate", "{in}"], **_REPLAY},
    "directory": _TRACE,
}
_NO_CACHE = {"validate", "show", "convert", "anonymize"}
_FAULTS = re.compile(
    r"Traceback \(most recent|section-failed|a defect of Traceloom|internal-error|panicked at"
)


@dataclass(frozen=True)
class Case:
    """One damaged input and one verb.

    Attributes:
        format: Of the input.
        verb: What is run on it.
        seed: Of the damage.
    """

    format: str
    verb: str
    seed: int

    def __str__(self) -> str:
        return f"{self.format}:{self.verb}:{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        case: Which.
        code: Exit code.
        seconds: Processor time.
        fault: What is wrong, in a line; empty where nothing is.
    """

    case: Case
    code: int
    seconds: float
    fault: str = ""


def cases(count: int, seed: int) -> list[Case]:
    """So many cases, all formats and verbs in turn."""
    pairs = [
        (kind, verb)
        for kind, verbs in VERBS.items()
        for verb in verbs
        for _ in range(_weight(kind, verb))
    ]
    chance = random.Random(seed)
    return [
        Case(*pairs[number % len(pairs)], seed=chance.randrange(2**40)) for number in range(count)
    ]


def _weight(kind: str, verb: str) -> int:
    """Reports with all their sections take ten times as long as anything else."""
    slow = verb.startswith("report") and kind in {"kineto", "host", "capture", "directory"}
    return 1 if slow else 10 if verb == LOST else 3


def attempt(case: Case, seeds: Path) -> Outcome:
    """Run one case; `seeds` is a directory in which whole inputs are kept."""
    home = Path(tempfile.mkdtemp(dir=seeds))
    try:
        description, source = damaged_input(case, seeds, home)
        before, peak = time.process_time(), _peak()
        code, output = _lost(source) if case.verb == LOST else _run(case, source, seeds, home)
        seconds = time.process_time() - before
        return Outcome(case, code, seconds, _fault(code, output, seconds, description, peak))
    finally:
        shutil.rmtree(home, ignore_errors=True)


def damaged_input(case: Case, seeds: Path, home: Path) -> tuple[str, Path]:
    """What was damaged, and where it lies."""
    original = _whole(case.format, seeds)
    source = home / original.name
    if original.is_dir():
        shutil.copytree(original, source)
    else:
        shutil.copy(original, source)
    return damage(source, random.Random(case.seed)), source


def _whole(kind: str, seeds: Path) -> Path:
    """The whole input of a format, made once."""
    folder = seeds / f"whole-{kind}"
    marker = folder / ".made"
    if not marker.exists():
        folder.mkdir(exist_ok=True)
        marker.write_text(FORMATS[kind](folder).name, encoding="utf-8")
    return folder / marker.read_text(encoding="utf-8")


def _run(case: Case, source: Path, seeds: Path, home: Path) -> tuple[int, str]:
    good = seeds / "good.json"
    if not good.exists():
        trace().write(good)
    places = {"{in}": str(source), "{out}": str(home / "out"), "{good}": str(good)}
    words = VERBS[case.format][case.verb]
    argv = [re.sub(r"\{\w+\}", lambda match: places[match[0]], word) for word in words]
    with captured() as (out, err):
        code = main([*argv, "--debug", *([] if words[0] in _NO_CACHE else ["--no-cache"])])
    return code, out.getvalue().decode("utf-8", "replace") + err.getvalue().decode(
        "utf-8", "replace"
    )


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """What is printed inside, by streams as a terminal has them."""
    out, err = io.BytesIO(), io.BytesIO()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", write_through=True)
        for stream in (out, err)
    )
    try:
        yield out, err
    finally:
        streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush()
            stream.detach()


def _peak() -> int:
    """The most memory that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _fault(code: int, output: str, seconds: float, description: str, before: int) -> str:
    # The traceback that `--debug` shows of a refusal is no fault.
    searched = (
        output
        if "a defect of Traceloom" in output
        else output.replace("Traceback (most recent", "")
    )
    match = _FAULTS.search(searched)
    peak = _peak()
    wrong = ""
    if code == 1 or match:
        lines = [line for line in output.splitlines() if line.strip()]
        wrong = f"exit code {code}: {' | '.join(lines[-4:])[:300]}"
    elif code == LOST_CODE:
        wrong = output
    elif seconds > MOST_SECONDS:
        wrong = f"{seconds:.1f} s of processor time"
    elif peak > max(before, MOST_BYTES):
        wrong = f"{peak / 1e9:.1f} GB of memory"
    return f"{wrong} [{description}]" if wrong else ""


LOST_CODE = -100


def _lost(source: Path) -> tuple[int, str]:
    """Whether the reader keeps what a slow, simple one finds whole: names and numbers of entries."""
    from traceloom.formats import read_kineto
    from traceloom.formats.host_trace import read_host_trace

    host = source.is_dir()
    path = source / "rank0.host.json" if host else source
    if not path.is_file() or path.stat().st_size > 1 << 20:
        return 0, ""
    text = path.read_bytes()
    items = whole_objects(text, is_node, "nodes") if host else whole_objects(text, is_event)
    try:
        count = (
            read_host_trace(path).ops.height
            if host
            else read_kineto(path, processes=1).meta.event_count
        )
    except InputError as error:
        return (
            (3, "")
            if not _certain(items, host=host)
            else (LOST_CODE, f"refused with {len(items)} whole: {error}")
        )
    least = len(_certain(items, host=host))
    return (0, "") if count >= least else (LOST_CODE, f"{least} whole entries, {count} read")


def _certain(items: list[dict[str, object]], *, host: bool) -> list[dict[str, object]]:
    """Those that no reader may refuse: of the right types."""
    if host:
        return [item for item in items if isinstance(item["id"], int) and abs(item["id"]) < 2**62]
    return items
