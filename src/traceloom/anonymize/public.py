"""Public vocabulary: names that say nothing about whose trace it is, because every PyTorch, CUDA or HIP has them.

A list, not a pattern: `aten::anything` would let anything through. The list is `public_names.txt` beside this file;
scripts/public_names.py adds the names of an installed PyTorch.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files

_WORD = re.compile(r"[A-Za-z_]\w*|\d+")
_SCHEMA = re.compile(r"[\w:]+(\.\w+)?\(.*\) -> .*", re.DOTALL)
_SIGNS = re.compile(r"[\w\s:.,()\[\]{}<>*&!?=|+\-\"']*")
_NUMBER_LENGTH = 4  # longer numbers must be in the list: defaults such as 9223372036854775807 are


@lru_cache(maxsize=1)
def sections() -> dict[str, frozenset[str]]:
    """Section of the list -> its names: those of PyTorch, and a few lists of our own."""
    names_by_section: dict[str, set[str]] = {}
    into: set[str] = set()
    for line in files("traceloom.anonymize").joinpath("public_names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("=== "):
            into = names_by_section.setdefault(line[4:], set())
        elif line:
            into.add(line)
    return {name: frozenset(names) for name, names in names_by_section.items()}


@lru_cache(maxsize=1)
def host_names() -> frozenset[str]:
    """Names of operators, autograd nodes and regions that PyTorch gives itself."""
    by_section = sections()
    return by_section["ops"] | by_section["nodes"] | by_section["regions"]


def is_schema(text: str) -> bool:
    """Whether an operator's schema consists of public words only."""
    if not _SCHEMA.fullmatch(text) or not _SIGNS.fullmatch(text):
        return False
    name = text.split("(", 1)[0]
    if name.split(".", 1)[0] not in sections()["ops"]:
        return False
    public_words = sections()["words"] | sections()["types"]
    words = (word for part in (text.split("(", 1)[1], name.partition(".")[2]) for word in _WORD.findall(part))
    return all(word in public_words or (word.isdigit() and len(word) <= _NUMBER_LENGTH) for word in words)


def is_type(text: str) -> bool:
    """Whether a type's name, as `Tensor(c10::Half)` or `long int`, consists of public words only."""
    type_words = sections()["types"]
    return _SIGNS.fullmatch(text) is not None and all(
        word in type_words or (word.isdigit() and len(word) <= 2) for word in _WORD.findall(text)
    )
