"""Refusals of texts: every pattern that a route or a file has stands in words, with an example that it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "starlette"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from traceloom.agent.config import Config  # noqa: E402
from traceloom.agent.fleet_link import protocol  # noqa: E402
from traceloom.fleet.api import TokenBody  # noqa: E402
from traceloom.fleet.questions.declaration import GroupedQuery  # noqa: E402
from traceloom.fleet.rules import FleetRules  # noqa: E402
from traceloom.fleet.service.service import ROUTES  # noqa: E402
from traceloom.server.problem import make_bad_request  # noqa: E402


def patterns(kind: Any, seen: set[Any]) -> Iterator[str]:
    """Every pattern of a structure, and of what it holds."""
    if kind in seen:
        return
    seen.add(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for hint in get_type_hints(kind, include_extras=True).values():
            yield from patterns(hint, seen)
    for part in (*getattr(kind, "__metadata__", ()), *get_args(kind)):
        if isinstance(part, msgspec.Meta):
            if part.pattern is not None:
                yield part.pattern
        else:
            try:
                yield from patterns(part, seen)
            except TypeError:
                continue  # a value of a Literal


def every_pattern() -> list[str]:
    structures: list[Any] = [Config, FleetRules, *protocol.FleetMessage.__subclasses__()]
    structures += [
        kind for route in ROUTES for kind in (route.body, route.parameters) if kind is not None
    ]
    seen: set[Any] = set()
    return sorted({pattern for kind in structures for pattern in patterns(kind, seen)})


@pytest.mark.parametrize("pattern", every_pattern())
def test_what_a_pattern_allows_is_said_with_an_example_that_it_takes(pattern: str) -> None:
    kind = msgspec.defstruct("Sent", [("field", Annotated[str, msgspec.Meta(pattern=pattern)])])
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"field": "\x00?!\n"}, kind)
    said = str(make_bad_request(str(refused.value)))
    assert said.startswith("the request is wrong: `field`: expected ")
    assert "regex" not in said
    assert "[" not in said
    example = re.search(r", as `([^`]+)`", said)
    if example is not None and example[1] != "sha256sum":
        assert msgspec.convert({"field": example[1]}, kind).field == example[1]  # type: ignore[attr-defined]


def test_there_are_patterns_to_be_said() -> None:
    assert len(every_pattern()) >= 6


@pytest.mark.parametrize(
    ("kind", "sent", "said"),
    [
        (
            TokenBody,
            {"name": "a b", "role": "admin"},
            "`name`: expected at most 80 letters, digits and `._@-`, beginning with a letter or digit, as `ci-bot`",
        ),
        (TokenBody, {"name": "a", "role": "boss"}, "`role`: invalid enum value 'boss'"),
        (TokenBody, {"role": "admin"}, "object missing required field `name`"),
        (
            GroupedQuery,
            {"by": "Kind"},
            "`by`: expected one to six names in small letters with commas between them, as `division,user`",
        ),
        (GroupedQuery, {"kernel": "x" * 501}, "`kernel`: expected a text of at most 500 signs"),
    ],
)
def test_where_it_is_about_comes_first(
    kind: type[msgspec.Struct], sent: dict[str, str], said: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(sent, kind)
    assert str(make_bad_request(str(refused.value))) == f"the request is wrong: {said}"
