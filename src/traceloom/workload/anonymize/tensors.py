"""Rewriting inputs and outputs of recorded operators: tensors keep their ids, sizes follow the
policy, and most values are dropped.
"""

import json
import math
import re
from typing import Any

from traceloom.workload.anonymize.metadata import MetadataRewriter, check_rank_list, encode_json
from traceloom.workload.anonymize.names import OPERATIONS, Pseudonyms
from traceloom.workload.anonymize.policy import DROP, KEEP, Policy, RewriteStats, is_type
from traceloom.workload.anonymize.sizes import Shapes, rewrite_argument
from traceloom.workload.replay.schema import SchemaArgument, UnreadableSchemaError, parse_schema
from traceloom.workload.replay.values import Kind, parse_kinds

_DEVICE = re.compile(r"(cpu|cuda|hip|xpu|mtia|hpu|npu|mps|meta|privateuseone)(:\d{1,3})?")
_NULL_VALUES = frozenset(
    f"<{kind}>"
    for kind in ("None", "Object", "Generator", "Capsule", "PyObject", "Storage", "Enum")
)
_NUMBER = re.compile(r"-?inf|nan|-?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_MAX_DEPTH = 8
_TENSOR_FIELDS = 5  # without its device
_VALUE_TYPES = {bool: "flags", int: "whole numbers", float: "numbers, replaced", str: "words"}

PLAIN_VALUES, COMMUNICATION_VALUES, GROUP_VALUES = "plain", "communication", "groups"


class Tensors:
    """Rewrites the values, shapes, strides and types of one side of an operator."""

    def __init__(
        self, names: Pseudonyms, shapes: Shapes, policy: Policy, account: RewriteStats
    ) -> None:
        self._names = names
        self._shapes = shapes
        self._policy = policy
        self._account = account
        self._metadata = MetadataRewriter(names, policy, account)

    def values(self, value: Any, kind: str = PLAIN_VALUES) -> Any:
        """Returns a list of tensors and values; dropped ones become null, so that positions stay.

        Args:
            value: The list.
            kind: OF_COMMUNICATION for `record_param_comms`, OF_GROUPS for the list of process
                groups, else PLAIN_VALUES.
        """
        return [self._one(item, kind, 0) for item in value] if isinstance(value, list) else []

    def arguments(self, values: Any, types: str | None, schema: str) -> Any:
        """Returns the inputs of an operator that is to run again; without a schema only tensors are
        kept.

        Args:
            values: As recorded.
            types: Their types, as JSON.
            schema: The operator's public schema; empty if there is none.
        """
        try:
            operator = parse_schema(schema)
        except UnreadableSchemaError:
            return self.values(values)
        kinds = parse_kinds(types)
        if (
            not isinstance(values, list)
            or len(values) != len(kinds)
            or len(values) > len(operator.arguments)
        ):
            return self.values(values)

        def made(value: Any, kind: Kind, argument: SchemaArgument) -> Any:
            if isinstance(kind, tuple) and isinstance(value, list):
                kinds_inside = kind if len(kind) == len(value) else (None,) * len(value)
                return [
                    made(inner, inner_kind, argument)
                    for inner, inner_kind in zip(value, kinds_inside, strict=True)
                ]
            if (
                isinstance(kind, str)
                or value is None
                or (isinstance(value, str) and not self._is_text(value))
            ):
                return self._one(value, PLAIN_VALUES, 0)
            rewritten = rewrite_argument(value, argument, operator, self._shapes.rounded)
            if rewritten is None:
                self._account.drop("values", encode_json(value))
            else:
                self._account.kept_arguments[_VALUE_TYPES[type(rewritten)]] += 1
            return "" if rewritten is None and isinstance(value, str) else rewritten

        rewritten = [
            made(*argument_fields)
            for argument_fields in zip(values, kinds, operator.arguments, strict=False)
        ]
        if (operator.namespace, operator.name) == ("aten", "arange"):
            return self._count_anew(
                [argument.name for argument in operator.arguments], values, rewritten
            )
        return rewritten

    def _count_anew(self, names: list[str], values: list[Any], rewritten: list[Any]) -> list[Any]:
        """Returns arguments of an `arange` that make as many elements as its rounded output has."""
        given = {
            name: value
            for name, value in zip(names, values, strict=False)
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        start, step = given.get("start", 0), given.get("step", 1)
        if "end" not in given or not step or not math.isfinite((given["end"] - start) / step):
            return rewritten
        count = max(math.ceil((given["end"] - start) / step), 0)
        anew = {"start": 0, "end": self._shapes.rounded(count), "step": 1}
        return [
            type(given[name])(anew[name]) if name in given and name in anew else value
            for name, value in zip(names, rewritten, strict=False)
        ]

    @staticmethod
    def _is_text(item: str) -> bool:
        """Returns whether a text is a value, rather than an empty value or a device."""
        return not (item in _NULL_VALUES or _DEVICE.fullmatch(item) or item == "")

    def _one(self, item: Any, kind: str, depth: int) -> Any:
        if isinstance(item, list):
            if depth >= _MAX_DEPTH:
                return None
            # `[tensor, storage, offset, elements, bytes of each, device]`; old files have no
            # device.
            if (
                len(item) not in (_TENSOR_FIELDS, _TENSOR_FIELDS + 1)
                or not all(
                    isinstance(number, int) and not isinstance(number, bool)
                    for number in item[:_TENSOR_FIELDS]
                )
                or not all(isinstance(device, str) for device in item[_TENSOR_FIELDS:])
            ):
                return [self._one(inner, kind, depth + 1) for inner in item]
            identity, storage, offset, count, width = item[:_TENSOR_FIELDS]
            size = self._shapes.size
            devices = [
                device if _DEVICE.fullmatch(device) else "" for device in item[_TENSOR_FIELDS:]
            ]
            return [identity, storage, size(offset) if offset else 0, size(count), width, *devices]
        if isinstance(item, str):
            if kind == GROUP_VALUES:
                return self._groups(item)
            if not self._is_text(item):
                return item
            if kind == COMMUNICATION_VALUES:
                return item if item in OPERATIONS else self._names.description(item)
            if self._policy.scalars == KEEP and _NUMBER.fullmatch(item):
                return item
            self._account.drop("values", encode_json(item))
            return ""
        if item is None or isinstance(item, bool):
            return item if kind == COMMUNICATION_VALUES or self._policy.scalars == KEEP else None
        if kind == COMMUNICATION_VALUES and isinstance(item, int):
            return self._names.pointer(item) if depth == 0 else self._shapes.size(item)
        if self._policy.scalars != KEEP or not isinstance(item, (int, float)):
            self._account.drop("values")
            return None
        if depth == 0 or self._shapes.kept:
            return item
        return (
            None
            if self._policy.shapes == DROP or not isinstance(item, int)
            else self._shapes.rounded(item)
        )

    def _groups(self, item: str) -> str:
        """Rewrites the JSON list of process groups, which PyTorch writes as a text."""
        try:
            group_entries = json.loads(item)
        except (ValueError, RecursionError):
            self._account.refuse("process groups", item.encode("utf-8", "replace"))
            return "[]"
        groups = []
        for group in group_entries if isinstance(group_entries, list) else []:
            if not isinstance(group, dict):
                continue
            out: dict[str, Any] = {}
            if group.get("pg_name") is not None:
                out["pg_name"] = self._names.group(str(group["pg_name"]))
            if isinstance(group.get("pg_desc"), str):
                out["pg_desc"] = self._names.description(group["pg_desc"])
            if isinstance(group.get("backend_id"), int):
                out["backend_id"] = self._names.pointer(group["backend_id"])
            if (backend := self._metadata.backend(group.get("backend_config"))) is not None:
                out["backend_config"] = backend
            if (ranks := check_rank_list(group.get("ranks"))) is not None:
                out["ranks"] = ranks
            out |= {
                key: group[key]
                for key in ("group_size", "group_count")
                if isinstance(group.get(key), int)
            }
            for key in group.keys() - out.keys():
                self._account.drop(
                    f"process groups.{key}", json.dumps(group[key]).encode(), unknown=True
                )
            groups.append(out)
        return json.dumps(groups)

    def shapes(self, value: Any) -> Any:
        """Returns a list of shapes; if they are dropped, an empty shape for each."""
        if not isinstance(value, list):
            return []
        if self._policy.shapes == DROP:
            return [[] for _ in value]
        encoded = self._shapes.dims(json.dumps(value).encode())
        return [[] for _ in value] if encoded is None else json.loads(encoded)

    def strides(self, value: Any, shapes: Any) -> Any:
        if not isinstance(value, list):
            return []
        encoded = self._shapes.strides(json.dumps(value).encode(), json.dumps(shapes).encode())
        return [[] for _ in value] if encoded is None else json.loads(encoded)

    @staticmethod
    def types(value: Any) -> Any:
        """Returns a list of types, keeping public ones only."""
        if not isinstance(value, list):
            return []
        return [item if isinstance(item, str) and is_type(item) else "" for item in value]

    def splits(self, text: str) -> str:
        """Returns the sizes of the parts of an uneven exchange."""
        encoded = self._shapes.splits(json.dumps(text).encode())
        return "[]" if encoded is None else str(json.loads(encoded))
