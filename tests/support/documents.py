"""Whether documents are as their types say: both ways, so that no key is without a type."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from traceloom.report.views.files import encode


def check_document(document: Any, kind: Any) -> None:
    """The document, written as JSON, is of a type of `traceloom.report.documents`, and has no key but those.

    Raises:
        AssertionError: With the path of the first value of another type, or of the first key that is not in the type.
    """
    text = encode(document)
    try:
        msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise AssertionError(str(error)) from error
    _check_keys(msgspec.json.decode(text), kind, "$")


def _check_keys(value: Any, kind: Any, path: str) -> None:
    """No dictionary of the value, which is of that type, has a key that its type does not name."""
    if is_typeddict(kind):
        types = get_type_hints(kind)
        for key, item in value.items():
            assert key in types, f"{path}.{key}: {kind.__name__} has no such key"
            _check_keys(item, types[key], f"{path}.{key}")
    elif get_origin(kind) is list:
        for number, item in enumerate(value):
            _check_keys(item, get_args(kind)[0], f"{path}[{number}]")
    elif get_origin(kind) is dict:
        for key, item in value.items():
            _check_keys(item, get_args(kind)[1], f"{path}.{key}")
    elif (
        get_origin(kind) is not Literal
    ):  # a union has at most an object and a list: more could not be told apart
        for branch in get_args(kind):
            whole = dict if is_typeddict(branch) else get_origin(branch) or branch
            if whole not in (Any, NoneType) and isinstance(value, whole):
                _check_keys(value, branch, path)
