"""`owners.toml` and `prices.toml`: small files that an operator writes."""

from __future__ import annotations

import re
import sys
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from traceloom.errors import InputError, unreadable
from traceloom.files import read_small
from traceloom.store.schemas import DIMENSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the tests run on newer ones
    import tomli as tomllib

MOST_BYTES = 1 << 22
_MATCHED = ("job", "scheduler", *DIMENSIONS)
_LABEL = re.compile(r"label\.[A-Za-z0-9_./-]{1,100}")
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class OwnerRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"first": "from"}):
    """`[[rule]]`: whose the jobs are that match.

    Attributes:
        match: `job`, `scheduler`, a dimension or `label.NAME` -> pattern with `*` and `?`. All have to match what the
            job itself says; without any, every job does.
        set: Dimension -> value.
        first: The first day in UTC on which it holds, `from` in the file; None: always.
        until: The first day on which it does not any more; None: never.
    """

    set: dict[str, _Text]
    match: dict[str, _Text] = {}
    first: date | None = None
    until: date | None = None

    def __post_init__(self) -> None:
        if strange := sorted(name for name in self.match if name not in _MATCHED and not _LABEL.fullmatch(name)):
            raise ValueError(f"no job is matched by `{strange[0]}`, but by {', '.join(_MATCHED)}, label.NAME")
        if strange := sorted(set(self.set) - set(DIMENSIONS)):
            raise ValueError(f"`{strange[0]}` is not what a rule sets: {', '.join(DIMENSIONS)}")
        if self.from_ns >= self.until_ns:
            raise ValueError("it ends before it begins")

    @property
    def from_ns(self) -> int:
        """From when on, Unix time."""
        return EARLIEST if self.first is None else _ns(self.first)

    @property
    def until_ns(self) -> int:
        """When it ends."""
        return LATEST if self.until is None else _ns(self.until)


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`prices.toml`: what hours and energy cost.

    Attributes:
        currency: Such as EUR.
        per_kwh: What a kilowatt hour costs, beside the device hour; None: it is in the price of the hour.
        co2_g_per_kwh: Grams of CO2 of a kilowatt hour; None: not known.
        device_hour: Model of a device, or `default`, -> what an hour of it costs.
    """

    currency: _Text
    per_kwh: _Amount | None = None
    co2_g_per_kwh: _Amount | None = None
    device_hour: dict[str, _Amount] = {}

    @property
    def of_models(self) -> dict[str, float]:
        """The prices of models that are named."""
        return {name: price for name, price in self.device_hour.items() if name != "default"}


class _OwnersDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: Annotated[tuple[OwnerRule, ...], msgspec.Meta(max_length=1_000)] = ()


EARLIEST, LATEST = -(1 << 62), 1 << 62
"""Before and after all times, ns."""
_Kind = TypeVar("_Kind", _OwnersDocument, Prices)


def read_rules(path: Path) -> tuple[OwnerRule, ...]:
    """The rules of `owners.toml`; of those that match and say something of a dimension the first counts.

    Raises:
        InputError: `unreadable`, `bad-owners`.
    """
    return rules_of(_bytes_of(path), str(path))


def rules_of(text: str | bytes, where: str = "") -> tuple[OwnerRule, ...]:
    """The same from the text of the file, which lies there.

    Raises:
        InputError: `bad-owners`.
    """
    return _converted(text, _OwnersDocument, slug="bad-owners", where=where).rule


def read_prices(path: Path) -> Prices:
    """The prices of `prices.toml`.

    Raises:
        InputError: `unreadable`, `bad-prices`.
    """
    return prices_of(_bytes_of(path), str(path))


def prices_of(text: str | bytes, where: str = "") -> Prices:
    """The same from the text of the file, which lies there.

    Raises:
        InputError: `bad-prices`.
    """
    return _converted(text, Prices, slug="bad-prices", where=where)


def _bytes_of(path: Path) -> bytes:
    try:
        return read_small(path, MOST_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def _converted(text: str | bytes, kind: type[_Kind], *, slug: str, where: str) -> _Kind:
    try:
        return msgspec.convert(tomllib.loads(text if isinstance(text, str) else text.decode()), kind)
    except (ValueError, RecursionError) as error:  # what is no TOML, no UTF-8, or has a wrong key
        raise InputError(f"the file is not what it should be: {error}", slug=slug, where=where) from error


def _ns(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=timezone.utc).timestamp()) * 1_000_000_000
