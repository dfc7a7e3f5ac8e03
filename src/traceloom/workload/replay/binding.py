"""A recorded call -> PyTorch's function.

A call names an op by its recorded schema. The op of this PyTorch may have another one: arguments are matched by name,
those that it does not need are left to their defaults, and what cannot be matched is said. Functions are PyTorch's
builtins of one overload: of all ways to call an op from Python that cannot end in another overload, the fastest.
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
    parse_schema,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Twin(NamedTuple):
    """The op that is called instead.

    Attributes:
        name: The op with its overload.
        renamed: Its arguments that the recorded op has by another name; the others are of equal names.
        constants: Its arguments that the recorded op does not have.
    """

    name: str
    renamed: Mapping[str, str] = {}
    constants: Mapping[str, Any] = {}

    def values(self, recorded: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
        """Values of its arguments, which have these names, from those of the recorded op."""
        named = {name: recorded[old] for name in names if (old := self.renamed.get(name, name)) in recorded}
        return {**named, **self.constants}


PINNING = ("aten::pin_memory", "aten::_pin_memory")
_ANYWHERE = {
    # They take whatever geometry they are given; their twins see that it lies within the storage.
    "aten::_reshape_alias": Twin("aten::as_strided"),
    "aten::_reshape_alias_copy": Twin("aten::as_strided_copy"),
    # A storage cannot be handed over as such: the twins take a tensor and use its storage.
    "aten::set_.source_Storage": Twin("aten::set_.source_Tensor"),
    "aten::set_.source_Storage_storage_offset": Twin("aten::set_.source_Tensor_storage_offset"),
    # Where everything is on one device, a copy into pinned memory is a copy.
    **dict.fromkeys(PINNING, Twin("aten::clone")),
    # A replay's tensors may be views, which cannot be detached in place.
    "aten::detach_": Twin("aten::detach"),
}
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_BATCH_NORM = Twin("aten::native_batch_norm", {"momentum": "exponential_average_factor", "eps": "epsilon"})
_BATCH_NORM_BACKWARD = Twin(
    "aten::native_batch_norm_backward",
    {"grad_out": "grad_output", "save_invstd": "save_var", "eps": "epsilon"},
    {"train": True, "output_mask": [True, True, True]},
)
_CONVOLUTION = Twin("aten::convolution", {"input": "self"}, {"transposed": False, "output_padding": [0]})
# What libraries of GPUs do, and the CPU by other ops. Dropout within attention does not exist there.
_ON_CPU = {
    "aten::cudnn_batch_norm": _BATCH_NORM,
    "aten::miopen_batch_norm": _BATCH_NORM,
    "aten::cudnn_batch_norm_backward": _BATCH_NORM_BACKWARD,
    "aten::miopen_batch_norm_backward": _BATCH_NORM_BACKWARD,
    "aten::cudnn_convolution": _CONVOLUTION._replace(constants={"bias": None, **_CONVOLUTION.constants}),
    "aten::miopen_convolution": _CONVOLUTION,
    "aten::_scaled_dot_product_flash_attention": Twin(_ATTENTION, {}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_efficient_attention": Twin(_ATTENTION, {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_cudnn_attention": Twin(_ATTENTION, {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_flash_attention_backward": Twin(_ATTENTION + "_backward", {}, {"dropout_p": 0.0}),
    "aten::_scaled_dot_product_cudnn_attention_backward": Twin(
        _ATTENTION + "_backward", {"attn_mask": "attn_bias"}, {"dropout_p": 0.0}
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": Twin(
        _ATTENTION + "_backward", {"grad_out": "grad_out_", "attn_mask": "attn_bias"}, {"dropout_p": 0.0}
    ),
}


def twin_of(name: str, device: str) -> Twin | None:
    """The op to call for another on a kind of device (`cpu`, `cuda`, `meta`); None: itself."""
    return _ANYWHERE.get(name) or (_ON_CPU.get(name) if device == "cpu" else None)


Path = tuple[int | str, ...]
KEEPS_MEMORY = "aten::record_stream"
"""An op whose stream no trace tells: it is run for the stream on which the replay has the next op on that memory."""


class Unbindable(Exception):  # noqa: N818  (it is no error: the op is left out, with this as the reason)
    """An op of the plan that this PyTorch cannot be made to run.

    Attributes:
        slug: `unknown-op`, `custom-op`, `refused-op`, `unreadable-schema`, `other-schema` or `unknown-argument`.
        text: What is wrong.
    """

    def __init__(self, slug: str, text: str) -> None:
        super().__init__(text)
        self.slug = slug
        self.text = text


def need_torch() -> None:
    """See that PyTorch is there.

    Raises:
        InputError: slug `no-torch`.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise InputError("a replay needs torch", slug="no-torch", hint="pip install 'traceloom[record]'") from error


@dataclass(slots=True)
class Bound:
    """A call as Python makes it: `function(*arguments, **keywords)`, once the tensors stand in their places.

    Attributes:
        function: PyTorch's builtin of one overload.
        arguments: By position; None where a tensor goes.
        keywords: By name.
        places: Where tensors go: a path (position or name, then positions in lists) and the number of the input.
    """

    function: Callable[..., Any]
    arguments: list[Any] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    places: list[tuple[Path, int]] = field(default_factory=list)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Call it with the op's inputs."""
        arguments = [_copied(value) for value in self.arguments]
        keywords = {name: _copied(value) for name, value in self.keywords.items()}
        for path, number in self.places:
            holder: Any = keywords if isinstance(path[0], str) else arguments
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = inputs[number]
        return self.function(*arguments, **keywords)


def bind(
    schema: str,
    arguments: str,
    device: torch.device | str = "cpu",
    *,
    keeps_host: bool = False,
    recorded: str | None = None,
    further: frozenset[str] = frozenset(),
) -> Bound:
    """Find the function of a call, and its arguments.

    Args:
        schema: The op, as recorded.
        arguments: Values of its arguments: JSON as `traceloom.workload.replay.plan` has it.
        device: Where everything goes, whatever was recorded.
        keeps_host: Whether what was recorded on the host's processors stays there nevertheless.
        recorded: Version of PyTorch that recorded it.
        further: Namespaces that are allowed besides.

    Raises:
        Unbindable: The op is unknown here, is not allowed, or takes what cannot be given.
    """
    import torch

    try:
        then = parse_schema(schema)
    except UnreadableSchemaError as error:
        raise Unbindable("unreadable-schema", str(error)) from None
    device = torch.device(device)
    if then.qualified == KEEPS_MEMORY:
        if device.type == "cpu":
            text = "it keeps memory of a GPU for a stream, and the replay runs on the CPU, where there is nothing to do"
            raise Unbindable("no-gpu", text)
        return Bound(_keep_for_current_stream, [None], places=[((0,), 0)])
    if reason := refusal(then, further):
        raise Unbindable(*reason)
    twin = None if keeps_host and then.qualified in PINNING else twin_of(then.qualified, device.type)
    function, now = _here(then.qualified if twin is None else twin.name)
    if function is None or now is None:
        version = f", and PyTorch {recorded} recorded it" if recorded else ""
        raise Unbindable("unknown-op", f"PyTorch {torch.__version__} here has no {then.qualified}{version}: {schema}")
    if reason := refusal(now, further):  # a trace may write another schema than the op has
        raise Unbindable(*reason)
    try:
        recorded_values: list[Any] = msgspec.json.decode(arguments, type=list)
    except msgspec.DecodeError as error:
        raise Unbindable("unknown-argument", f"the arguments of {then.qualified} are no list: {error}") from None
    values = dict(zip((argument.name for argument in then.arguments), recorded_values, strict=False))
    if twin is not None:
        values = twin.values(values, [argument.name for argument in now.arguments])
    elif then.text != now.text:
        values = _by_name_here(values, then, now, recorded)
    bound, needed = Bound(function), 0
    for argument in now.arguments:
        if argument.name not in values and not argument.has_default:
            raise _other_schema(f"{argument.name!r} has no value", now, then, recorded)
        path = (argument.name,) if argument.keyword_only else (len(bound.arguments),)
        tensors = len(bound.places)
        value = argument.default
        if argument.name in values:
            value = _value(values[argument.name], argument, path, device, bound.places)
            if keeps_host and values[argument.name] == {"device": "cpu"}:
                value = torch.device("cpu")
        # Each argument that need not be handed over is time saved.
        left_out = len(bound.places) == tensors and argument.has_default and repr(value) == repr(argument.default)
        if not argument.keyword_only:
            bound.arguments.append(value)
            needed = needed if left_out else len(bound.arguments)
        elif not left_out:
            bound.keywords[argument.name] = value
    del bound.arguments[needed:]
    made_of_nothing = not bound.places and "device" in values  # so it is not where an input is
    if made_of_nothing and device.type != "cpu" and not keeps_host:
        bound.keywords["device"] = device
    return bound


def _keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Let the allocator not give the memory of a tensor away while the stream that is current works on it."""
    import torch

    tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


@lru_cache(maxsize=4096)
def _here(qualified: str) -> tuple[Callable[..., Any] | None, OperatorSchema | None]:
    """PyTorch's builtin of an overload, and its schema; None where this PyTorch has none."""
    import torch
    from torch._ops import OpOverload

    namespace, _, name = qualified.partition("::")
    name, _, overload = name.partition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        return None, None
    if not isinstance(op, OpOverload):  # another attribute of PyTorch's object, which a trace named
        return None, None
    return op._op, parse_schema(str(op._schema))  # noqa: SLF001  (the public call looks for modes each time: 0.2 µs)


def _by_name_here(
    values: dict[str, Any], then: OperatorSchema, now: OperatorSchema, recorded: str | None
) -> dict[str, Any]:
    """The values by the names that this PyTorch gives to the arguments: same names, or another at the same position."""
    here, there = ({argument.name for argument in schema.arguments} for schema in (now, then))
    out = {}
    for at, argument in enumerate(then.arguments[: len(values)]):
        value = values[argument.name]
        if argument.name in here:
            out[argument.name] = value
            continue
        other = now.arguments[at] if at < len(now.arguments) else None
        # It may be another by a new name: of one type, but for integers that became symbols.
        types = {each.type.leaf.removeprefix("Sym").lower() for each in (argument, other) if each is not None}
        if other is not None and len(types) == 1 and other.name not in there:
            out[other.name] = value
        elif not argument.has_default or value != argument.default:
            raise _other_schema(f"it takes no {argument.name!r}", now, then, recorded)
    return out


def _other_schema(what: str, now: OperatorSchema, then: OperatorSchema, recorded: str | None) -> Unbindable:
    import torch

    text = f"in PyTorch {torch.__version__} here {now.qualified} is another: {what}"
    return Unbindable("other-schema", f"{text}; here {now.text}; in PyTorch {recorded or '(unknown)'} {then.text}")


def _value(
    value: Any, argument: SchemaArgument, path: Path, device: torch.device, places: list[tuple[Path, int]]
) -> Any:
    """A value as PyTorch takes it; tensors are noted in `places`."""
    import torch

    if isinstance(value, list):
        return [_value(part, argument, (*path, at), device, places) for at, part in enumerate(value)]
    if argument.name in NEVER_GIVEN:
        return None if argument.type.optional else False
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()), ("", None))
    if kind in {"tensor", "storage"} and isinstance(content, int):
        places.append((path, content))
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
    raise Unbindable("unknown-argument", f"{argument.name!r} cannot be given: it was recorded as {kind} {content!r}")


def _copied(value: Any) -> Any:
    return [_copied(part) for part in value] if isinstance(value, list) else value
