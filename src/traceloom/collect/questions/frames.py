"""The rows that a question is about: lazily scanned, of the days and jobs, devices and hosts that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import polars as pl

from traceloom.collect.questions.asking import DAY_NS, Asking, Period
from traceloom.fleet.attribution import UNATTRIBUTED
from traceloom.fleet.documents import EARLIEST, LATEST, OwnerRule, Prices
from traceloom.fleet.owners import fits, periods
from traceloom.store.schemas import UNALLOCATED, UNREACHABLE, day_of
from traceloom.store.tables import Tables


class QuestionFrames:
    """Frames of the tables' rows.

    Args:
        tables: The tables.
        asked: Which rows.
        period: Of which time.
        rules: Whose jobs are.
        prices: What time costs.
    """

    def __init__(
        self, tables: Tables, asked: Asking, period: Period, rules: Sequence[OwnerRule] = (),
        prices: Prices | None = None,
    ) -> None:  # fmt: skip
        self.tables, self.asked, self.period, self.rules, self.prices = tables, asked, period, rules, prices
        self._first = day_of(period.since_ns)
        self._last = None if period.open else day_of(period.until_ns - 1)

    @cached_property
    def owned(self) -> pl.DataFrame:
        """Whose each job is, of `owners.periods`: of jobs that began before the range too."""
        return self.owned_by(self.rules)

    def owned_by(self, rules: Sequence[OwnerRule]) -> pl.DataFrame:
        """The same by other rules."""
        return periods(self.tables.scan("jobs", None, self._last), self.tables.scan("owners"), rules)

    @cached_property
    def captures(self) -> pl.LazyFrame:
        """Captures that began in the range, of the jobs, devices and hosts that are asked for."""
        captures = self._within(self.tables.scan("captures", self._first, self._last), "start_ns")
        captures = self._of_jobs(captures, "start_ns")
        if self.asked.host or self.asked.device_model:
            captures = captures.join(self._devices, on="capture", how="semi")
        return captures

    @property
    def devices(self) -> pl.LazyFrame:
        """Devices of these captures."""
        return self._of_captures(self._devices)

    @property
    def kernels(self) -> pl.LazyFrame:
        """Kernels in these captures, on the hosts and devices that are asked for."""
        kernels = self.tables.scan("kernels", self._first, self._last)
        if kernel := getattr(self.asked, "kernel", ""):
            kernels = kernels.filter(fits(pl.col("kernel"), kernel))
        if self.asked.device_model:
            kernels = kernels.filter(fits(pl.col("device_model"), self.asked.device_model))
        if self.asked.host:
            kernels = kernels.join(self._devices, on=["capture", "rank"], how="semi", nulls_equal=True)
        return self._of_captures(kernels)

    @property
    def findings(self) -> pl.LazyFrame:
        """Findings of these captures."""
        return self._of_captures(self.tables.scan("findings", self._first, self._last))

    @property
    def usage(self) -> pl.LazyFrame:
        """Hours of devices, of the jobs, devices and hosts that are asked for; all without filters."""
        rows = self._of_places(self._within(self.tables.scan("usage_hour", self._first, self._last), "time_ns"))
        if self.asked.of_jobs:
            rows = rows.filter(~pl.col("state").is_in((UNALLOCATED, UNREACHABLE)))
        return self._of_jobs(rows, "time_ns")

    @property
    def _devices(self) -> pl.LazyFrame:
        return self._of_places(self.tables.scan("devices", self._first, self._last))

    def _of_places(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        for name, pattern in (("device_model", self.asked.device_model), ("host", self.asked.host)):
            if pattern:
                rows = rows.filter(fits(pl.col(name), pattern))
        return rows

    def _within(self, rows: pl.LazyFrame, time: str) -> pl.LazyFrame:
        """Days are read as a whole; of those at the ends a part may be asked for."""
        if self.period.since_ns % DAY_NS:
            rows = rows.filter(pl.col(time) >= self.period.since_ns)
        if not self.period.open and self.period.until_ns % DAY_NS:
            rows = rows.filter(pl.col(time) < self.period.until_ns)
        return rows

    def _of_captures(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        whole_days = not self.period.since_ns % DAY_NS and (self.period.open or not self.period.until_ns % DAY_NS)
        if whole_days and not (self.asked.of_jobs or self.asked.host or self.asked.device_model):
            return rows
        return rows.join(self.captures.select("capture"), on="capture", how="semi")

    def _of_jobs(self, rows: pl.LazyFrame, time: str) -> pl.LazyFrame:
        """Rows whose job has the name, and at the row's time the owners, that are asked for."""
        wanted = dict(self.asked.of_jobs)
        if job := wanted.pop("job", ""):
            rows = rows.filter(fits(pl.col("job"), job))
        if not wanted:
            return rows
        until = pl.col("from_ns").shift(-1).over("job").fill_null(LATEST)
        said = self.owned.lazy().select("job", "from_ns", *wanted, until_ns=until)
        columns = rows.collect_schema().names()
        # a job of which nobody says anything is nobody's at all times
        dated = rows.join(said, on="job", how="left").filter(
            pl.col(time).is_between(
                pl.col("from_ns").fill_null(EARLIEST), pl.col("until_ns").fill_null(LATEST), closed="left"
            ),
            *(fits(pl.col(name).fill_null(UNATTRIBUTED), pattern) for name, pattern in wanted.items()),
        )
        return dated.select(columns)
