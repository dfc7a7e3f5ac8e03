"""HostTraceBuilder: small host traces in the schema of any version."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceloom.trace.trace import HostTrace

# From the oldest layout, which has no record function ids, to that of torch 2.13.
HOST_SCHEMAS = (
    "1.0.0",
    "1.0.1",
    "1.0.2-chakra.0.0.4",
    "1.0.3-chakra.0.0.4",
    "1.0.4-chakra.0.0.4",
    "1.1.0-chakra.0.0.4",
    "1.1.1-chakra.0.0.4",
)


@dataclass(slots=True)
class _Node:
    id: int
    name: str
    parent: int
    thread: int
    record_id: int = 0
    forward_parent: int = 0
    sequence: int = -1
    scope: int = 7
    forward_thread: int = 0
    schema: str = ""
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()


class HostTraceBuilder:
    """Adds ops one by one in the order in which they start; writes what PyTorch's observer would
    write.

    Args:
        schema: One of HOST_SCHEMAS.
        process: Process id.
    """

    def __init__(self, schema: str = HOST_SCHEMAS[-1], *, process: int = 1) -> None:
        self.schema = schema
        self._process = process
        self._root = _Node(1, self._root_name("process"), 1, 0)
        self._threads: dict[int, _Node] = {}
        self._nodes: list[_Node] = []
        self._last_id = 1
        self._records = 0

    @property
    def nested(self) -> bool:
        """Whether this schema has attributes."""
        return self.schema not in {"1.0.0", "1.0.1"}

    def op(
        self,
        name: str,
        *,
        thread: int = 1,
        parent: int | None = None,
        record_id: int | None = None,
        sequence: int = -1,
        forward_thread: int = 0,
        scope: int = 0,
        schema: str = "",
        inputs: Sequence[tuple[Any, Any, str]] = (),
        outputs: Sequence[tuple[Any, Any, str]] = (),
        attributes: Sequence[tuple[str, Any]] = (),
    ) -> int:
        """Add an op and return its id.

        Args:
            name: Its name.
            thread: PyTorch's number of the thread, from 1.
            parent: Id of the enclosing op; None for none.
            record_id: Record function id; None: the next one.
            sequence: Autograd sequence number.
            forward_thread: Thread of the forward op.
            scope: Kind of record function.
            schema: Schema of the operator.
            inputs: (value, shape, type) of each.
            outputs: (value, shape, type) of each.
            attributes: (name, value) beyond the known ones; only nested schemas have them.
        """
        if thread not in self._threads:
            self._last_id += 1
            self._threads[thread] = _Node(self._last_id, self._root_name("thread"), 1, thread)
        root = self._threads[thread]
        self._records = self._records + 1 if record_id is None else record_id
        self._last_id += 1
        self._nodes.append(
            _Node(
                self._last_id,
                name,
                root.id if parent is None else parent,
                thread,
                self._records,
                sequence=sequence,
                scope=scope,
                forward_thread=forward_thread,
                schema=schema,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                attributes=tuple(attributes),
            )
        )
        return self._last_id

    def groups(self, groups: list[dict[str, Any]]) -> int:
        """Add the list of process groups, as the observer writes it when it starts."""
        return self.op(
            "## process_group:init ##", scope=7, inputs=[(json.dumps(groups), [], "String")]
        )

    # -- the file -----------------------------------------------------------------------------------------------

    def nodes(self) -> list[str]:
        """Returns the nodes as JSON text, in file order: a node is written when it ends."""
        children: dict[int, list[_Node]] = {}
        for node in [*self._threads.values(), *self._nodes]:
            children.setdefault(node.parent, []).append(node)
        order: list[_Node] = []
        waiting: list[tuple[_Node, bool]] = [(self._root, False)]
        while waiting:
            node, done = waiting.pop()
            if done or node.id not in children:
                order.append(node)
                continue
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(children[node.id])]
        # The observer writes a thread's node when the thread's first op starts.
        order.sort(key=lambda node: node.id not in {thread.id for thread in self._threads.values()})
        return [
            json.dumps(self._nested(node) if self.nested else self._flat(node)) for node in order
        ]

    def envelope(self) -> dict[str, Any]:
        """Returns the top-level entries other than the nodes, in the order of the file; `finish_ts`
        comes last.
        """
        return {
            "schema": self.schema,
            "pid": self._process,
            "time": "2026-01-02 03:04:05",
            "start_ts": 1000,
            "finish_ts": 2000,
        }

    def text(self, nodes: list[str] | None = None) -> str:
        """Returns the file as text, with other nodes if given."""
        envelope = self.envelope()
        finish = envelope.pop("finish_ts")
        head = ", ".join(
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in envelope.items()
        )
        body = ",\n    ".join(self.nodes() if nodes is None else nodes)
        return f'{{\n  {head},\n  "nodes": [\n    {body}\n  ],\n  "finish_ts": {finish}\n}}\n'

    def write(self, path: str | Path) -> Path:
        """Write the file, compressed if its name ends in .gz, and return its path."""
        target = Path(path)
        data = self.text().encode()
        target.write_bytes(gzip.compress(data, 6, mtime=0) if target.name.endswith(".gz") else data)
        return target

    def build(self) -> HostTrace:
        """Returns the trace as Traceloom reads it from the file."""
        from traceloom.formats.host_trace import read_host_trace

        with tempfile.TemporaryDirectory() as directory:
            return read_host_trace(self.write(Path(directory) / "host.json"))

    # -- nodes --------------------------------------------------------------------------------------------------

    def _root_name(self, kind: str) -> str:
        word = "execution_trace" if self.nested else "execution_graph"
        return f"[pytorch|profiler|{word}|{kind}]"

    def _flat(self, node: _Node) -> dict[str, Any]:
        out: dict[str, Any] = {"name": node.name, "id": node.id}
        if self.schema != "1.0.0":
            out["rf_id"] = node.record_id
        out |= {
            "parent": node.parent,
            "fw_parent": node.forward_parent,
            "seq_id": node.sequence,
            "scope": node.scope,
        }
        out |= {"tid": node.thread, "fw_tid": node.forward_thread}
        if self.schema != "1.0.0":
            out["op_schema"] = node.schema
        for side, entries in (("input", node.inputs), ("output", node.outputs)):
            out |= {f"{side}s": [entry[0] for entry in entries]}
            out |= {
                f"{side}_shapes": [entry[1] for entry in entries],
                f"{side}_types": [e[2] for e in entries],
            }
        return out

    def _nested(self, node: _Node) -> dict[str, Any]:
        out: dict[str, Any] = {"id": node.id, "name": node.name, "ctrl_deps": node.parent}
        for side, entries in (("inputs", node.inputs), ("outputs", node.outputs)):
            out[side] = {
                "values": [entry[0] for entry in entries],
                "shapes": [entry[1] for entry in entries],
                "types": [entry[2] for entry in entries],
            }
            if self.schema.startswith("1.1.1"):
                out[side]["strides"] = [_compute_strides(entry[1]) for entry in entries]
        attributes = (
            ("rf_id", "uint64", node.record_id),
            ("fw_parent", "uint64", node.forward_parent),
            ("seq_id", "int64", node.sequence),
            ("scope", "uint64", node.scope),
            ("tid", "uint64", node.thread),
            ("fw_tid", "uint64", node.forward_thread),
            ("op_schema", "string", node.schema),
        )
        listed = [{"name": name, "type": kind, "value": value} for name, kind, value in attributes]
        if self.schema >= "1.0.4":
            listed += [
                {"name": name, "type": "string", "value": ""}
                for name in ("kernel_backend", "kernel_file")
            ]
        if self.schema.startswith("1.1.1"):
            listed.append({"name": "tensor_range", "type": "string", "value": ""})
        listed += [
            {"name": name, "type": "string" if isinstance(value, str) else "int64", "value": value}
            for name, value in node.attributes
        ]
        return out | {"attrs": listed}


def _compute_strides(shape: list[Any]) -> list[Any]:
    """Returns the strides of a contiguous tensor; for a list of shapes those of each."""
    if any(isinstance(length, list) for length in shape):
        return [_compute_strides(part) for part in shape]
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return strides[::-1]
