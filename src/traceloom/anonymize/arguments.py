"""What becomes of the arguments of Kineto events: one rule per key; a key without a rule is left out and counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from traceloom.anonymize.account import Account
from traceloom.anonymize.names import Pseudonyms
from traceloom.anonymize.policy import COLLAPSE, KEEP, Policy
from traceloom.anonymize.public import is_type, sections
from traceloom.anonymize.shapes import Shapes

Rule = Callable[[bytes], bytes | None]

_NUMBER = re.compile(rb"-?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_QUOTED = re.compile(rb'"-?\d{1,20}"')
_RANKS = re.compile(rb'"?\[[\d,\s]*(\.\.\.)?\s*\]?"?')
_TRUE = {b"true": b"true", b"false": b"false", b'"True"': b"true", b'"False"': b"false", b'"true"': b"true",
         b'"false"': b"false", b"1": b"true", b"0": b"false"}  # fmt: skip
_COPY_WORD = re.compile(
    r"[HDPM]to[HDPM]|\d{1,3}|Dispatch Kernel|(HOST|DEVICE)_TO_(HOST|DEVICE)"
    r"|Pageable|Pinned|Device|Host|Managed|Array|Unknown"
)
_BACKENDS = frozenset(("triton", "cpp", "cutlass", "cutedsl", "aten", "ck", "halide", ""))
_VALUE = re.compile(r"-?\d*\.?\d*([eE][+-]?\d+)?|True|False|None|inf|-inf|nan|")
_LIST = re.compile(r"\[[\d\s,.\-+eE\[\]]*\]")
_MOST_KNOWN = 50_000

PLAIN = (  # numbers that say nothing of the model: ids, ranks, properties of the hardware and of the launch
    "External id", "external id", "Record function id", "correlation", "Ev Idx", "Profiler Event Index",
    "Sequence number", "Fwd thread id", "Python id", "Python parent id", "Python module id", "Python thread", "device",
    "cbid", "cid", "graph id", "graph node id", "priority", "channel", "channel_type", "registers per thread",
    "shared memory", "est. achieved occupancy %", "Device Type", "Device Id", "Group size", "Rank", "Src Rank",
    "Dst Rank", "Root", "Global rank start", "Global rank stride", "Seq", "Process Group ID", "Trace iteration",
    "wait_on_cuda_event_record_corr_id", "wait_on_cuda_event_id", "event_id", "num_warps", "num_stages", "seq_num",
    "sqid", "flags", "memory kind", "Op count", "annotated_stream", "original_stream", "cudaGraphInlineAnnotated",
    "fromDevice", "inDevice", "toDevice",
)  # fmt: skip
POINTERS = ("stream", "wait_on_stream", "stream_id", "hsa_queue", "context", "queue")
SIZES = ("bytes", "size", "In msg nelems", "Out msg nelems", "Bytes")
TOTALS = ("Total Allocated", "Total Reserved")
OF_SHAPE = ("blocks per SM", "warps per SM", "memory bandwidth (GB/s)", "occupancy")  # with these the shape comes back
SENSITIVE = frozenset(  # known, and left out whatever the policy says
    ("Call stack", "Module Hierarchy", "CallFrom", "kernel_file", "kernel_hash", "kernel_kwargs", "kernel_name",
     "kernel", "queued", "external ts", "src", "dst", "ptr", "packet_ptr", "k_work_ptr", "host_ctx", "Trace name",
     "Comms Id",
     "Input Tensors start", "Output Tensors start", "cmd_name", "executable_name", "mem size", "row", "column")
)  # fmt: skip
OF_STRUCTURE = frozenset((  # left out with `collapse`; shapes stay, since only those of communication are left
    "External id", "external id", "Record function id", "Ev Idx", "Profiler Event Index", "Sequence number",
    "Fwd thread id", "Python id", "Python parent id", "Python module id", "Input Strides", "Concrete Inputs",
))  # fmt: skip
KEYS = (*PLAIN, *POINTERS, *SIZES, *TOTALS, *OF_SHAPE, "finished", "Is asynchronized op", "Input Dims", "Input dims",
        "In split size", "Out split size", "kind", "copy kind", "src kind", "dst kind", "direction", "Input Strides",
        "Input type", "Concrete Inputs", "grid", "block", "Addr", "Collective name", "dtype", "cuda_sync_kind",
        "kernel_backend", "Process Group Name", "Process Group Description", "Process Group Ranks")  # fmt: skip


class Arguments:
    """Rewrites the arguments of events.

    Args:
        names: What names become.
        shapes: What sizes become.
        policy: The choices.
        account: Told what is left out.
    """

    def __init__(self, names: Pseudonyms, shapes: Shapes, policy: Policy, account: Account) -> None:
        self._shapes = shapes
        self._policy = policy
        self._account = account
        self._texts: dict[tuple[str, bytes], bytes | None] = {}
        kept = policy.shapes == KEEP

        def types(value: Any) -> bytes | None:
            if not isinstance(value, list):
                return None
            return msgspec.json.encode([item if isinstance(item, str) and is_type(item) else "" for item in value])

        def values(value: Any) -> bytes | None:
            if policy.scalars != KEEP or not isinstance(value, list):
                return None
            return msgspec.json.encode([self.scalar(item) for item in value])

        def block(value: Any) -> bytes | None:  # a choice of the kernel's author, no shape
            small = isinstance(value, list) and len(value) <= 3
            fits = small and all(isinstance(n, int) and 0 <= n < 4096 for n in value)
            return msgspec.json.encode(value) if fits else None

        table: dict[str, Rule | None] = dict.fromkeys((*PLAIN, *policy.keep_arguments))
        table |= dict.fromkeys(POINTERS, _counted(names.pointer))
        table |= dict.fromkeys(SIZES, _counted(shapes.size))
        table |= dict.fromkeys(TOTALS, _counted(shapes.total))
        table |= dict.fromkeys(OF_SHAPE, number if kept else lambda _: None)
        table |= dict.fromkeys(("finished", "Is asynchronized op"), _TRUE.get)
        table |= dict.fromkeys(("Input Dims", "Input dims"), shapes.dims)
        table |= dict.fromkeys(("In split size", "Out split size"), shapes.splits)
        copy_word = self._text(lambda text: text if _COPY_WORD.fullmatch(text) else None)
        table |= dict.fromkeys(("kind", "copy kind", "src kind", "dst kind", "direction"), copy_word)
        table |= {
            "Input Strides": shapes.dims,
            "Input type": self._remembered("types", types),
            "Concrete Inputs": self._remembered("values", values),
            "grid": shapes.grid,
            "block": self._remembered("block", block),
            "Addr": _counted(names.address),
            "Collective name": self._text(names.operation),
            "dtype": self._text(lambda text: text if is_type(text) else None),
            "cuda_sync_kind": self._text(lambda text: text if text in sections()["regions"] else None),
            "kernel_backend": self._text(lambda text: text if text in _BACKENDS else None),
            "Process Group Name": self._text(names.group),
            "Process Group Description": self._text(names.description),
            "Process Group Ranks": lambda raw: raw if _RANKS.fullmatch(raw) else None,
        }
        if policy.structure == COLLAPSE:  # what leads back to single operators
            table = {key: rule for key, rule in table.items() if key not in OF_STRUCTURE}
        self._rules = {key: (json.dumps(key).encode() + b":", rule) for key, rule in table.items()}

    def rewrite(self, args: dict[str, msgspec.Raw], *, talking: bool = False) -> bytes:
        """The arguments of one event as the inside of a JSON object.

        Args:
            args: Key -> JSON text.
            talking: Whether it is communication: its bytes follow from its shapes, which stay as element counts where
                shapes are left out.
        """
        parts = []
        for key, raw in args.items():
            prefix_and_rule = self._rules.get(key)
            value = bytes(raw)
            if prefix_and_rule is None:
                self._account.drop(key, value, unknown=key not in SENSITIVE and key not in OF_STRUCTURE)
                continue
            prefix, rule = prefix_and_rule
            if rule is None:
                made: bytes | None = value if value.isdigit() and len(value) <= 20 else number(value)
            elif key == "Input Strides":
                made = self._shapes.strides(value, bytes(args.get("Input Dims", b"")))
            else:
                made = rule(value)
            if made is None and talking and key in ("Input Dims", "Input dims"):
                made = self._shapes.counts(value)
            if made is not None:
                parts.append(prefix + made)
            elif rule is None:
                self._account.refuse(key, value)
            else:
                self._account.drop(key, value)
        return b",".join(parts)

    # -- rules ------------------------------------------------------------------------------------------------

    def _remembered(self, kind: str, make: Callable[[Any], bytes | None]) -> Rule:
        """A rule by the value of a JSON text, for each distinct text once."""

        def rule(raw: bytes) -> bytes | None:
            key = (kind, raw)
            if key not in self._texts:
                if len(self._texts) > _MOST_KNOWN:
                    self._texts.clear()
                self._texts[key] = make(decoded(raw))
            return self._texts[key]

        return rule

    def _text(self, shown: Callable[[str], str | None]) -> Rule:
        """A rule for texts; numbers are read as texts, as the reader does."""

        def make(value: Any) -> bytes | None:
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                return None
            made = shown(str(value))
            return None if made is None else json.dumps(made).encode()

        return self._remembered(f"text {id(shown)}", make)

    def scalar(self, item: Any) -> str:
        """One recorded value as text: numbers and truth values; lists are sizes, and treated as shapes are."""
        text = str(item)[:400]
        if _VALUE.fullmatch(text):
            return text
        if not _LIST.fullmatch(text):
            return ""
        if self._shapes.kept:
            return text
        rounded = self._shapes.dims(text.encode())
        return "" if rounded is None else rounded.decode()


def number(raw: bytes) -> bytes | None:
    """A number, a whole number in quotes, or null; None for anything else."""
    if _NUMBER.fullmatch(raw) or _QUOTED.fullmatch(raw) or raw == b"null":
        return raw
    return None


def decoded(raw: bytes) -> Any:
    """The value of some JSON; None where it cannot be read."""
    try:
        return msgspec.json.decode(raw)
    except UnicodeDecodeError:
        return decoded(raw.decode("utf-8", "replace").encode())
    except (msgspec.DecodeError, RecursionError):
        return None


def _counted(function: Callable[[int], int]) -> Rule:
    """A rule for whole numbers; what stood in quotes stays in quotes."""

    def rule(raw: bytes) -> bytes | None:
        if raw.lstrip(b"-").isdigit() and len(raw) <= 20:
            return b"%d" % function(int(raw))
        if _QUOTED.fullmatch(raw):
            return b'"%d"' % function(int(raw[1:-1]))
        return None

    return rule
