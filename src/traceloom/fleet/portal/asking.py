"""Questions on pages: what the address asks, the answer of the route, and the form by which one
asks another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import msgspec
from htpy import Node, a, button, code, details, div, form, label, option, p, select, span, summary
from htpy import input as input_

from traceloom.fleet.portal.page_request import PageRequest, PageUrl
from traceloom.fleet.portal.tables import PageColumn, PageRow, convert_column
from traceloom.fleet.questions.catalogue import QUESTION
from traceloom.fleet.questions.declaration import Question

RANGES = {
    "1d": "last day",
    "7d": "last 7 days",
    "30d": "last 30 days",
    "90d": "last 90 days",
    "365d": "last year",
}
FILTERS = {
    "job": "Job",
    "user": "User",
    "division": "Division",
    "product": "Product",
    "model": "Model",
    "framework": "Framework",
    "host": "Host",
    "device_model": "Device",
}
"""Parameter of all questions -> how it is called."""

MAX_FILTER_CHARS = 500
"""Of a filter, as questions take it."""

_COLUMN_KINDS = {
    **dict.fromkeys(("since_ns", "last_before_ns", "start_ns", "time_ns"), "instant"),
    **dict.fromkeys(("job", "capture", "example"), "name"),
}
"""How columns stand on pages, where it is not by their unit: instants are no durations."""


@dataclass(frozen=True)
class QueryResult:
    """An answer, and the address that asked for it.

    Attributes:
        question: The question.
        address: Of the page.
        facts: Fields of the answer that are no tables.
        tables: Name -> rows.
    """

    question: Question
    address: PageUrl
    facts: Mapping[str, Any]
    tables: Mapping[str, list[Mapping[str, Any]]]

    def fact(self, name: str) -> Any:
        """A field of the answer."""
        return self.facts[name]

    def columns(
        self,
        table: str,
        names: Iterable[str],
        links: Mapping[str, Callable[[PageRow], str]] | None = None,
    ) -> list[PageColumn]:
        """Columns of a table of the answer, as the question declares them, with where they lead."""
        table_columns = self.question.tables[table].columns
        columns = [
            convert_column(name, table_columns[name], (links or {}).get(name)) for name in names
        ]
        return [
            replace(column, kind=_COLUMN_KINDS.get(column.key, column.kind)) for column in columns
        ]


async def fetch_answer(visit: PageRequest, name: str, **fixed: str) -> QueryResult:
    """Ask the service what the address of the page asks.

    Args:
        visit: Of the page.
        name: Of the question.
        fixed: Parameters, whatever the address says.

    Raises:
        RequestError: It is refused.
        StillWorkingError: The answer takes longer than the visit waits.
    """
    question = QUESTION[name]
    accepted = {field.name for field in msgspec.structs.fields(question.parameters)}
    query = {
        key: value
        for key, value in (visit.address.query | fixed).items()
        if key in accepted and value
    }
    fields: dict[str, Any] = msgspec.to_builtins(await visit.question(question, query))
    tables = {key: fields.pop(key) for key in question.tables}
    return QueryResult(question, visit.address, fields, tables)


def build_page_url(path: str, address: PageUrl, **parameters: str) -> str:
    """Another page, about the same time and with the same filters."""
    shared_parameters = {
        name: value for name, value in address.query.items() if name in {"since", "until", *FILTERS}
    }
    return PageUrl(path, urlencode(shared_parameters)).changed(parameters)


def build_name_filter(name: str) -> str:
    """A filter that a name passes: of one that is too long for a filter, what begins like it
    passes, too.
    """
    return name if len(name) <= MAX_FILTER_CHARS else f"{name[: MAX_FILTER_CHARS - 1]}*"


def build_filter_form(
    address: PageUrl, *, extra: Node = None, preserved: Sequence[str] = ()
) -> Node:
    """The form of a range of time and of filters; those that are set stand in sight, each with a
    way to drop it.

    Args:
        address: Of the page.
        extra: More fields.
        preserved: Parameters that stay as they are.
    """
    since = address.query.get("since", "30d")
    active_filters = {name: address.query[name] for name in FILTERS if address.query.get(name)}
    return form(".asking", method="get", action=address.path, aria_label="What is asked")[
        (
            input_(type="hidden", name=name, value=address.query[name])
            for name in preserved
            if name in address.query
        ),
        label[
            span(".unseen")["Time"],
            select(name="since", id="since")[
                (
                    option(value=value, selected=value == since)[label_text]
                    for value, label_text in RANGES.items()
                ),
                option(value=since, selected=True)[f"since {since}"]
                if since not in RANGES
                else None,
            ],
        ],
        extra,
        button(type="submit")["Ask"],
        (
            a(".chip", href=address.changed({name: ""}), title="Drop this filter")[
                f"{FILTERS[name]}: {value}", span(aria_hidden="true")[" ×"]
            ]
            for name, value in active_filters.items()
        ),
        details[
            summary["Filter"],
            div(".fields")[
                (
                    div(".field")[
                        label(for_=f"of-{name}")[label_text],
                        input_(
                            type="text",
                            id=f"of-{name}",
                            name=name,
                            value=active_filters.get(name, ""),
                            maxlength="500",
                            placeholder="any; * and ? stand for any signs",
                            spellcheck="false",
                            autocomplete="off",
                        ),
                    ]
                    for name, label_text in FILTERS.items()
                )
            ],
        ],
    ]


def build_select_field(
    address: PageUrl, name: str, values: Mapping[str, str], default: str, label_text: str
) -> Node:
    """A field of a form with one of several values."""
    now = address.query.get(name, default)
    return label[
        span(".unseen")[label_text],
        select(name=name)[
            (option(value=value, selected=value == now)[text] for value, text in values.items())
        ],
    ]


def build_empty_notice(subject: str) -> Node:
    """Instead of a table without rows: what to do."""
    return [
        p[
            f"There is no {subject} in this time, or the filters leave none. Ask for more time, or drop a filter."
        ],
        p[
            "Captures come with ",
            code["traceloom upload"],
            " or a request for a trace; usage with agents on hosts.",
        ],
    ]
