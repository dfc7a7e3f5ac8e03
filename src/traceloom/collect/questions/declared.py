"""How a question is declared: what it takes, what it gives column by column, and how it is worked out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec
import polars as pl
from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer
from traceloom.collect.questions.asking import Asking, Paged
from traceloom.collect.questions.frames import QuestionFrames
from traceloom.model.columns import Column
from traceloom.model.result import Result

MOST_ROWS = 5_000
"""Of a table in an answer, unless it is paged."""

_OF_UNIT: Mapping[str, Any] = {
    **dict.fromkeys(("text", "name"), str | None),
    **dict.fromkeys(("count", "bytes"), int | None),
    # a mean time is no whole number of ns
    "time": int | float | None,
}
_DIMENSION: Any = Annotated[str | msgspec.UnsetType, Meta(description="its value, where it is asked for")]


@dataclass(frozen=True)
class AnswerTable:
    """A table of an answer.

    Attributes:
        meaning: What a row is, and how rows are ordered.
        columns: Their declarations.
        types: The types of columns that their unit does not tell.
        divided: Dimensions that rows have as well, those that are asked for, each as a text.
    """

    meaning: str
    columns: Mapping[str, Column]
    types: Mapping[str, Any] = field(default_factory=dict)
    divided: tuple[str, ...] = ()

    def row(self, name: str) -> Any:
        """The structure of a row, called so; dimensions that are not asked for are not in it."""
        fields: list[Any] = [(key, _DIMENSION, msgspec.UNSET) for key in self.divided]
        fields += [(key, _type(column, self.types.get(key))) for key, column in self.columns.items()]
        return msgspec.defstruct(name, fields, bases=(HttpAnswer,), frozen=True, kw_only=True, module=__name__)


def _type(column: Column, kind: Any = None) -> Any:
    unknown = f"; null: {column.unknown}" if column.unknown else ""
    return Annotated[kind or _OF_UNIT.get(column.unit, float | None), Meta(description=column.meaning + unknown)]


@dataclass(frozen=True)
class Question:
    """A question to the tables.

    Attributes:
        name: Of its verb.
        summary: What it answers, as a fragment.
        parameters: What it takes.
        tables: Field of the result -> the table that it is; the first is the one that is paged.
        facts: Other fields of the result.
        reads: The tables that it reads.
        compute: How it is worked out.
        route: Below `/api/v1/`; "": its name.
    """

    name: str
    summary: str
    parameters: type[Asking]
    tables: Mapping[str, AnswerTable]
    facts: Mapping[str, Column]
    reads: tuple[str, ...]
    compute: Callable[[QuestionFrames, Any], Result]
    route: str = ""

    @property
    def path(self) -> str:
        """Of its route."""
        return f"/api/v1/{self.route or self.name}"

    @cached_property
    def answer(self) -> type[msgspec.Struct]:
        """The structure of its answer, with a description of each field."""
        title = "".join(word.title() for word in self.name.split("-"))
        fields: list[tuple[str, Any]] = [
            *((name, Annotated[int, Meta(description=meaning)]) for name, meaning in _TIMES.items()),
            *((name, _type(column, _FACT_TYPES.get(name))) for name, column in self.facts.items()),
            *(
                (name, Annotated[list[table.row(f"{title}{name.title()}")], Meta(description=table.meaning)])  # type: ignore[misc]
                for name, table in self.tables.items()
            ),
            ("more", Annotated[bool, Meta(description="whether there are rows after these")]),
        ]
        text = f"{self.summary[0].upper()}{self.summary[1:]}."
        return msgspec.defstruct(
            f"{title}Answer", fields, bases=(HttpAnswer,), frozen=True, kw_only=True, namespace={"__doc__": text},
            module=__name__,
        )  # fmt: skip

    def ask(self, frames: QuestionFrames, asked: Asking) -> msgspec.Struct:
        """Work it out, and keep of each table the rows that are asked for.

        Raises:
            UsageError: As of the function that works it out.
        """
        result = self.compute(frames, asked)
        answer: dict[str, object] = {"since_ns": frames.period.since_ns, "until_ns": frames.period.until_ns}
        for name in self.tables:
            answer[name] = getattr(result, name).head(MOST_ROWS).to_dicts()
        first: pl.DataFrame = getattr(result, next(iter(self.tables)))
        skip, top = (asked.skip, asked.top) if isinstance(asked, Paged) else (0, MOST_ROWS)
        answer[next(iter(self.tables))] = first[skip : skip + top].to_dicts()
        more = first.height > skip + top
        facts = {name: getattr(result, name) for name in self.facts}
        return msgspec.convert(answer | facts | {"more": more}, self.answer)


_TIMES = {"since_ns": "begin of what was looked at, Unix time", "until_ns": "its end"}
_FACT_TYPES: Mapping[str, Any] = {"by": tuple[str, ...] | str}
