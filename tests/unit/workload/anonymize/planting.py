"""Secrets to plant, and how to look for them."""

from __future__ import annotations

import base64
import copy
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from traceloom.workload.anonymize.run import Anonymized

SECRET = "QuokkaZebra"
NUMBER = "8675309867530986"
LEAST = 6  # letters of a part that counts as a leak

Spot = tuple[Any, ...]


def _forms() -> set[bytes]:
    """The secrets, and what simple spellings make of them; all in lower case."""
    plain = SECRET.lower()
    forms = {plain[at : at + LEAST] for at in range(len(plain) - LEAST + 1)}
    forms |= {form[::-1] for form in forms}
    for text in (SECRET, SECRET.lower(), SECRET.upper()):
        for shift in range(3):
            coded = base64.b64encode(b"x" * shift + text.encode()).decode()
            forms.add(coded[4:-4].lower())
        forms.add(text.encode().hex())
    forms |= {NUMBER[at : at + 9] for at in range(len(NUMBER) - 8)}
    return {form.encode() for form in forms}


FORMS = _forms()


def leaks(data: bytes) -> list[str]:
    """Every form of a secret in some bytes."""
    lower = data.lower()
    return sorted(form.decode() for form in FORMS if form in lower)


def bytes_of(output: Path) -> bytes:
    """All bytes of an output: names of files, contents, and contents without compression."""
    files = [output] if output.is_file() else [path for path in output.rglob("*") if path.is_file()]
    parts = [path.relative_to(output.parent).as_posix().encode() for path in files]
    for path in files:
        data = path.read_bytes()
        parts += [data, gzip.decompress(data)] if data.startswith(b"\x1f\x8b") else [data]
    return b"\n".join(parts)


def leaves(value: Any, spot: Spot = ()) -> Iterator[Spot]:
    """Every place in a JSON value that holds a text, a number, or nothing."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*spot, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from leaves(item, (*spot, at))
    else:
        yield spot


def dicts(value: Any, spot: Spot = ()) -> Iterator[Spot]:
    """Every place that holds an object."""
    if isinstance(value, dict):
        yield spot
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in children:
        yield from dicts(item, (*spot, key))


def at(value: Any, spot: Spot) -> Any:
    for part in spot:
        value = value[part]
    return value


def with_value(value: Any, spot: Spot, new: Any) -> Any:
    """A copy with another value in one place."""
    made = copy.deepcopy(value)
    at(made, spot[:-1])[spot[-1]] = new
    return made


def planted(value: Any, *, few: bool = False) -> Iterator[Any]:
    """Copies of a JSON object with a secret in one place each: every text, every number, every key, every list.

    Args:
        value: The object.
        few: Only two ways to plant in each place, for files that cannot hold many objects.
    """
    for spot in leaves(value):
        old = at(value, spot)
        yield with_value(value, spot, f"{old}{SECRET}")
        if few:
            yield with_value(value, spot, [SECRET])
            continue
        yield with_value(value, spot, SECRET)
        yield with_value(value, spot, f"{SECRET}{old}")
        yield with_value(value, spot, f"/home/{SECRET}/{old}")
        yield with_value(value, spot, [SECRET, {SECRET: SECRET}])
        if isinstance(old, str):
            yield with_value(value, spot, f"{old[: len(old) // 2]}{SECRET}{old[len(old) // 2 :]}")
            yield with_value(value, spot, f'{old}\\"{SECRET}')
    for spot in dicts(value):
        made = copy.deepcopy(value)
        at(made, spot)[SECRET] = SECRET
        at(made, spot)[f"{SECRET} version"] = NUMBER
        at(made, spot)[f"{SECRET}_number"] = int(NUMBER)
        yield made


Anonymise = Callable[..., Anonymized]


def write_json(path: Path, value: Any) -> Path:
    text = json.dumps(value).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path
