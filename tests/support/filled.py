"""Structures from a few values: what they must have besides is empty."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

T = TypeVar("T")


def filled(kind: type[T], given: Any) -> T:
    """A structure, or a list of them, with the given values; others that it needs are 0, empty or None."""
    return msgspec.convert(_filled(kind, given), kind)


def _filled(kind: Any, given: Any) -> Any:
    if get_origin(kind) in (Union, UnionType) and given is not None:
        kind = next(branch for branch in get_args(kind) if branch is not type(None))
    if get_origin(kind) in (list, tuple) and get_args(kind):
        return [_filled(get_args(kind)[0], each) for each in given]
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return given
    of = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    assert given.keys() <= of.keys(), f"{kind.__name__} has no {given.keys() - of.keys()}"
    empty = {
        name: _empty(field.type)
        for name, field in of.items()
        if field.required and name not in given
    }
    return empty | {name: _filled(of[name].type, value) for name, value in given.items()}


def _empty(kind: Any) -> Any:
    if type(None) in get_args(kind):
        return None
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _filled(kind, {})
    return (get_origin(kind) or kind)()
