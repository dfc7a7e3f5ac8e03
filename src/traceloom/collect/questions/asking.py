"""What a question is about: a range of time, jobs, devices, kernels; and how much of the answer is wanted."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer, wrong_request
from traceloom.agent.http.moments import moment
from traceloom.allowed_texts import WORD_OR_NONE, WORDS
from traceloom.store.schemas import DIMENSIONS

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_LONG_NS = 2 * DAY_NS

Instant = Annotated[str, Meta(max_length=40)]


def _pattern(text: str) -> Meta:
    return Meta(max_length=500, description=f"only {text}; `*` and `?` stand for any signs")


class Asking(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """A range of time, and filters. Ranges of two days and more begin at midnight in UTC, others at a full hour."""

    since: Annotated[
        Instant, Meta(description="from when on: a while ago as 30d or 6h, a day as 2026-11-01, an instant as "
                      "2026-11-01T12:00")
    ] = "30d"  # fmt: skip
    until: Annotated[Instant, Meta(description="until when; the same (default: now)")] = ""
    job: Annotated[str, _pattern("these jobs")] = ""
    user: Annotated[str, _pattern("jobs of these users")] = ""
    division: Annotated[str, _pattern("jobs of these divisions")] = ""
    product: Annotated[str, _pattern("jobs for these products")] = ""
    application: Annotated[str, _pattern("jobs of this sort of work")] = ""
    model: Annotated[str, _pattern("jobs that train or serve these models")] = ""
    framework: Annotated[str, _pattern("jobs on these frameworks")] = ""
    device_model: Annotated[str, _pattern("devices of these models")] = ""
    host: Annotated[str, _pattern("these hosts")] = ""

    @property
    def of_jobs(self) -> dict[str, str]:
        """Dimension of jobs, or `job`, -> pattern."""
        return {name: pattern for name in ("job", *DIMENSIONS) if (pattern := getattr(self, name))}


class Paged(Asking, frozen=True):
    """The same, and which rows of the answer, which has `more` where these are not the last."""

    top: Annotated[int, Meta(ge=1, le=1000, description="so many rows")] = 20
    skip: Annotated[int, Meta(ge=0, le=100_000, description="leave out so many rows before them")] = 0


class KernelsAsking(Paged, frozen=True):
    """A range of time, filters, and how kernels are ranked."""

    kernel: Annotated[str, _pattern("these kernels")] = ""
    sort: Annotated[
        Literal["time", "cycles"], Meta(description="by GPU time, or by cycles: time at the clock of the device")
    ] = "time"


class OfKernels(Paged, frozen=True):
    """A range of time, and filters, of kernels too."""

    kernel: Annotated[str, _pattern("these kernels")] = ""


class HistoryAsking(Asking, frozen=True, kw_only=True):
    """Of one kernel by its whole name: of these shapes and model of device; without them over all of them."""

    kernel: Annotated[str, Meta(min_length=1, max_length=2000, description="the name of the kernel")]
    shapes: Annotated[str, Meta(max_length=2000, description="shapes of its inputs, as JSON text")] = ""


class DividedAsking(Paged, frozen=True):
    """A range of time, filters, and by what GPU time is divided, outermost first."""

    kernel: Annotated[str, _pattern("these kernels")] = ""
    by: Annotated[
        str, Meta(pattern=WORDS, description="by what, outermost first: kind, bound, kernel, job, division")
    ] = "kind"


class AttributionAsking(Asking, frozen=True):
    """A range of time, filters, and by what device time is divided, outermost first; `over`: told apart by hour or day.

    `top`: so many parts of each part, the largest; the others are one part, so that all levels have the same sum.
    """

    by: Annotated[
        str,
        Meta(pattern=WORDS, description="by what, outermost first: division, product, user, job, host, device_model"),
    ] = "division,product,user"
    over: Annotated[Literal["", "hour", "day"], Meta(description="tell hours or days apart, for a curve")] = ""
    top: Annotated[int, Meta(ge=1, le=100, description="so many parts of each part; the others are one")] = 20


class ToplineAsking(Paged, frozen=True):
    """A range of time, filters, and what a row is of; `by` "": everything in one row."""

    by: Annotated[str, Meta(pattern=WORD_OR_NONE, description="what a row is of: model, job, user, host")] = ""


class InvestAsking(Paged, frozen=True):
    """A range of time, filters, and by what savings are divided, outermost first."""

    by: Annotated[str, Meta(pattern=WORDS, description="by what, outermost first: rule, job, division, user")] = "rule"


class RulesAsking(Paged, frozen=True):
    """A range of time, filters, and of which rule."""

    rule: Annotated[str, _pattern("findings of these rules")] = ""


class Period(NamedTuple):
    """A range of time, half-open, ns since the epoch; `open`: it goes on to now."""

    since_ns: int
    until_ns: int
    open: bool

    @classmethod
    def of(cls, asked: Asking, now_ns: int) -> Period:
        """The range that is asked about.

        Raises:
            RequestError: `wrong-request`: no times, or the end is before the beginning.
        """
        since_ns = moment(asked.since, now_ns)
        until_ns = moment(asked.until, now_ns) if asked.until else now_ns
        if since_ns >= until_ns:
            raise wrong_request("`until` is before `since`")
        since_ns -= since_ns % (DAY_NS if until_ns - since_ns >= _LONG_NS else HOUR_NS)
        return cls(since_ns, -(-until_ns // HOUR_NS) * HOUR_NS, not asked.until)


def described(parameters: type[msgspec.Struct]) -> dict[str, dict[str, object]]:
    """Parameter -> its JSON schema, with its description and, where it has one, its default."""
    return {
        field.name: msgspec.json.schema(field.type) | ({} if field.required else {"default": field.default})
        for field in msgspec.structs.fields(parameters)
    }
