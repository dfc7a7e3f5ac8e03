"""The leak report: every distinct text in the output, and every hidden shape that other values
reveal.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from traceloom.formats.links import get_element_size
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import FROM_KINETO
from traceloom.workload.anonymize.kineto import KEYS
from traceloom.workload.anonymize.metadata import KNOWN_KEYS
from traceloom.workload.anonymize.names import OPERATIONS, Pseudonyms
from traceloom.workload.anonymize.policy import (
    ALPHABET,
    DROP,
    FIT,
    KEEP,
    LETTERS,
    Policy,
    RewriteStats,
    is_schema,
    is_type,
    list_host_names,
    read_sections,
)
from traceloom.workload.anonymize.sizes import WORDS, Shapes

PSEUDONYM, PUBLIC, FORMAT, OTHER = "pseudonym", "public", "format", "other"
_PSEUDONYM_PATTERN = re.compile(rf"(?<![a-z])[{ALPHABET}]{{{LETTERS}}}(?![a-z])")
_NUMBERS = re.compile(r"-?[\d.]+|\[[\d,\s.\-\[\]]*\]|")
_LONG_NUMBER = re.compile(r"\d{2,}")
_PART = re.compile(r"\(\d{1,4}\)$")  # of an operator in several parts, as in Chakra files
_WORD = re.compile(r"[A-Za-z]{5,}|\d{5,}")
_MIN_DIMENSION = 17  # smaller numbers are tile sizes and element widths as often as dimensions
_MAX_SHAPES = 100_000
# Words in our own pseudonyms that describe an object; they do not come from the input.
# Keys and fixed words of the formats.
_KEYS = (
    read_sections()["format"]
    | frozenset((*KEYS, *KNOWN_KEYS))
    | frozenset(FROM_KINETO)
    | frozenset(("Kernel", "Runtime", "Operator", "Trace", "Memcpy", "Memset", "Python"))
)
_SPOKEN_WORDS = read_sections()["spoken"]


@dataclass(slots=True)
class InputShapes:
    """The distinct shapes of the input, to check what reveals them.

    Attributes:
        shapes: (dimensions, element size in bytes) of every tensor; 0 bytes where the type is
            unknown.
        products: FLOPs of the matrix products among the inputs of one operator -> their shapes.
    """

    shapes: set[tuple[tuple[int, ...], int]] = field(default_factory=set)
    products: dict[int, str] = field(default_factory=dict)

    def add_trace(self, trace: Trace) -> None:
        for shapes, types in trace.tensors.select("shapes", "types").unique().iter_rows():
            self.add(_parse_list(shapes), _parse_list(types))

    def add(self, shapes: list[Any], types: list[Any]) -> None:
        """Adds the shapes and element types of one operator's inputs."""
        tensor_shapes = []
        for index, dims in enumerate(shapes):
            if isinstance(dims, list) and dims and all(isinstance(n, int) for n in dims):
                kind = types[index] if index < len(types) and isinstance(types[index], str) else ""
                inner = re.sub(r"^Tensor\((.*)\)$", r"\1", kind)
                tensor_shapes.append(tuple(dims))
                if len(self.shapes) < _MAX_SHAPES:
                    self.shapes.add((tuple(dims), get_element_size(inner) or 0))
        for left, right in pairwise(tensor_shapes):
            if (
                len(left) >= 2
                and len(right) >= 2
                and left[-1] == right[-2]
                and len(self.products) < _MAX_SHAPES
            ):
                self.products[2 * math.prod(left) * right[-1]] = f"{list(left)} x {list(right)}"

    def given_away(self, shapes: Shapes, kept_names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yields each hidden shape that the output still reveals, and by which value.

        Args:
            shapes: The rounded sizes, and those that are in the output unrounded.
            kept_names: Unchanged names that are not public.
        """
        exact = shapes.exact
        numbers = {
            int(text)
            for string in kept_names
            for text in _LONG_NUMBER.findall(string)
            if len(text) < 12
        }
        for dims, size in sorted(self.shapes):
            if shapes.rounds and all(shapes.rounded(n) == n for n in dims):
                continue  # it is in the output, as one of many that would look the same
            count = math.prod(dims)
            channels = []
            if size and count * size >= _MIN_DIMENSION and count * size in exact:
                channels.append("bytes")
            if count >= _MIN_DIMENSION and count in exact:
                channels.append("elements or grid")
            dims_in_names = [n for n in dims if n >= _MIN_DIMENSION and n in numbers]
            if dims_in_names:
                channels.append(f"names ({', '.join(map(str, dims_in_names))})")
            if channels:
                yield {"shape": list(dims), "by": channels}
        for flops, product in sorted(self.products.items()):
            if flops in exact:
                yield {"shape": product, "by": ["floating-point operations"]}


def build_leak_report(
    account: RewriteStats, names: Pseudonyms, shapes: Shapes, hidden: InputShapes, policy: Policy
) -> dict[str, Any]:
    """Returns all texts in the output by class, and the shapes that it reveals in other ways."""
    classes: dict[str, list[str]] = {PSEUDONYM: [], PUBLIC: [], FORMAT: [], OTHER: []}
    unchanged = names.unchanged()
    for text in sorted(_decode_text(raw) for raw in account.strings):
        classes[PUBLIC if text in unchanged else _classify_text(text, names)].append(text)
    # Words of hidden or dropped texts that are nevertheless in the output, with an example text
    # for each.
    text_by_word: dict[str, str] = {}
    for text in classes[OTHER] + classes[PSEUDONYM]:
        for word in _WORD.findall(text.lower()):
            text_by_word.setdefault(word, text)
    leaked_words: dict[str, str] = {}
    for text in (*names.hidden(), *(_decode_text(raw.strip(b'"')) for raw in account.texts)):
        for word in _WORD.findall(text.lower()):
            if word in text_by_word and word not in _SPOKEN_WORDS:
                leaked_words.setdefault(word, text)
    leaked_shapes = [] if policy.shapes == KEEP else list(hidden.given_away(shapes, names.kept))
    distinct = {dims for dims, _ in hidden.shapes}
    rounded = {tuple(map(shapes.rounded, dims)) for dims in distinct}
    return {
        "strings": [
            {"text": text, "class": kind} for kind, texts in classes.items() for text in texts
        ],
        "counts": {kind: len(texts) for kind, texts in classes.items()},
        "kept_by_policy": sorted(names.kept),
        "echoes": [
            {"word": word, "of": text[:200], "in": text_by_word[word][:200]}
            for word, text in sorted(leaked_words.items())
        ],
        "arguments": dict(account.kept_arguments),
        "shapes": {
            "policy": policy.shapes,
            "distinct": len(distinct),
            "distinct_after": 0 if policy.shapes == DROP else len(rounded),
            "unchanged_by_rounding": sum(
                all(shapes.rounded(n) == n for n in dims) for dims in distinct
            )
            if shapes.rounds
            else None,
            "kept_factors": sorted(shapes.kept_factors or ()) if policy.shapes == FIT else None,
            "given_away": leaked_shapes,
        },
    }


def _classify_text(text: str, names: Pseudonyms) -> str:
    text = _PART.sub("", text)
    if text in names.kept:
        return OTHER
    if text in _KEYS:
        return FORMAT
    if (
        text in WORDS
        or text in list_host_names()
        or text in read_sections()["calls"]
        or text in OPERATIONS
        or text in read_sections()["modules"]
    ):
        return PUBLIC
    if _PSEUDONYM_PATTERN.search(text):
        return PSEUDONYM
    if _NUMBERS.fullmatch(text) or is_type(text) or is_schema(text):
        return PUBLIC
    prefix = "autograd::engine::evaluate_function: "
    return PUBLIC if text.startswith(prefix) and text[len(prefix) :] in list_host_names() else OTHER


def _parse_list(text: str | None) -> list[Any]:
    try:
        value = json.loads(text) if text else []
    except ValueError:
        return []
    return value if isinstance(value, list) else []


def _decode_text(raw: bytes) -> str:
    """Returns a JSON text without its quotes, or bytes that are not JSON as text."""
    try:
        return str(json.loads(b'"' + raw + b'"'))
    except ValueError:
        return raw.decode("utf-8", "replace")
