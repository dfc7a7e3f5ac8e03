"""An op of a plan as Python text: `aten.mm.default(t1, t2)`.

A trace decides what the text calls, and the text is run by whoever gets it: what is no plain name of an operator, and
what `traceloom.replay.allowed` refuses, is never written as code.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from traceloom.replay.allowed import NEVER_GIVEN, refusal
from traceloom.replay.plan import ITEM_BYTES
from traceloom.replay.schema import OperatorSchema, UnreadableSchemaError, ValueType, parse_schema
from traceloom.replay.twins import twin_of

WIDTH = 110
_PIECE = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,'"])+(?:, ?|$)|, ?""")
_OF_TORCH = {
    "dtype": frozenset(ITEM_BYTES),
    "layout": frozenset(
        {"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged"}
    ),
    "memory_format": frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}),
}


class UnwritableError(ValueError):
    """An op that no text can stand for, and why."""


class CallText:
    """A call of the plan, parsed once, written with the names of its inputs.

    Args:
        schema: As the trace has it.
        arguments: JSON, as `traceloom.replay.plan` describes it.
        further: Namespaces that are allowed besides PyTorch's own.
        keeps_host: Whether what was recorded on the host's processors stays there.

    Raises:
        UnwritableError: the op is refused, or one of its arguments cannot be sent.
    """

    def __init__(
        self, schema: str, arguments: str, further: frozenset[str] = frozenset(), *, keeps_host: bool = False
    ) -> None:
        try:
            self.schema = parse_schema(schema)
        except UnreadableSchemaError as error:
            raise UnwritableError(str(error)) from None
        self.function = _path(self.schema, further)
        self._keeps_host = keeps_host
        self._values = json.loads(arguments)
        self.write([f"t{k}" for k in range(_inputs(self._values))])

    @property
    def returns_list(self) -> bool:
        """Whether it gives one list of tensors."""
        return [value.type.base for value in self.schema.returns] == ["list"]

    @property
    def is_nested(self) -> bool:
        """Whether it gives lists beside other things."""
        return len(self.schema.returns) > 1 and any(value.type.base == "list" for value in self.schema.returns)

    def write(self, names: Sequence[str]) -> str:
        """The call; arguments that are the defaults of the schema are left out.

        Args:
            names: Of the inputs.
        """
        positional: list[str] = []
        named: list[str] = []
        kept = 0
        for argument, value in zip(self.schema.arguments, self._values, strict=False):
            is_default = argument.has_default and (argument.name in NEVER_GIVEN or _same(value, argument.default))
            if self._keeps_host and value == {"device": "cpu"}:
                value = "cpu"  # noqa: PLW2901  (as torch takes it)
            if argument.keyword_only:
                if not is_default:
                    named.append(f"{_identifier(argument.name)}={_literal(value, argument.type, names)}")
            else:
                positional.append(_literal(value, argument.type, names))
                kept = kept if is_default else len(positional)
        return f"{self.function}({', '.join([*positional[:kept], *named])})"


def _path(schema: OperatorSchema, further: frozenset[str]) -> str:
    """The operator in `torch.ops`."""
    if why := refusal(schema, further):
        raise UnwritableError(why)
    # A script can hand over a storage, and says itself on which device it runs.
    twin = None if schema.name == "set_" else twin_of(schema.qualified, "")
    namespace, _, name = (schema.qualified if twin is None else twin.name).partition("::")
    name, _, overload = name.partition(".")
    path = "aten" if namespace == "aten" else f"torch.ops.{_identifier(namespace)}"
    for part in (name, overload or "default"):
        word = _identifier(part)
        path = f"getattr({path}, {word!r})" if keyword.iskeyword(word) else f"{path}.{word}"
    return path


def _identifier(word: str) -> str:
    if not (word.isascii() and word.isidentifier()):
        raise UnwritableError(f"{word!r} is no name that Python can call")
    return word


def _inputs(value: Any) -> int:
    if isinstance(value, list):
        return max(map(_inputs, value), default=0)
    if isinstance(value, dict):
        return 1 + max((n for key in ("tensor", "storage") if isinstance(n := value.get(key), int)), default=-1)
    return 0


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, list) and isinstance(default, list):
        return len(value) == len(default) and all(map(_same, value, default))
    return type(value) is type(default) and value == default


def _literal(value: Any, of: ValueType, names: Sequence[str]) -> str:
    """A value as a Python literal."""
    if isinstance(value, list):
        inner = of.inner[0] if of.base == "list" else of
        return f"[{', '.join(_literal(part, inner, names) for part in value)}]"
    if not isinstance(value, dict):
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        return ascii(value)
    ((kind, inside),) = value.items()
    if kind in {"tensor", "storage"}:
        return names[inside] + (".untyped_storage()" if kind == "storage" else "")
    if kind in _OF_TORCH and inside in _OF_TORCH[kind]:
        return f"torch.{inside}"
    if kind == "device":
        return "DEVICE"
    if kind == "generator":
        return "None"
    if kind == "float" and inside in {"inf", "-inf", "nan"}:
        return f"float({inside!r})"
    if kind == "complex":
        return f"complex({str(complex(*map(float, inside)))!r})"
    raise UnwritableError(f"an argument cannot be sent: {ascii(inside)[:80]}")


def dtype_text(name: str) -> str:
    """A type as `torch.float32`."""
    if name not in ITEM_BYTES:
        raise UnwritableError(f"{name!r} is no type of PyTorch's")
    return f"torch.{name}"


def collective_text(row: Mapping[str, Any], sent: Sequence[str], received: Sequence[str]) -> str:
    """A collective over torch.distributed; several, where it is of several tensors, as `Awaited`.

    Args:
        row: Of the plan's `collectives`.
        sent: Names of the tensors that it takes.
        received: Names of those that it fills.
    """
    kind, group = row["kind"], f"group=group[{row['group']!a}]"
    more = [group, *(["async_op=True"] if row["asynchronous"] else [])]
    peer = str(row["peer"] or 0)
    calls: list[tuple[str, Sequence[str]]]
    if kind in {"send", "recv"}:
        function = ("i" if row["asynchronous"] else "") + kind
        calls = [(function, [tensor, peer, group]) for tensor in (sent if kind == "send" else received)]
    elif kind in {"all_reduce", "broadcast", "reduce"}:
        root = [] if kind == "all_reduce" else [peer]
        calls = [(kind, [tensor, *root, *more]) for tensor in received or sent]
    elif kind in {"gather", "scatter"}:
        own, parts = (sent, received) if kind == "gather" else (received, sent)
        of_all = f"list({parts[0]}.chunk(WORLD))" if len(parts) == 1 else _list(parts) if parts else "None"
        calls = [(kind, [own[0], of_all, peer, *more])]
    elif kind == "all_to_all" and len(sent) > 1:
        calls = [(kind, [_list(received), _list(sent), *more])]
    elif kind == "all_to_all":
        splits = [str(list(row[side]) or None) for side in ("splits_out", "splits_in")]
        calls = [("all_to_all_single", [received[0], sent[0], *splits, *more])]
    elif kind == "all_gather" and len(sent) == len(received):
        calls = [("all_gather_into_tensor", [r, g, *more]) for g, r in zip(sent, received, strict=True)]
    elif kind == "all_gather":
        calls = [(kind, [_list(received), sent[0], *more])]
    elif kind == "reduce_scatter" and len(sent) == len(received):
        calls = [("reduce_scatter_tensor", [r, g, *more]) for g, r in zip(sent, received, strict=True)]
    elif kind == "reduce_scatter":
        calls = [(kind, [received[0], _list(sent), *more])]
    else:
        calls = [("barrier", more)]
    texts = [f"dist.{function}({', '.join(arguments)})" for function, arguments in calls]
    return texts[0] if len(texts) == 1 else f"Awaited({_list(texts)})"


def _list(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def wrapped(line: str) -> Iterator[str]:
    """A line of code on as many lines as it needs: broken after commas in brackets. A comment stays one line."""
    if line.startswith("#"):
        yield line
        return
    rest = ""
    for piece in _PIECE.findall(line):
        if rest.strip() and len(rest) + len(piece.rstrip()) > WIDTH:
            yield rest.rstrip()
            rest = "        " + piece.lstrip()
        else:
            rest += piece
    yield rest
