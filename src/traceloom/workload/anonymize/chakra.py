"""Rewriting a Chakra trace (.et) message by message: each new message is built from known fields;
the old one is never modified.
"""

import ast
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from traceloom.formats.chakra.et_pb2 import AttributeProto, GlobalMetadata, Node, NodeType
from traceloom.formats.chakra.files import EtReader, EtWriter
from traceloom.trace.trace import GROUP_LIST
from traceloom.workload.anonymize.collapse import FUSED, Chains, find_chains
from traceloom.workload.anonymize.host_trace import (
    COMMUNICATION_VALUES,
    GROUP_VALUES,
    PLAIN_VALUES,
    Tensors,
)
from traceloom.workload.anonymize.inputs import open_output
from traceloom.workload.anonymize.kineto import Rules
from traceloom.workload.anonymize.leak_report import InputShapes
from traceloom.workload.anonymize.metadata import check_rank_list
from traceloom.workload.anonymize.names import FAMILIES
from traceloom.workload.anonymize.policy import (
    COLLAPSE,
    KEEP,
    RewriteStats,
    is_schema,
    is_type,
    list_host_names,
)
from traceloom.workload.chakra.graph_layout import is_ours

_SUFFIX = re.compile(
    r"(.*)\((\d{1,4})\)", re.DOTALL
)  # a part of an operator, as numbered by the upstream converter
_SCHEMA = re.compile(r"\d{1,2}\.\d{1,2}\.\d{1,2}(-chakra\.\d{1,2}\.\d{1,2}\.\d{1,2})?")
_VERSION = re.compile(r"\d{1,3}(\.\d{1,3}){0,3}")
_NODE_TYPE = re.compile(
    r"(COMP|COMM_SEND|COMM_RECV|COMM_COLL|MEM_LOAD|MEM_STORE|METADATA|INVALID)_NODE"
)
_COMMUNICATION = (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMM_COLL_NODE)
_MEMORY = (NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE)
_SCALARS = frozenset(
    f"{kind}_val"
    for kind in (
        "double",
        "float",
        "int32",
        "int64",
        "uint32",
        "uint64",
        "sint32",
        "sint64",
        "fixed32",
        "fixed64",
        "sfixed32",
        "sfixed64",
        "bool",
    )
)
_NEUTRAL_ATTRIBUTES = frozenset(
    (
        "is_cpu_op",
        "comm_type",
        "comm_priority",
        "comm_src",
        "comm_dst",
        "comm_tag",
        "rf_id",
        "fw_parent",
        "seq_id",
        "scope",
        "tid",
        "fw_tid",
        "device",
        "correlation",
        "step",
        "lane",
        "op",
        "host_op",
        "event",
        "duration_ns",
        "work_ns",
        "residual_ns",
        "comm_instance",
        "pg_size",
        "comm_seq",
        "peer",
        "tag",
        "host_id",
        "host_parent",
        "rank",
        "comm_root",
        "local_rank",
        "global_rank_start",
        "global_rank_stride",
    )
)
_SIZES = frozenset(("comm_size", "tensor_size", "num_ops", "bytes", "in_bytes", "out_bytes"))
_OPERATOR_ATTRIBUTES = frozenset(
    (
        "op_schema",
        "rf_id",
        "seq_id",
        "scope",
        "fw_parent",
        "fw_tid",
        "op_type",
        "inputs",
        "outputs",
        "op",
        "host_op",
        "host_id",
        "host_parent",
        "event",
        "correlation",
    )
)
_FAMILIES = frozenset(FAMILIES)
_MAX_TEXTS = 50_000


class ChakraRewriter:
    """Rewrites one `.et` file.

    Args:
        path: The file.
        rules: Rules for values.
        account: Counts what is dropped.
        hidden: Collects the shapes.
        origin_us: Subtracted from start times.
    """

    def __init__(
        self, path: Path, rules: Rules, account: RewriteStats, hidden: InputShapes, origin_us: int
    ) -> None:
        self._path = path
        self._rules = rules
        self._account = account
        self._hidden = hidden
        self._origin_us = origin_us
        self._tensors = Tensors(rules.names, rules.shapes, rules.policy, account)
        self._chains: Chains | None = None
        self._texts: dict[tuple[str, str], str] = {}
        self._rules_of_texts: dict[str, Callable[[str], str]] = {
            "pg_name": rules.names.group,
            "pg_desc": rules.names.description,
            "op_schema": lambda text: text if is_schema(text) else "",
            "collective_name": rules.names.operation,
            "comm_kind": rules.names.operation,
            "dtype": lambda text: text if is_type(text) else "",
            "op_type": rules.names.host,
            "kernel_backend": lambda text: text if text in ("triton", "cpp", "cutlass", "") else "",
        }

    def write(self, target: Path) -> None:
        """Rewrite the file.

        Raises:
            InputError: It is not a Chakra trace, or is damaged beyond its end.
            OSError: The new file cannot be written.
        """
        self._chains = find_chains(self._path) if self._rules.policy.structure == COLLAPSE else None
        with EtReader(self._path) as reader, open_output(target) as out:
            old, writer = reader.metadata, EtWriter(out)
            new = GlobalMetadata(version=old.version if _VERSION.fullmatch(old.version) else "")
            values = {attribute.name: _get_value(attribute) for attribute in old.attr}
            schema, process = values.pop("schema", None), values.pop("pid", None)
            if isinstance(schema, str) and _SCHEMA.fullmatch(schema):
                new.attr.add(name="schema", string_val=schema)
            if isinstance(process, int):
                new.attr.add(name="pid", uint64_val=self._rules.names.process(process))
            start, finish = values.pop("start_ts", None), values.pop("finish_ts", None)
            if isinstance(start, int) and isinstance(finish, int) and finish >= start:
                keeps_times = self._rules.policy.times == KEEP
                new.attr.add(name="start_ts", uint64_val=start if keeps_times else 0)
                new.attr.add(name="finish_ts", uint64_val=finish if keeps_times else finish - start)
            for name, value in values.items():
                self._account.drop(
                    f"metadata.{name}",
                    _encode_value(value),
                    unknown=name not in {"time", "input_file"},
                )
            self._saw(schema, new.version)
            writer.message(new)
            for node in reader:
                self._account.entries_in += 1
                if self._chains is not None and node.id in self._chains.head:
                    self._account.dropped_entries["collapsed"] += 1
                    continue
                writer.message(self._node(node))
                self._account.entries_out += 1
        for notice in reader.notices:
            self._account.dropped_entries[notice.slug] += notice.count

    def _node(self, old: Node) -> Node:
        values = {attribute.name: attribute for attribute in old.attr}
        cpu, chains = values.get("is_cpu_op"), self._chains
        name = self._name(old.name, old.type, on_host=bool(cpu is not None and _get_value(cpu)))
        start = max(0, old.start_time_micros - self._origin_us) if old.start_time_micros else 0
        new = Node(
            id=old.id,
            name=name,
            type=old.type,
            start_time_micros=start,
            duration_micros=old.duration_micros,
        )
        if chains is not None:
            # The first node of a chain, or a single node, without fields that identify single
            # operators.
            new.ctrl_deps.extend(chains.of(list(old.ctrl_deps), old.id))
            new.data_deps.extend(chains.of(list(old.data_deps), old.id))
            if old.id in chains.duration_us:
                new.duration_micros = _clip_to_field("uint64_val", chains.duration_us[old.id])
            if old.type == NodeType.COMP_NODE and name not in _FAMILIES:
                new.name = FUSED
        else:
            new.ctrl_deps.extend(old.ctrl_deps)
            new.data_deps.extend(old.data_deps)
            kind = GROUP_VALUES if old.name == GROUP_LIST else PLAIN_VALUES
            kind = COMMUNICATION_VALUES if old.name.startswith("record_param_comms") else kind
            tensors = self._tensors
            rewrites: dict[str, Callable[[Any], Any]] = {
                "values": partial(tensors.values, kind=kind),
                "shapes": tensors.shapes,
                "types": tensors.types,
            }
            for side in ("inputs", "outputs"):
                if not old.HasField(side):
                    continue
                old_side, new_side = getattr(old, side), getattr(new, side)
                new_side.SetInParent()
                parsed_lists = {field: _parse_list(getattr(old_side, field)) for field in rewrites}
                self._hidden.add(parsed_lists["shapes"][0], parsed_lists["types"][0])
                for (
                    field,
                    rewrite,
                ) in rewrites.items():  # each text keeps its syntax, Python or JSON
                    value, python = parsed_lists[field]
                    text = repr(rewrite(value)) if python else json.dumps(rewrite(value))
                    quoted = re.findall(r"'([^']*)'|\"([^\"]*)\"", text)
                    self._account.strings.update(part.encode() for pair in quoted for part in pair)
                    setattr(new_side, field, text if getattr(old_side, field) else "")
        for attribute in old.attr:
            if chains is not None:
                if old.type == NodeType.COMP_NODE and attribute.name in _OPERATOR_ATTRIBUTES:
                    self._account.drop(attribute.name)
                    continue
                member = attribute.WhichOneof("value")
                if (old.id, attribute.name) in chains.sums and member in _SCALARS:
                    setattr(
                        attribute,
                        member or "int64_val",
                        _clip_to_field(member, chains.sums[old.id, attribute.name]),
                    )
            rewritten = self._attribute(attribute)
            if rewritten is not None:
                new.attr.append(rewritten)
            elif chains is None:
                self._account.drop(
                    attribute.name, _encode_value(_get_value(attribute)), unknown=True
                )
        return new

    def _name(self, name: str, kind: int, *, on_host: bool) -> str:
        key = (f"name {kind} {on_host}", name)
        if key in self._texts:
            return self._texts[key]
        names, kernels = self._rules.names, self._rules.kernels
        part = _SUFFIX.fullmatch(name)
        base, suffix = (
            (part[1], f"({part[2]})") if part and part[1] in list_host_names() else (name, "")
        )
        typed = _NODE_TYPE.match(name)
        copied = re.match(r"mem(cpy|set)\b", base, re.IGNORECASE)
        if base in list_host_names():
            new_name = names.host(base) + suffix
        elif copied:
            new_name = kernels.copy(base)
        elif kind in _MEMORY:
            new_name = names.pseudonym("memory", base)
        elif typed:
            label = name[typed.end() :]
            new_name = typed[0] + (f" {names.pseudonym('node', label)}" if label else "")
        elif on_host or kind == NodeType.METADATA_NODE:
            new_name = names.host(base) + suffix
        else:
            new_name = kernels.kernel(base)
            if kind in _COMMUNICATION and not new_name.startswith(("nccl", "rccl")):
                new_name = names.operation(base)
        if len(self._texts) > _MAX_TEXTS:
            self._texts.clear()
        self._texts[key] = new_name
        self._saw(new_name)
        return new_name

    def _attribute(self, old: AttributeProto) -> AttributeProto | None:
        """Returns a new attribute, or None to drop it."""
        member = old.WhichOneof("value")
        name = old.name
        if member is None:
            return None
        value = getattr(old, member)
        new = AttributeProto(name=name)
        if member in _SCALARS and name in _NEUTRAL_ATTRIBUTES | set(
            self._rules.policy.keep_arguments
        ):
            setattr(new, member, value)
        elif member in _SCALARS and name == "start_ns" and isinstance(value, int):
            setattr(new, member, max(0, value - 1000 * self._origin_us))
        elif member in _SCALARS and name in _SIZES and isinstance(value, int):
            setattr(new, member, _clip_to_field(member, self._rules.shapes.size(value)))
        elif member in _SCALARS and name == "stream" and isinstance(value, int):
            setattr(new, member, self._rules.names.pointer(value))
        elif name == "involved_dim" and member == "bool_list":
            new.bool_list.values.extend(value.values)
        elif name in ("pg_ranks", "in_splits", "out_splits") and member == "int64_list":
            rewrite_item = (lambda item: item) if name == "pg_ranks" else self._rules.shapes.size
            new.int64_list.values.extend(
                _clip_to_field("int64_val", rewrite_item(item)) for item in value.values
            )
        elif name in ("inputs", "outputs") and member == "string_list":
            # `[name, size, name, size, ...]`, the tensor syntax of symbolic generators.
            for index, item in enumerate(value.values):
                is_size = index % 2 and item.isdecimal() and len(item) <= 20
                names, shapes = self._rules.names, self._rules.shapes
                text = str(shapes.size(int(item))) if is_size else names.pseudonym("tensor", item)
                new.string_list.values.append(text)
                self._saw(text)
        elif member == "string_val" and name in self._rules_of_texts:
            if (name, value) not in self._texts:
                text = self._rules_of_texts[name](value)
                if text == "" and value:
                    self._account.drop(name, value.encode("utf-8", "replace"))
                self._texts[name, value] = text
                self._saw(text)
            new.string_val = self._texts[name, value]
        else:
            return None
        return new

    def _saw(self, *texts: Any) -> None:
        self._account.strings.update(
            json.dumps(text).encode()[1:-1] for text in texts if isinstance(text, str)
        )


def _parse_list(text: str) -> tuple[list[Any], bool]:
    """Returns a list written in JSON or Python syntax, and whether it was Python's."""
    for python, read in ((False, json.loads), (True, ast.literal_eval)):
        try:
            value = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        return (value, python) if isinstance(value, list) else ([], python)
    return [], False


def _get_value(attribute: AttributeProto) -> Any:
    member = attribute.WhichOneof("value")
    return None if member is None else getattr(attribute, member)


def _clip_to_field(member: str | None, number: int) -> int:
    """Returns the nearest number that the field can hold, since rounding and summing may exceed
    it.
    """
    if member in ("double_val", "float_val"):
        return number
    bit_count = 1 if member == "bool_val" else 32 if "32" in str(member) else 64
    signed = not str(member).startswith(("uint", "fixed", "bool"))
    return max(-(1 << bit_count - 1) if signed else 0, min(number, (1 << bit_count - signed) - 1))


def _encode_value(value: Any) -> bytes:
    return str(value)[:2000].encode("utf-8", "replace")


def find_first_start(path: Path) -> int | None:
    """Returns the earliest start time of a `.et` file; None if it has none.

    In most files, 0 means that a node has no time. Files written from a graph mark the nodes that
    have one with `start_ns`: there, the first node may start at 0 and must not be shifted against
    the others.
    """
    earliest: int | None = None
    with EtReader(path) as reader:
        is_own = is_ours(reader.metadata)
        for node in reader:
            start = node.start_time_micros
            has_time = start > 0 or (
                is_own and any(attribute.name == "start_ns" for attribute in node.attr)
            )
            if has_time and (earliest is None or start < earliest):
                earliest = start
    return earliest


def write_groups(path: Path, rules: Rules, account: RewriteStats, target: Path) -> None:
    """Rewrite `comm_groups.json`, which maps names of groups to their ranks.

    Raises:
        InputError: It cannot be read.
        OSError: The new file cannot be written.
    """
    from traceloom.workload.anonymize.inputs import read_json

    document = read_json(path)
    out = {}
    for name, ranks in document.items():
        members = check_rank_list(ranks)
        if members is None:
            account.drop("comm_groups", _encode_value(ranks), unknown=True)
        else:
            out[rules.names.group(name)] = members
    text = json.dumps(out, indent=1).encode() + b"\n"
    account.scan(text)
    account.entries_in += len(document)
    account.entries_out += len(out)
    target.write_bytes(text)
