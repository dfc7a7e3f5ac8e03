"""Binding a recorded call to PyTorch's function.

A call names an op by its recorded schema. The op of this PyTorch may have another one: arguments
are matched by name, those that are not needed keep their defaults, and mismatches are reported.
Functions are PyTorch's builtins of one overload: the fastest way to call an op from Python that
cannot end up in another overload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from traceloom.errors import InputError
from traceloom.workload.replay.schema import (
    NEVER_GIVEN,
    OperatorSchema,
    SchemaArgument,
    UnreadableSchemaError,
    find_refusal,
    parse_schema,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class ReplacementOp(NamedTuple):
    """An op that is called instead of a recorded one.

    Attributes:
        name: The op with its overload.
        recorded_names: Its arguments that have another name in the recorded op -> that name.
        constants: Values of arguments that the recorded op does not have.
    """

    name: str
    recorded_names: Mapping[str, str] = {}
    constants: Mapping[str, Any] = {}

    def values(self, recorded: Mapping[str, Any], argument_names: list[str]) -> dict[str, Any]:
        values_by_name = {
            name: recorded[old]
            for name in argument_names
            if (old := self.recorded_names.get(name, name)) in recorded
        }
        return {**values_by_name, **self.constants}


PINNING_OPS = ("aten::pin_memory", "aten::_pin_memory")
_REPLACEMENTS = {
    # They accept any geometry; their replacements check that it lies within the storage.
    "aten::_reshape_alias": ReplacementOp("aten::as_strided"),
    "aten::_reshape_alias_copy": ReplacementOp("aten::as_strided_copy"),
    # A storage cannot be passed as such: the replacements take a tensor and use its storage.
    "aten::set_.source_Storage": ReplacementOp("aten::set_.source_Tensor"),
    "aten::set_.source_Storage_storage_offset": ReplacementOp(
        "aten::set_.source_Tensor_storage_offset"
    ),
    # If everything is on one device, a copy into pinned memory is just a copy.
    **dict.fromkeys(PINNING_OPS, ReplacementOp("aten::clone")),
    # A replay's tensors may be views, which cannot be detached in place.
    "aten::detach_": ReplacementOp("aten::detach"),
}
_CPU_FLASH_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_NATIVE_BATCH_NORM = ReplacementOp(
    "aten::native_batch_norm", {"momentum": "exponential_average_factor", "eps": "epsilon"}
)
_NATIVE_BATCH_NORM_BACKWARD = ReplacementOp(
    "aten::native_batch_norm_backward",
    {"grad_out": "grad_output", "save_invstd": "save_var", "eps": "epsilon"},
    {"train": True, "output_mask": [True, True, True]},
)
_GENERIC_CONVOLUTION = ReplacementOp(
    "aten::convolution", {"input": "self"}, {"transposed": False, "output_padding": [0]}
)
# Ops of GPU libraries for which the CPU has others. Dropout within attention does not exist
# there.
_CPU_REPLACEMENTS = {
    "aten::cudnn_batch_norm": _NATIVE_BATCH_NORM,
    "aten::miopen_batch_norm": _NATIVE_BATCH_NORM,
    "aten::cudnn_batch_norm_backward": _NATIVE_BATCH_NORM_BACKWARD,
    "aten::miopen_batch_norm_backward": _NATIVE_BATCH_NORM_BACKWARD,
    "aten::cudnn_convolution": _GENERIC_CONVOLUTION._replace(
        constants={"bias": None, **_GENERIC_CONVOLUTION.constants}
    ),
    "aten::miopen_convolution": _GENERIC_CONVOLUTION,
    "aten::_scaled_dot_product_flash_attention": ReplacementOp(
        _CPU_FLASH_ATTENTION, {}, {"dropout_p": 0.0}
    ),
    "aten::_scaled_dot_product_efficient_attention": ReplacementOp(
        _CPU_FLASH_ATTENTION, {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}
    ),
    "aten::_scaled_dot_product_cudnn_attention": ReplacementOp(
        _CPU_FLASH_ATTENTION, {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}
    ),
    "aten::_scaled_dot_product_flash_attention_backward": ReplacementOp(
        _CPU_FLASH_ATTENTION + "_backward", {}, {"dropout_p": 0.0}
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": ReplacementOp(
        _CPU_FLASH_ATTENTION + "_backward", {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": ReplacementOp(
        _CPU_FLASH_ATTENTION + "_backward",
        {"grad_out": "grad_out_", "attn_mask": "attn_bias"},
        {"dropout_p": 0.0},
    ),
}


def find_replacement(name: str, device: str) -> ReplacementOp | None:
    """Returns the op to call instead of another on a kind of device (`cpu`, `cuda`, `meta`); None
    for the op itself.
    """
    return _REPLACEMENTS.get(name) or (_CPU_REPLACEMENTS.get(name) if device == "cpu" else None)


ArgumentPath = tuple[int | str, ...]
RECORD_STREAM = "aten::record_stream"
"""An op whose stream is in no trace: it is run for the stream of the replay's next op on that
memory.
"""


class BindError(Exception):
    """An op of the plan that this PyTorch cannot run.

    Attributes:
        slug: `unknown-op`, `custom-op`, `refused-op`, `unreadable-schema`, `other-schema` or
            `unknown-argument`.
        text: What is wrong.
    """

    def __init__(self, slug: str, text: str) -> None:
        super().__init__(text)
        self.slug = slug
        self.text = text


def require_torch() -> None:
    """Checks that PyTorch is installed.

    Raises:
        InputError: slug `no-torch`.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise InputError(
            "a replay needs torch", slug="no-torch", hint="pip install 'traceloom[record]'"
        ) from error


@dataclass(slots=True)
class BoundCall:
    """A Python call: `function(*arguments, **keywords)`, once the tensors are inserted.

    Attributes:
        function: PyTorch's builtin of one overload.
        arguments: By position; None in place of a tensor.
        keywords: By name.
        places: Where tensors go: a path (position or name, then positions in lists) and the number
            of the input.
    """

    function: Callable[..., Any]
    arguments: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    places: list[tuple[ArgumentPath, int]] = field(default_factory=list)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Calls the function with the op's inputs."""
        arguments = [_copy_lists(value) for value in self.arguments]
        keywords = {name: _copy_lists(value) for name, value in self.keywords.items()}
        for path, input_index in self.places:
            container: Any = keywords if isinstance(path[0], str) else arguments
            for step in path[:-1]:
                container = container[step]
            container[path[-1]] = inputs[input_index]
        return self.function(*arguments, **keywords)


def bind_call(
    schema: str,
    arguments: str,
    device: torch.device | str = "cpu",
    *,
    keeps_host: bool = False,
    recorded_torch: str | None = None,
    allowed_namespaces: frozenset[str] = frozenset(),
) -> BoundCall:
    """Finds the function of a call, and converts its arguments.

    Args:
        schema: The op, as recorded.
        arguments: Values of its arguments: JSON as in `traceloom.workload.replay.plan`.
        device: Device of all tensors, whatever was recorded.
        keeps_host: Whether tensors recorded on the CPU nevertheless stay there.
        recorded_torch: Version of PyTorch that recorded it.
        allowed_namespaces: Additional allowed namespaces.

    Raises:
        BindError: The op is unknown here, is not allowed, or takes arguments that cannot be passed.
    """
    import torch

    try:
        recorded_schema = parse_schema(schema)
    except UnreadableSchemaError as error:
        raise BindError("unreadable-schema", str(error)) from None
    device = torch.device(device)
    if recorded_schema.qualified == RECORD_STREAM:
        if device.type == "cpu":
            raise BindError(
                "no-gpu",
                "it keeps memory of a GPU for a stream, and the replay runs on the CPU, where there is nothing to do",
            )
        return BoundCall(_record_current_stream, [None], places=[((0,), 0)])
    if reason := find_refusal(recorded_schema, allowed_namespaces):
        raise BindError(*reason)
    replacement = (
        None
        if keeps_host and recorded_schema.qualified in PINNING_OPS
        else find_replacement(recorded_schema.qualified, device.type)
    )
    function, current_schema = _resolve_overload(
        recorded_schema.qualified if replacement is None else replacement.name
    )
    if function is None or current_schema is None:
        version = f", and PyTorch {recorded_torch} recorded it" if recorded_torch else ""
        raise BindError(
            "unknown-op",
            f"PyTorch {torch.__version__} here has no {recorded_schema.qualified}{version}: {schema}",
        )
    if reason := find_refusal(
        current_schema, allowed_namespaces
    ):  # the schema in a trace may differ from the op's
        raise BindError(*reason)
    try:
        recorded_values: list[Any] = msgspec.json.decode(arguments, type=list)
    except msgspec.DecodeError as error:
        raise BindError(
            "unknown-argument", f"the arguments of {recorded_schema.qualified} are no list: {error}"
        ) from None
    values = dict(
        zip(
            (argument.name for argument in recorded_schema.arguments), recorded_values, strict=False
        )
    )
    if replacement is not None:
        values = replacement.values(
            values, [argument.name for argument in current_schema.arguments]
        )
    elif recorded_schema.text != current_schema.text:
        values = _map_argument_names(values, recorded_schema, current_schema, recorded_torch)
    bound, positional_count = BoundCall(function), 0
    for argument in current_schema.arguments:
        if argument.name not in values and not argument.has_default:
            raise _make_schema_error(
                f"{argument.name!r} has no value", current_schema, recorded_schema, recorded_torch
            )
        path = (argument.name,) if argument.keyword_only else (len(bound.arguments),)
        slot_count_before = len(bound.places)
        value = argument.default
        if argument.name in values:
            value = _convert_value(values[argument.name], argument, path, device, bound.places)
            if keeps_host and values[argument.name] == {"device": "cpu"}:
                value = torch.device("cpu")
        # Each argument that need not be passed saves time.
        is_omittable = (
            len(bound.places) == slot_count_before
            and argument.has_default
            and repr(value) == repr(argument.default)
        )
        if not argument.keyword_only:
            bound.arguments.append(value)
            positional_count = positional_count if is_omittable else len(bound.arguments)
        elif not is_omittable:
            bound.keywords[argument.name] = value
    del bound.arguments[positional_count:]
    is_factory_call = (
        not bound.places and "device" in values
    )  # so the device does not follow from an input
    if is_factory_call and device.type != "cpu" and not keeps_host:
        bound.keywords["device"] = device
    return bound


def _record_current_stream(tensor: torch.Tensor) -> None:
    """Keeps the allocator from reusing the memory of a tensor while the current stream works on
    it.
    """
    import torch

    tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


@lru_cache(maxsize=4096)
def _resolve_overload(qualified: str) -> tuple[Callable[..., Any] | None, OperatorSchema | None]:
    """Returns PyTorch's builtin of an overload, and its schema; None if this PyTorch has none."""
    import torch
    from torch._ops import OpOverload

    namespace, _, name = qualified.partition("::")
    name, _, overload = name.partition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        return None, None
    if not isinstance(op, OpOverload):  # another attribute of PyTorch's object
        return None, None
    return op._op, parse_schema(str(op._schema))  # noqa: SLF001  (the public call looks for modes each time: 0.2 µs)


def _map_argument_names(
    values: dict[str, Any],
    recorded_schema: OperatorSchema,
    current_schema: OperatorSchema,
    recorded_torch: str | None,
) -> dict[str, Any]:
    """Returns the values by the argument names of this PyTorch: equal names, or renamed ones at the
    same position.
    """
    current_names, recorded_names = (
        {argument.name for argument in schema.arguments}
        for schema in (current_schema, recorded_schema)
    )
    mapped = {}
    for position, argument in enumerate(recorded_schema.arguments[: len(values)]):
        value = values[argument.name]
        if argument.name in current_names:
            mapped[argument.name] = value
            continue
        candidate = (
            current_schema.arguments[position] if position < len(current_schema.arguments) else None
        )
        # It may be a renamed one of the same type, apart from integers that became symbols.
        types = {
            candidate.type.leaf.removeprefix("Sym").lower()
            for candidate in (argument, candidate)
            if candidate is not None
        }
        if candidate is not None and len(types) == 1 and candidate.name not in recorded_names:
            mapped[candidate.name] = value
        elif not argument.has_default or value != argument.default:
            raise _make_schema_error(
                f"it takes no {argument.name!r}", current_schema, recorded_schema, recorded_torch
            )
    return mapped


def _make_schema_error(
    problem: str,
    current_schema: OperatorSchema,
    recorded_schema: OperatorSchema,
    recorded_torch: str | None,
) -> BindError:
    import torch

    text = f"in PyTorch {torch.__version__} here {current_schema.qualified} is another: {problem}"
    return BindError(
        "other-schema",
        f"{text}; here {current_schema.text}; in PyTorch {recorded_torch or '(unknown)'} {recorded_schema.text}",
    )


def _convert_value(
    value: Any,
    argument: SchemaArgument,
    path: ArgumentPath,
    device: torch.device,
    tensor_slots: list[tuple[ArgumentPath, int]],
) -> Any:
    """Converts a value for PyTorch; tensors are added to `tensor_slots`."""
    import torch

    if isinstance(value, list):
        return [
            _convert_value(part, argument, (*path, index), device, tensor_slots)
            for index, part in enumerate(value)
        ]
    if argument.name in NEVER_GIVEN:
        return None if argument.type.optional else False
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()), ("", None))
    if kind in {"tensor", "storage"} and isinstance(content, int):
        tensor_slots.append((path, content))
        return None
    if kind == "device":
        return device
    if kind == "generator":
        return None
    if kind == "float" and content in {"inf", "-inf", "nan"}:
        return float(content)
    if kind == "complex" and isinstance(content, list):
        return complex(*content)
    if kind in {"dtype", "layout", "memory_format"}:
        enum = getattr(torch, str(content), None)
        if isinstance(enum, torch.dtype | torch.layout | torch.memory_format):
            return enum
    raise BindError(
        "unknown-argument",
        f"{argument.name!r} cannot be given: it was recorded as {kind} {content!r}",
    )


def _copy_lists(value: Any) -> Any:
    return [_copy_lists(part) for part in value] if isinstance(value, list) else value
