"""What can be wrong with an input: its bytes, the types of its values, its files."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.tolerant import damaged

_LONG = "n" * 65_536
_ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    3,
    -1,
    2**31,
    2**63,
    2**64,
    2**70,
    -(2**63),
    0.5,
    1e308,
    "",
    "x",
    "0x10",
    "3",
    "\ud83d",
    "é" * 300,
    _LONG,
    "a\x1b[31m\nb",
    "../../etc/passwd",
    "/dev/zero",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"a": {}},
    [3, "x", None],
    {"ranks": 5},
    [[[[[[[[1]]]]]]]],
)
_NAMES = (
    b"rank\xff0.json",
    b"rank1.json\n.json",
    b"n" * 240 + b".json",
    "rank7 ∑.json".encode(),
    b"-o.json",
    b"rank9.json",
)


def damage(source: Path, chance: random.Random) -> str:
    """Do something wrong to a file, or to one of the files of a directory; says what."""
    files = (
        sorted(path for path in source.rglob("*") if path.is_file())
        if source.is_dir()
        else [source]
    )
    if not files:
        return "nothing is there"
    file = chance.choice(files)
    if source.is_dir() and chance.random() < 0.15:
        name, change = chance.choice(_OF_FILES)
        change(file, chance.choice(files), chance)
        return f"{file.name}: {name}"
    content = file.read_bytes()
    packed = content[:2] == b"\x1f\x8b" and chance.random() < 0.8
    content = gzip.decompress(content) if packed else content
    retyped = None
    if chance.random() < 0.5 and file.suffix in {".json", ".gz", ".pickle"}:
        retyped = _retyped(content, chance)
    description, content = retyped or damaged(content, chance, chance.choice([1, 1, 2, 5]))
    file.write_bytes(gzip.compress(content, 1) if packed else content)
    return f"{file.name}: {description}"


def _retyped(content: bytes, chance: random.Random) -> tuple[str, bytes] | None:
    """The document with one or more values of other types; None for what is no document."""
    try:
        is_pickle = content[:1] == b"\x80"
        document = pickle.loads(content) if is_pickle else json.loads(content)
    except (ValueError, pickle.UnpicklingError, EOFError):
        return None
    done = []
    for _ in range(chance.choice([1, 1, 1, 3])):
        places = list(_places(document))
        if not places:
            break
        holder, key = chance.choice(places)
        value = copy.deepcopy(chance.choice(_ODD))  # a list may come into itself else
        if isinstance(holder, dict) and chance.random() < 0.15:
            holder[chance.choice(["", "x", "\ud83d", _LONG])] = holder.pop(key)
            done.append(f"key {key!r} renamed")
            continue
        holder[key] = value
        done.append(f"{key!r} is {repr(value)[:40]}")
    made = pickle.dumps(document, protocol=4) if is_pickle else json.dumps(document).encode()
    return "; ".join(done), made


def _places(value: Any) -> Any:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def _renamed(file: Path, _other: Path, chance: random.Random) -> None:
    target = Path(str(file.parent)) / chance.choice(_NAMES).decode("utf-8", "surrogateescape")
    file.rename(target)


def _swapped(file: Path, other: Path, _chance: random.Random) -> None:
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)


def _endless(file: Path, _other: Path, _chance: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _folder(file: Path, _other: Path, _chance: random.Random) -> None:
    file.unlink()
    file.mkdir()


_OF_FILES: list[tuple[str, Callable[[Path, Path, random.Random], object]]] = [
    ("gone", lambda file, _other, _chance: file.unlink()),
    ("empty", lambda file, _other, _chance: file.write_bytes(b"")),
    (
        "random bytes",
        lambda file, _other, chance: file.write_bytes(chance.randbytes(chance.randrange(2000))),
    ),
    (
        "twice",
        lambda file, _other, _chance: shutil.copy(file, file.with_name(f"again-{file.name}")),
    ),
    ("renamed", _renamed),
    ("swapped", _swapped),
    ("endless", _endless),
    ("a folder", _folder),
]
