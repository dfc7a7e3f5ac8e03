"""Questions on pages: parameters from the URL, their answers, and the filter form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import msgspec
from htpy import (
    Node,
    a,
    button,
    code,
    details,
    div,
    form,
    input as input_,
    label,
    option,
    p,
    select,
    span,
    summary,
)

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
"""Filter parameter of all questions -> label."""

MAX_FILTER_CHARS = 500
"""Max characters of a filter in questions."""

_COLUMN_KINDS = {
    **dict.fromkeys(("since_ns", "last_before_ns", "start_ns", "time_ns"), "instant"),
    **dict.fromkeys(("job", "capture", "example"), "name"),
}
"""Kinds of columns that differ from their unit: instants are not durations."""


@dataclass(frozen=True)
class QueryResult:
    """The answer to a question, and the page URL that asked it.

    Attributes:
        question: The question.
        address: URL of the page.
        facts: Fields of the answer that are not tables.
        tables: Name -> rows.
    """

    question: Question
    address: PageUrl
    facts: Mapping[str, Any]
    tables: Mapping[str, list[Mapping[str, Any]]]

    def fact(self, name: str) -> Any:
        return self.facts[name]

    def columns(
        self,
        table: str,
        names: Iterable[str],
        links: Mapping[str, Callable[[PageRow], str]] | None = None,
    ) -> list[PageColumn]:
        """Returns columns of a table of the answer, as the question declares them, with links."""
        table_columns = self.question.tables[table].columns
        columns = [
            convert_column(name, table_columns[name], (links or {}).get(name)) for name in names
        ]
        return [
            replace(column, kind=_COLUMN_KINDS.get(column.key, column.kind)) for column in columns
        ]


async def fetch_answer(visit: PageRequest, name: str, **fixed: str) -> QueryResult:
    """Asks a question with the parameters in the URL of the page.

    Args:
        visit: Request for the page.
        name: Name of the question.
        fixed: Parameters that override those of the URL.

    Raises:
        HttpError: It is refused.
        AnswerPendingError: The answer takes longer than the page waits.
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
    """Returns the URL of another page with the same time range and filters."""
    shared_parameters = {
        name: value for name, value in address.query.items() if name in {"since", "until", *FILTERS}
    }
    return PageUrl(path, urlencode(shared_parameters)).changed(parameters)


def build_name_filter(name: str) -> str:
    """Returns a filter that matches a name; a name that is too long is matched by its beginning."""
    return name if len(name) <= MAX_FILTER_CHARS else f"{name[: MAX_FILTER_CHARS - 1]}*"


def build_filter_form(
    address: PageUrl, *, extra: Node = None, preserved: Sequence[str] = ()
) -> Node:
    """Builds the form for time range and filters; active filters are shown with a link to remove
    each.

    Args:
        address: URL of the page.
        extra: More fields.
        preserved: Parameters that are kept unchanged.
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
    current = address.query.get(name, default)
    return label[
        span(".unseen")[label_text],
        select(name=name)[
            (option(value=value, selected=value == current)[text] for value, text in values.items())
        ],
    ]


def build_empty_notice(subject: str) -> Node:
    """Builds the notice shown instead of an empty table."""
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
