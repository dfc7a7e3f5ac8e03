"""What calls of one op have in common, looked up once: most nodes of a trace are of few ops and types."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from traceloom.replay.allowed import Refusal, refusal
from traceloom.replay.schema import OperatorSchema, parse_schema
from traceloom.replay.values import Kind, kinds_of, slots_of, unknown_type

NUMBERS = frozenset({"other", "exponent"})
"""Arguments for which programs write plain numbers."""


class OpKind(NamedTuple):
    """What calls of one op have in common that take and give values of the same types.

    Attributes:
        schema: Of the op.
        refusal: Why it must not be run.
        has_numbers: Whether programs write numbers for some of its tensors.
        strange: A type of a tensor that PyTorch does not have.
        kinds: Of the values that it takes.
        plain: Which of these may hold more than a tensor.
        slots: Of the values that it gives: whether each is a tensor.
    """

    schema: OperatorSchema
    refusal: Refusal | None
    has_numbers: bool
    strange: str | None
    kinds: tuple[Kind, ...]
    plain: tuple[bool, ...]
    slots: tuple[bool, ...]


@lru_cache(maxsize=65536)
def op_kind(text: str, types: str | None, output_types: str | None) -> OpKind:
    """What an op's schema and the types of its values say.

    Raises:
        UnreadableSchemaError: The text is no schema.
    """
    schema, kinds = parse_schema(text), kinds_of(types)
    return OpKind(
        schema,
        refusal(schema),
        any(argument.name in NUMBERS for argument in schema.arguments),
        unknown_type(types) or unknown_type(output_types),
        kinds,
        tuple(not isinstance(kind, str) for kind in kinds),
        slots_of(output_types),
    )
