"""Rewriting Kineto traces and the arguments of their events."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traceloom.formats.kineto_document import Document, Slice
from traceloom.formats.kineto_fields import parse_text_times
from traceloom.formats.resync import PARSE_ERRORS, DamageLog, repair_event
from traceloom.formats.text_stream import open_input, read_text_pieces
from traceloom.system.text import encode_utf8
from traceloom.trace import vocabulary as vocab
from traceloom.workload.anonymize.collapse import (
    FusedThread,
    build_border_events,
    format_fused_events,
    format_microseconds,
)
from traceloom.workload.anonymize.inputs import concatenate_files, open_output
from traceloom.workload.anonymize.metadata import MetadataRewriter
from traceloom.workload.anonymize.names import COMMUNICATION, LOADING, STEP, KernelNames, Pseudonyms
from traceloom.workload.anonymize.policy import (
    COLLAPSE,
    DROP,
    KEEP,
    Policy,
    RewriteStats,
    is_type,
    read_sections,
)
from traceloom.workload.anonymize.sizes import Shapes

Rule = Callable[[bytes], bytes | None]

_NUMBER = re.compile(rb"-?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_QUOTED = re.compile(rb'"-?\d{1,20}"')
_RANKS = re.compile(rb'"?\[[\d,\s]*(\.\.\.)?\s*\]?"?')
_TRUE = {
    b"true": b"true",
    b"false": b"false",
    b'"True"': b"true",
    b'"False"': b"false",
    b'"true"': b"true",
    b'"false"': b"false",
    b"1": b"true",
    b"0": b"false",
}
_COPY_WORD = re.compile(
    r"[HDPM]to[HDPM]|\d{1,3}|Dispatch Kernel|(HOST|DEVICE)_TO_(HOST|DEVICE)"
    r"|Pageable|Pinned|Device|Host|Managed|Array|Unknown"
)
_BACKENDS = frozenset(("triton", "cpp", "cutlass", "cutedsl", "aten", "ck", "halide", ""))
_VALUE = re.compile(r"-?\d*\.?\d*([eE][+-]?\d+)?|True|False|None|inf|-inf|nan|")
_LIST = re.compile(r"\[[\d\s,.\-+eE\[\]]*\]")
_MAX_CACHED = 50_000

NEUTRAL_KEYS = (  # numbers unrelated to the model: ids, ranks, properties of the hardware and of the launch
    "External id",
    "external id",
    "Record function id",
    "correlation",
    "Ev Idx",
    "Profiler Event Index",
    "Sequence number",
    "Fwd thread id",
    "Python id",
    "Python parent id",
    "Python module id",
    "Python thread",
    "device",
    "cbid",
    "cid",
    "graph id",
    "graph node id",
    "priority",
    "channel",
    "channel_type",
    "registers per thread",
    "shared memory",
    "est. achieved occupancy %",
    "Device Type",
    "Device Id",
    "Group size",
    "Rank",
    "Src Rank",
    "Dst Rank",
    "Root",
    "Global rank start",
    "Global rank stride",
    "Seq",
    "Process Group ID",
    "Trace iteration",
    "wait_on_cuda_event_record_corr_id",
    "wait_on_cuda_event_id",
    "event_id",
    "num_warps",
    "num_stages",
    "seq_num",
    "sqid",
    "flags",
    "memory kind",
    "Op count",
    "annotated_stream",
    "original_stream",
    "cudaGraphInlineAnnotated",
    "fromDevice",
    "inDevice",
    "toDevice",
)
POINTERS = ("stream", "wait_on_stream", "stream_id", "hsa_queue", "context", "queue")
SIZES = ("bytes", "size", "In msg nelems", "Out msg nelems", "Bytes")
TOTALS = ("Total Allocated", "Total Reserved")
SHAPE_DEPENDENT_KEYS = (
    "blocks per SM",
    "warps per SM",
    "memory bandwidth (GB/s)",
    "occupancy",
)  # these reveal the shape
SENSITIVE = frozenset(  # known, and dropped whatever the policy says
    (
        "Call stack",
        "Module Hierarchy",
        "CallFrom",
        "kernel_file",
        "kernel_hash",
        "kernel_kwargs",
        "kernel_name",
        "kernel",
        "queued",
        "external ts",
        "src",
        "dst",
        "ptr",
        "packet_ptr",
        "k_work_ptr",
        "host_ctx",
        "Trace name",
        "Comms Id",
        "Input Tensors start",
        "Output Tensors start",
        "cmd_name",
        "executable_name",
        "mem size",
        "row",
        "column",
    )
)
STRUCTURE_KEYS = frozenset(
    (  # dropped with `collapse`; shapes stay, since only those of communication remain
        "External id",
        "external id",
        "Record function id",
        "Ev Idx",
        "Profiler Event Index",
        "Sequence number",
        "Fwd thread id",
        "Python id",
        "Python parent id",
        "Python module id",
        "Input Strides",
        "Concrete Inputs",
    )
)
KEYS = (
    *NEUTRAL_KEYS,
    *POINTERS,
    *SIZES,
    *TOTALS,
    *SHAPE_DEPENDENT_KEYS,
    "finished",
    "Is asynchronized op",
    "Input Dims",
    "Input dims",
    "In split size",
    "Out split size",
    "kind",
    "copy kind",
    "src kind",
    "dst kind",
    "direction",
    "Input Strides",
    "Input type",
    "Concrete Inputs",
    "grid",
    "block",
    "Addr",
    "Collective name",
    "dtype",
    "cuda_sync_kind",
    "kernel_backend",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
)


class Arguments:
    """Rewrites the arguments of events.

    Args:
        names: Pseudonyms of names.
        shapes: Rounding of sizes.
        policy: The policy.
        account: Counts what is dropped.
    """

    def __init__(
        self, names: Pseudonyms, shapes: Shapes, policy: Policy, account: RewriteStats
    ) -> None:
        self._shapes = shapes
        self._policy = policy
        self._account = account
        self._texts: dict[tuple[str, bytes], bytes | None] = {}
        keeps_shapes = policy.shapes == KEEP

        def types(value: Any) -> bytes | None:
            if not isinstance(value, list):
                return None
            return msgspec.json.encode(
                [item if isinstance(item, str) and is_type(item) else "" for item in value]
            )

        def values(value: Any) -> bytes | None:
            keeps = policy.scalars == KEEP and isinstance(value, list)
            return msgspec.json.encode([self.scalar(item) for item in value]) if keeps else None

        def block(value: Any) -> bytes | None:  # chosen by the kernel's author, not a shape
            small = isinstance(value, list) and len(value) <= 3
            fits = small and all(isinstance(n, int) and 0 <= n < 4096 for n in value)
            return msgspec.json.encode(value) if fits else None

        table: dict[str, Rule | None] = dict.fromkeys((*NEUTRAL_KEYS, *policy.keep_arguments))
        table |= dict.fromkeys(POINTERS, _make_integer_rule(names.pointer))
        table |= dict.fromkeys(SIZES, _make_integer_rule(shapes.size))
        table |= dict.fromkeys(TOTALS, _make_integer_rule(shapes.total))
        table |= dict.fromkeys(
            SHAPE_DEPENDENT_KEYS, check_number if keeps_shapes else lambda _: None
        )
        table |= dict.fromkeys(("finished", "Is asynchronized op"), _TRUE.get)
        table |= dict.fromkeys(("Input Dims", "Input dims"), shapes.dims)
        table |= dict.fromkeys(("In split size", "Out split size"), shapes.splits)
        table |= dict.fromkeys(
            ("kind", "copy kind", "src kind", "dst kind", "direction"),
            self._text(lambda text: text if _COPY_WORD.fullmatch(text) else None),
        )
        table |= {
            "Input Strides": shapes.dims,
            "Input type": self._remembered("types", types),
            "Concrete Inputs": self._remembered("values", values),
            "grid": shapes.grid,
            "block": self._remembered("block", block),
            "Addr": _make_integer_rule(names.address),
            "Collective name": self._text(names.operation),
            "dtype": self._text(lambda text: text if is_type(text) else None),
            "cuda_sync_kind": self._text(
                lambda text: text if text in read_sections()["regions"] else None
            ),
            "kernel_backend": self._text(lambda text: text if text in _BACKENDS else None),
            "Process Group Name": self._text(names.group),
            "Process Group Description": self._text(names.description),
            "Process Group Ranks": lambda raw: raw if _RANKS.fullmatch(raw) else None,
        }
        if policy.structure == COLLAPSE:  # arguments that identify single operators
            table = {key: rule for key, rule in table.items() if key not in STRUCTURE_KEYS}
        self._rules = {key: (json.dumps(key).encode() + b":", rule) for key, rule in table.items()}

    def rewrite(self, args: dict[str, msgspec.Raw], *, talking: bool = False) -> bytes:
        """Returns the arguments of one event as the inside of a JSON object.

        Args:
            args: Key -> JSON text.
            talking: Whether it is communication. Its bytes follow from its shapes, which are kept
                as element counts when shapes are dropped.
        """
        parts = []
        for key, raw in args.items():
            prefix_and_rule = self._rules.get(key)
            value = bytes(raw)
            if prefix_and_rule is None:
                self._account.drop(
                    key, value, unknown=key not in SENSITIVE and key not in STRUCTURE_KEYS
                )
                continue
            prefix, rule = prefix_and_rule
            if rule is None:
                new_value: bytes | None = (
                    value if value.isdigit() and len(value) <= 20 else check_number(value)
                )
            elif key == "Input Strides":
                new_value = self._shapes.strides(value, bytes(args.get("Input Dims", b"")))
            else:
                new_value = rule(value)
            if new_value is None and talking and key in ("Input Dims", "Input dims"):
                new_value = self._shapes.counts(value)
            if new_value is not None:
                parts.append(prefix + new_value)
            elif rule is None:
                self._account.refuse(key, value)
            else:
                self._account.drop(key, value)
        return b",".join(parts)

    # -- rules ------------------------------------------------------------------------------------------------

    def _remembered(self, kind: str, make: Callable[[Any], bytes | None]) -> Rule:
        """Returns a rule that is evaluated once per distinct JSON text."""

        def rule(raw: bytes) -> bytes | None:
            key = (kind, raw)
            if key not in self._texts:
                if len(self._texts) > _MAX_CACHED:
                    self._texts.clear()
                self._texts[key] = make(decode_json(raw))
            return self._texts[key]

        return rule

    def _text(self, rewrite_text: Callable[[str], str | None]) -> Rule:
        """Returns a rule for texts; numbers are read as texts, as the reader does."""

        def make(value: Any) -> bytes | None:
            if isinstance(value, bool) or not isinstance(value, (str, int)):
                return None
            text = rewrite_text(str(value))
            return None if text is None else json.dumps(text).encode()

        return self._remembered(f"text {id(rewrite_text)}", make)

    def scalar(self, item: Any) -> str:
        """Returns one recorded value (number or Boolean) as text; lists are sizes and treated like
        shapes.
        """
        text = str(item)[:400]
        if _VALUE.fullmatch(text):
            return text
        if not _LIST.fullmatch(text):
            return ""
        if self._shapes.kept:
            return text
        rounded = self._shapes.dims(text.encode())
        return "" if rounded is None else rounded.decode()


def check_number(raw: bytes) -> bytes | None:
    """Returns a number, a quoted integer or null unchanged; None for anything else."""
    return raw if _NUMBER.fullmatch(raw) or _QUOTED.fullmatch(raw) or raw == b"null" else None


def decode_json(raw: bytes) -> Any:
    """Returns the value of a JSON text; None if it is malformed."""
    try:
        return msgspec.json.decode(raw)
    except UnicodeDecodeError:
        return decode_json(raw.decode("utf-8", "replace").encode())
    except (msgspec.DecodeError, RecursionError):
        return None


def _make_integer_rule(function: Callable[[int], int]) -> Rule:
    """Returns a rule for integers; quoted ones stay quoted."""

    def rule(raw: bytes) -> bytes | None:
        if raw.lstrip(b"-").isdigit() and len(raw) <= 20:
            return b"%d" % function(int(raw))
        return b'"%d"' % function(int(raw[1:-1])) if _QUOTED.fullmatch(raw) else None

    return rule


_ENTRIES: msgspec.json.Decoder[list[dict[str, msgspec.Raw]]] = msgspec.json.Decoder(
    list[dict[str, msgspec.Raw]]
)
_ARGUMENTS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
)
_ENTRY_KEYS = frozenset(("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp", "s", "args"))
_FLOWS = frozenset(
    ("ac2g", "fwdbwd", "async_cpu_to_gpu", "async_gpu", "async", "launch", "cudaLaunchKernel")
)
_ON_DEVICE = frozenset(
    (
        vocab.KERNEL,
        vocab.COPY,
        vocab.FILL,
        vocab.GPU_ANNOTATION,
        vocab.SYNC,
        vocab.GPU_EVENT,
        vocab.COMMAND,
    )
)
_ON_HOST = frozenset((vocab.OP, vocab.ANNOTATION, vocab.COLLECTIVE))
_LABELS = frozenset(f"GPU {index}" for index in range(1024)) | {"CPU"}
_SPELLED = frozenset(("Trace", "Operator", "Runtime", "Kernel", "Memcpy", "Memset", "Python"))
_MISSING = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules for rewriting values, shared by all files of a run."""

    policy: Policy
    names: Pseudonyms
    shapes: Shapes
    kernels: KernelNames


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts about a file that are needed before it is rewritten.

    Attributes:
        path: The file.
        origin_ns: Subtracted from all times.
        hosts: (process, thread) of host lanes, as texts; all others are devices and streams.
        base_ns: `baseTimeNanoseconds` of the file.
        threads: With `collapse`, the fused operators of each thread.
        steps: With `collapse`, names of the annotations that are steps.
        step_ns: Start of a step -> duration as the reader returns it, cut where a dropped span
            ended.
        window_ns: With `collapse`, first start and last end of the trace.
    """

    path: Path
    origin_ns: int
    hosts: frozenset[tuple[str, str]] = frozenset()
    base_ns: int = 0
    threads: tuple[FusedThread, ...] = ()
    steps: frozenset[str] = frozenset()
    step_ns: dict[int, int] = field(default_factory=dict)
    window_ns: tuple[int, int] | None = None


@dataclass(slots=True)
class _Plan:
    """How to rewrite the events of one category or phase."""

    head: bytes  # `{"ph":"X","cat":"kernel","name":`
    name: Callable[[str], str]
    device: bool
    dropped: str = ""  # reason why they are dropped
    some: bool = False  # keep only steps and communication
    names: dict[bytes, bytes | None] = field(default_factory=dict)
    talking: set[bytes] = field(default_factory=set)  # names of communication


class _Rewriter:
    """Rewrites one Kineto file.

    Attributes:
        metadata: Entries besides the events; complete once all pieces were consumed.
    """

    def __init__(self, facts: TraceFacts, rules: Rules, account: RewriteStats) -> None:
        self.metadata: dict[str, Any] = {}
        self._facts = facts
        self._rules = rules
        self._account = account
        self._arguments = Arguments(rules.names, rules.shapes, rules.policy, account)
        self._plans: dict[bytes, _Plan] = {}
        self._marks = _Plan(b"", rules.names.host, device=False)
        self._lanes: dict[tuple[bytes, bytes, bool | None], bytes] = {}
        self._arrows: dict[tuple[bytes, bytes], bytes] = {}

    def pieces(self) -> Iterator[bytes]:
        """Yields the rewritten events, one piece per slice: one event per line, separated by
        commas.
        """
        damage, facts, account = DamageLog(), self._facts, self._account
        with open_input(facts.path) as stream:
            document = Document(
                partial(read_text_pieces, stream, damage, None), damage, str(facts.path)
            )
            for part in document.slices():
                entries = _decode_entries(part)
                account.entries_in += len(entries)
                starts = [entry.get("ts", _MISSING) for entry in entries]
                start, duration, has_time, long = parse_text_times(
                    starts, [entry.get("dur", _MISSING) for entry in entries]
                )
                start = start + (facts.base_ns - facts.origin_ns)
                duration = np.where(long, duration, 0)
                columns = zip(
                    entries, start.tolist(), duration.tolist(), has_time.tolist(), strict=True
                )
                rewritten = (
                    self.entry(entry, start_ns, length, has_time=is_timed)
                    for entry, start_ns, length, is_timed in columns
                )
                lines = [line for line in rewritten if line is not None]
                account.entries_out += len(lines)
                if lines:
                    yield b",\n".join(lines)
            self.metadata = document.metadata
        if facts.window_ns is not None:
            yield b",\n".join(
                build_border_events(*(start_ns - facts.origin_ns for start_ns in facts.window_ns))
            )
            account.entries_out += 2
        ids_by_thread = {}
        for process, thread in {(fused.process, fused.thread) for fused in facts.threads}:
            id_texts = []
            for text in (process, thread):  # the reader returns both as texts
                number = text.lstrip("-").isdigit() and text.isascii() and len(text) <= 20
                id_texts.append(self.identity(int(text) if number else text, on_device=False))
            ids_by_thread[process, thread] = b'"pid":' + id_texts[0] + b',"tid":' + id_texts[1]
        for events in format_fused_events(list(facts.threads), ids_by_thread, facts.origin_ns):
            account.entries_out += len(events)
            yield b",\n".join(events)

    def entry(
        self, entry: dict[str, msgspec.Raw], start: int, duration: int, *, has_time: bool
    ) -> bytes | None:
        """Returns one event; None if it is dropped."""
        if not entry.keys() <= _ENTRY_KEYS:
            for key in entry.keys() - _ENTRY_KEYS:
                self._account.drop(key, bytes(entry[key]), unknown=True)
        phase, names = bytes(entry.get("ph", _MISSING)), self._rules.names
        if phase == b'"X"':
            return self.span(entry, start, duration) if has_time else self.skip("no usable time")
        if phase == b'"M"':
            kind, args = (decode_json(bytes(entry.get(key, _MISSING))) for key in ("name", "args"))
            key = "labels" if kind == "process_labels" else "name"
            value = args.get(key) if isinstance(args, dict) else None
            if kind not in ("process_name", "thread_name", "process_labels") or not isinstance(
                value, str
            ):
                return self.skip("metadata that no reader needs")
            new_label = names.thread(value) if key == "name" else value if value in _LABELS else ""
            for other in args.keys() - {key}:
                self._account.drop(other, json.dumps(args[other]).encode(), unknown=True)
            return b'{"ph":"M","name":"%b",%b,"args":{"%b":%b}}' % (
                encode_utf8(kind),
                self.where(entry, device=None),
                encode_utf8(key),
                encode_utf8(json.dumps(new_label, ensure_ascii=False)),
            )
        if not has_time:
            return self.skip("no usable time")
        if phase in (b'"s"', b'"t"', b'"f"'):
            spelled = (bytes(entry.get("cat", _MISSING)), bytes(entry.get("name", _MISSING)))
            if spelled not in self._arrows:  # category and name if known; else empty
                texts = [
                    (key, decode_json(raw))
                    for key, raw in zip((b"cat", b"name"), spelled, strict=True)
                ]
                self._arrows[spelled] = b"".join(
                    b',"%b":"%b"' % (key, text.encode())
                    for key, text in texts
                    if isinstance(text, str) and text in _FLOWS
                )
            tail = self._arrows[spelled]
            identity = check_number(bytes(entry.get("id", _MISSING)))
            if not tail or identity is None or identity == b"null":
                return self.skip("unknown arrow")
            if self._rules.policy.structure == COLLAPSE and b"fwdbwd" in tail:
                return self.skip("collapsed")
            end = b',"bp":"e"}' if bytes(entry.get("bp", _MISSING)) == b'"e"' else b"}"
            lane = self.where(entry, device=None)
            ts = format_microseconds(start)
            return b"".join(
                (b'{"ph":', phase, b',"id":', identity, b",", lane, b',"ts":', ts, tail, end)
            )
        if phase in (b'"i"', b'"I"', b'"R"'):
            name = self.named(self._marks, entry) or b'""'
            args = self.rewritten(entry)
            category = (
                b'"cat":"cpu_instant_event",'
                if bytes(entry.get("cat", b"")) == b'"cpu_instant_event"'
                else b""
            )
            scope = bytes(entry.get("s", _MISSING))
            lane_ids = self.where(entry, device=False)
            return b'{"ph":"i",%b"s":%b,"name":%b,%b,"ts":%b,"args":{%b}}' % (
                category,
                scope if scope in (b'"g"', b'"p"', b'"t"') else b'"t"',
                name,
                lane_ids,
                format_microseconds(start),
                args,
            )
        if phase != b'"C"':
            return self.skip("unknown phase")
        if self._rules.policy.counters != KEEP:
            return self.skip("counters")
        value, title = (decode_json(bytes(entry.get(key, _MISSING))) for key in ("args", "name"))
        values = {
            names.pseudonym("counter", key): amount
            for key, amount in (value.items() if isinstance(value, dict) else ())
            if isinstance(amount, (int, float)) and not isinstance(amount, bool)
        }
        counter = {"name": names.pseudonym("counter", str(title)), "args": values}
        lane_ids = self.where(entry, device=None)
        return b'{"ph":"C",%b,"ts":%b,%b' % (
            lane_ids,
            format_microseconds(start),
            msgspec.json.encode(counter)[1:],
        )

    def skip(self, reason: str) -> bytes | None:
        self._account.dropped_entries[reason] += 1
        return None

    def span(self, entry: dict[str, msgspec.Raw], start: int, duration: int) -> bytes | None:
        raw = bytes(entry.get("cat", _MISSING))
        plan = self._plans.get(raw)
        if plan is None:  # the first event of its category
            spelled = decode_json(raw)
            text = spelled if isinstance(spelled, str) else ""
            category = vocab.FROM_KINETO.get(text.lower(), vocab.OTHER)
            names, kernels, policy = self._rules.names, self._rules.kernels, self._rules.policy
            functions = {
                vocab.PYTHON: names.python,
                **dict.fromkeys((vocab.KERNEL, vocab.COUNTER_RANGE), kernels.kernel),
                **dict.fromkeys((vocab.COPY, vocab.FILL), kernels.copy),
                **dict.fromkeys((vocab.RUNTIME, vocab.DRIVER), names.call),
            }
            head = b'{"ph":"X","cat":' + json.dumps(text).encode() + b',"name":'
            plan = _Plan(head, functions.get(category, names.host), device=category in _ON_DEVICE)
            if category == vocab.OTHER:
                plan.dropped = "unknown category"
                self._account.texts.add(raw)
            elif category == vocab.PYTHON and (
                policy.stacks == DROP or policy.structure == COLLAPSE
            ):
                plan.dropped = "stacks"
            elif policy.structure == COLLAPSE and category == vocab.GPU_ANNOTATION:
                plan.dropped = "collapsed"
            elif text.lower() != text and text not in _SPELLED:
                plan.head = b'{"ph":"X","cat":' + json.dumps(text.lower()).encode() + b',"name":'
            plan.some = policy.structure == COLLAPSE and category in _ON_HOST
            self._plans[raw] = plan
        if plan.dropped:
            return self.skip(plan.dropped)
        name = self.named(plan, entry)
        if name is None:
            return self.skip("collapsed")
        if plan.some:
            duration = self._facts.step_ns.get(start + self._facts.origin_ns, duration)
        args = self.rewritten(entry, talking=bytes(entry.get("name", _MISSING)) in plan.talking)
        return b"".join(
            (
                plan.head,
                name,
                b",",
                self.where(entry, device=plan.device),
                b',"ts":',
                format_microseconds(start),
                b',"dur":',
                format_microseconds(duration),
                b',"args":{' + args + b"}}" if args else b"}",
            )
        )

    def named(self, plan: _Plan, entry: dict[str, msgspec.Raw]) -> bytes | None:
        """Returns the name as JSON; None if `collapse` drops the event."""
        raw = bytes(entry.get("name", _MISSING))
        if raw in plan.names:
            return plan.names[raw]
        value = decode_json(raw)
        text = (
            value
            if isinstance(value, str)
            else ""
            if value is None
            else raw.decode("utf-8", "replace")
        )
        encoded_name: bytes | None = encode_utf8(json.dumps(plan.name(text), ensure_ascii=False))
        if COMMUNICATION.match(text):
            plan.talking.add(raw)
        elif plan.some and not (
            STEP.fullmatch(text) or LOADING.match(text) or text in self._facts.steps
        ):
            encoded_name = None
        plan.names[raw] = encoded_name
        return encoded_name

    def rewritten(self, entry: dict[str, msgspec.Raw], *, talking: bool = False) -> bytes:
        raw = entry.get("args")
        if raw is None:
            return b""
        try:
            args = _ARGUMENTS.decode(raw)
        except UnicodeDecodeError:  # in a key; invalid UTF-8 is read as U+FFFD
            return self.rewritten(
                {"args": msgspec.Raw(bytes(raw).decode("utf-8", "replace").encode())},
                talking=talking,
            )
        except (msgspec.DecodeError, RecursionError):
            self._account.refuse("args", bytes(raw))
            return b""
        return self._arguments.rewrite(args, talking=talking)

    def where(self, entry: dict[str, msgspec.Raw], *, device: bool | None) -> bytes:
        """Returns `"pid":1,"tid":2`; if `device` is None, the lanes of the file decide."""
        key = (bytes(entry.get("pid", _MISSING)), bytes(entry.get("tid", _MISSING)), device)
        ids = self._lanes.get(key)
        if ids is None:
            pid, tid = (decode_json(raw) for raw in key[:2])
            if device is None:
                hosts = self._facts.hosts
                device = (str(pid), str(tid)) not in hosts and str(pid) not in {
                    process for process, _ in hosts
                }
            id_texts = [self.identity(value, on_device=device) for value in (pid, tid)]
            ids = self._lanes[key] = b'"pid":' + id_texts[0] + b',"tid":' + id_texts[1]
        return ids

    def identity(self, value: Any, *, on_device: bool) -> bytes:
        names = self._rules.names
        change = names.pointer if on_device else names.process
        if isinstance(value, int) and not isinstance(value, bool):
            return b"%d" % change(value)
        if isinstance(value, str):
            digits = value.strip()
            if digits.lstrip("-").isdigit() and len(digits) <= 20 and digits.isascii():
                return b'"%d"' % change(int(digits))
            return json.dumps(names.lane(value)).encode()
        return b'""'


def _decode_entries(part: Slice) -> list[dict[str, msgspec.Raw]]:
    """Returns each entry as key -> JSON text; malformed ones are repaired as in the reader."""
    try:
        entries = _ENTRIES.decode(b"[" + part.text + b"]")
    except PARSE_ERRORS:
        pass
    else:
        if len(entries) == len(part.entries):
            return entries
    entries = []
    for offset, length in sorted(
        set(zip((part.offsets - part.base).tolist(), part.lengths.tolist(), strict=True))
    ):
        body = part.text[offset : offset + length].strip().strip(b",")
        try:
            entries += _ENTRIES.decode(b"[" + body + b"]")
        except PARSE_ERRORS:
            entries += [
                {
                    str(key): msgspec.Raw(json.dumps(value).encode("utf-8", "replace"))
                    for key, value in entry.items()
                }
                for entry in repair_event(body)
            ]
    return entries


def write_kineto(
    facts: TraceFacts, rules: Rules, account: RewriteStats, target: Path, *, unix: bool
) -> None:
    """Rewrite a Kineto trace into a new file.

    The entries besides the events are known only at the end but come first in the file, so they are
    written last and the parts are joined.

    Raises:
        InputError: The file is not a Kineto trace.
        OSError: The new file cannot be written.
    """
    rewriter = _Rewriter(facts, rules, account)
    ending = ".gz" if target.name.endswith(".gz") else ""
    body, head = (target.with_name(f"{target.name}.{part}{ending}") for part in ("body", "head"))
    with open_output(body) as out:
        first = True
        for chunk in rewriter.pieces():
            out.write(chunk if first else b",\n" + chunk)
            account.scan(chunk)
            first = False
        out.write(b"\n]}\n")
    metadata = MetadataRewriter(rules.names, rules.policy, account).rewrite(
        rewriter.metadata, unix=unix
    )
    text = encode_utf8(json.dumps(metadata, ensure_ascii=False))[:-1] + b',"traceEvents":[\n'
    account.scan(text)
    with open_output(head) as out:
        out.write(text)
    concatenate_files([head, body], target)
