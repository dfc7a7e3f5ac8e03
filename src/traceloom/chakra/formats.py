"""Files of Chakra messages in any form: `.et`, JSON and JSON lines, each plain or gzip."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Literal

from traceloom.chakra.json_stream import JsonReader, write_json, write_lines
from traceloom.chakra.packed import Step, UnpackedFile, open_file, write_packed
from traceloom.chakra.schema import GlobalMetadata, Node
from traceloom.chakra.stream import EtReader, EtWriter
from traceloom.errors import InputError

Form = Literal["et", "json", "jsonl"]
FORMS: dict[str, Form] = {".et": "et", ".json": "json", ".jsonl": "jsonl"}
ENDINGS = tuple(ending + packed for ending in FORMS for packed in ("", ".gz"))


def form_of(path: Path) -> Form | None:
    """The form that a file's name tells; None for another kind of file."""
    name = path.name.lower().removesuffix(".gz")
    return next((form for ending, form in FORMS.items() if name.endswith(ending)), None)


def open_messages(path: str | Path, *, strict: bool = False, step: Step | None = None) -> EtReader | JsonReader:
    """A reader of Chakra messages: of `.et` where the file is named so, else told by content.

    Raises:
        InputError: As the readers.
    """
    path = Path(path)
    form = form_of(path)
    if form is None:
        with open_file(path) as handle:
            head = next(iter(UnpackedFile(handle)), b"")[:64]
        form = "json" if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")) else "et"
    if form == "et":
        return EtReader(path, strict=strict, step=step)
    return JsonReader(path, strict=strict, step=step)


def write_messages(
    path: str | Path,
    metadata: GlobalMetadata,
    nodes: Iterable[Node],
    *,
    form: Form | None = None,
    force: bool = False,
) -> int:
    """Write messages in the form that the name tells, whole or not at all; returns the size of the file in bytes.

    Args:
        path: The file; gzip where the name ends in `.gz`.
        metadata: The first message.
        nodes: The others, in order.
        form: The form, where the name does not say; `.et` otherwise.
        force: Overwrite an existing file.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    path = Path(path)
    produce = _WRITERS[form or form_of(path) or "et"]
    return write_packed(path, lambda handle: produce(handle, metadata, nodes), force=force)


_WRITERS: dict[Form, Callable[[BinaryIO, GlobalMetadata, Iterable[Node]], None]] = {
    "et": lambda handle, metadata, nodes: EtWriter(handle).messages(metadata, nodes),
    "json": write_json,
    "jsonl": write_lines,
}


def rank_files(directory: Path) -> list[tuple[int, Path]]:
    """The files of the ranks in a directory (`PREFIX.RANK.et`, also as JSON or gzip), by rank.

    Raises:
        InputError: `no-traces`: there is none; `chakra-mixed`: a rank has several.
    """
    by_rank: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        stem = path.name.removesuffix(".gz")
        if form_of(path) is None or not path.is_file():
            continue
        number = stem[: stem.rindex(".")].rpartition(".")[2]
        if not number.isdecimal():
            continue
        rank = int(number)
        if rank in by_rank:
            raise InputError(
                f"rank {rank} has several files, {by_rank[rank].name} and {path.name}",
                slug="chakra-mixed",
                where=str(directory),
                hint="name the files of one job",
            )
        by_rank[rank] = path
    if not by_rank:
        raise InputError(
            "the directory holds no files like PREFIX.RANK.et",
            slug="no-traces",
            where=str(directory),
            hint="name a file",
        )
    return sorted(by_rank.items())
