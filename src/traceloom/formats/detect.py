"""Refuses files that are not Kineto traces, naming what they are and the command for them."""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from traceloom.errors import InputError

_MAGIC = (
    (b"PK\x03\x04", "a zip archive (perhaps a saved PyTorch object)"),
    (
        b"\x80",
        "a Python pickle; if it is a memory snapshot of PyTorch, give it to traceloom memory",
    ),
    (b"SQLite format 3\0", "an SQLite database (perhaps an Nsight Systems export)"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; decompress it first"),
    (b"\xfd7zXZ", "compressed with xz; decompress it first"),
    (b"BZh", "compressed with bzip2; decompress it first"),
    (b"\x7fELF", "a program"),
    (b"<", "an HTML or XML page"),
)
_COMPILER_LOG = re.compile(rb"[VDIWE]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+:\d+\] \{")
_GRAPH = re.compile(rb"PK\x03\x04.{26}header\.json", re.DOTALL)
_CHAKRA = re.compile(rb"\n\x06schema|\n.\d+\.\d+\.\d+", re.DOTALL)

# Top-level keys that only one kind of file has.
_KEYS: tuple[tuple[frozenset[str], str, str], ...] = (
    (
        frozenset({"schema", "nodes"}),
        "a PyTorch execution trace (host trace)",
        "it goes with the Kineto trace of the same process",
    ),
    (
        frozenset({"segments"}),
        "a memory snapshot of PyTorch",
        "give the Kineto trace, or the pickle to traceloom memory",
    ),
    (
        frozenset({"device_traces"}),
        "a memory snapshot of PyTorch",
        "give the Kineto trace, or the pickle to traceloom memory",
    ),
    (
        frozenset({"traceloom"}),
        "a report of Traceloom",
        "give the trace that the report was made from",
    ),
    (frozenset({"stringTable"}), "a speedscope or Firefox profile", "give a Kineto trace"),
    (frozenset({"pg_config", "entries"}), "a Flight Recorder dump", "give a Kineto trace"),
)


def refuse_start(text: bytes, path: str, expected: str = "Kineto trace") -> None:
    """Refuses text that cannot be JSON of a trace, by its first bytes.

    Args:
        text: The first bytes, decompressed.
        path: The file.
        expected: Name of the expected format.

    Raises:
        InputError: `empty-file`, or `not-a-trace`, which names the format found.
    """
    head = text[:4096].lstrip()
    if not head and len(text) < 4096:
        raise InputError("the file is empty", slug="empty-file", where=path)
    if head[:1] in (b"{", b"["):
        return
    if _GRAPH.match(text):
        hint = "in Python, traceloom.Graph.load reads it; in a shell, traceloom show, whatif and convert do"
        _refuse("a saved graph", path, hint, expected=expected)
    if description := describe_format(text):
        _refuse(description, path, expected=expected)
    _refuse("no JSON object or list", path)


def describe_format(text: bytes) -> str:
    """Describes the format of a file that is not JSON; empty where its first bytes do not reveal
    it.
    """
    if _COMPILER_LOG.match(text):
        return "a log of PyTorch's compiler (TORCH_TRACE); tlparse reads it"
    for magic, description in _MAGIC:
        if text.startswith(magic):
            return description
    if text[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    return "a Chakra execution trace (protobuf)" if _CHAKRA.search(text[:64]) else ""


def refuse_list(text: bytes, path: str) -> None:
    """Refuses a list that does not begin with events.

    Raises:
        InputError: `not-a-trace`.
    """
    head = text.lstrip()
    if head.startswith(b"]"):
        _refuse("an empty list", path)
    if head.startswith(b"[-1,") or re.match(rb"\[\s*-?\d+\s*,\s*\[?\d", head):
        _refuse("a PyTorch memory timeline", path, "traceloom memory reads it")
    if head.startswith(b"{") and (b'"ph"' in head or not head.rstrip().endswith(b"]")):
        return
    _refuse("a list of something that is no trace event", path)


def refuse_by_keys(metadata: dict[str, Any], path: str, *, done: bool) -> None:
    """Refuses an object whose keys show that it is another kind of file.

    Args:
        metadata: The top-level entries so far.
        path: The file.
        done: The entries are complete, and there was no `traceEvents`.

    Raises:
        InputError: `not-a-trace`.
    """
    if metadata.get("format") in ("traceloom-capture", "traceloom-report"):
        _refuse(f"a {str(metadata['format']).replace('traceloom-', '')} file of Traceloom", path)
    keys = set(metadata)
    for required, description, hint in _KEYS:
        if required <= keys and (done or "traceEvents" not in keys):
            _refuse(description, path, hint)
    if done:
        listed_keys = ", ".join(f"`{key}`" for key in list(metadata)[:4])
        _refuse(
            f"JSON without `traceEvents`{f' (its keys: {listed_keys})' if listed_keys else ''}",
            path,
        )


def refuse_categories(categories: Mapping[str, int], path: str) -> NoReturn:
    """Refuses a Chrome trace in which no event has a category of PyTorch.

    Raises:
        InputError: `not-a-trace`.
    """
    names = ", ".join(f"`{name}`" for name in sorted(categories)[:6] if name)
    found = f"its categories: {names}" if names else "they have none"
    _refuse(f"a Chrome trace whose events have no category of PyTorch ({found})", path)


def _refuse(
    description: str, path: str, hint: str = "", expected: str = "Kineto trace"
) -> NoReturn:
    raise InputError(
        f"this is no {expected} but {description}"
        if not description.startswith(("no ", "compressed"))
        else f"the file is {description}",
        slug="not-a-trace",
        where=path,
        hint=hint,
    )
