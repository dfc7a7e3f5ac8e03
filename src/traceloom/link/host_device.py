"""Joins a host trace to the device trace of the same process: by ids where there are any, else by names in order."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.errors import InputError
from traceloom.link import by_names
from traceloom.link import matching as ms
from traceloom.link.matching import Matching
from traceloom.model import Trace
from traceloom.model.host_trace import HostTrace
from traceloom.model.notice import Notice
from traceloom.read.sequences import device_lines, host_lines, is_op, name_codes

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LEAST = 0.9  # of the host ops must be found, or the two traces are not of one run
_TRIED = 4  # places, where the ops fit only nearly
_LEAST_BY_ID = 0.5  # where ids and names agree, one of the traces may be cut


class _Both(Struct, frozen=True):
    """The two traces with what is compared.

    Attributes:
        trace: The device trace.
        host: The host trace.
        no_op: Why a row of the host trace is no op; null for ops.
        op: Which rows of the host trace are ops.
        event: Which events can be ops.
        host_code: Numbers of the names of host ops.
        event_code: The same of events.
    """

    trace: Trace
    host: HostTrace
    no_op: pl.Series
    op: Bools
    event: Bools
    host_code: Ints
    event_code: Ints

    @property
    def ops(self) -> int:
        """Host ops to match."""
        return int(self.op.sum())


def match(trace: Trace, host: HostTrace) -> Matching:
    """Find the event of each host op.

    Exactly by record function id; by the older key, where `External id` is the record function id and the names agree;
    else by the order of the names of each thread, with the ops around them where that fits, all threads in the same
    iteration. Where several iterations fit, the first is taken, and a notice says so.

    Args:
        trace: The device trace.
        host: The host trace.

    Returns:
        The join, with an outcome for every host op.

    Raises:
        InputError: `host-mismatch`: the host trace is of another run, process or rank; `empty-host-trace`.
    """
    no_op = ms.no_ops(host)
    host_code, event_code = name_codes(host.ops["name"], trace.events["name"])
    op = no_op.is_null().to_numpy()
    if not op.any():
        raise InputError("the host trace holds no op", slug="empty-host-trace", where=host.path)
    both = _Both(trace, host, no_op, op, is_op(trace), host_code, event_code)
    _refuse_by_names(both)
    _refuse_by_process(both)
    matching = _by_record_id(both) or _by_external_id(both)
    return matching if matching is not None else _by_names(both)


# -- what cannot be of one run -----------------------------------------------------------------------------------------


def _refuse_by_names(both: _Both) -> None:
    """Quickly, by how often each name occurs: no more can be matched than that."""
    size = int(max(both.host_code.max(initial=0), both.event_code.max(initial=0))) + 1
    host_counts = np.bincount(both.host_code[both.op], minlength=size)
    event_counts = np.bincount(both.event_code[both.event], minlength=size)
    most = int(np.minimum(host_counts, event_counts).sum())
    if most < _least(both):
        raise _mismatch(both, most, "are in the device trace at all", by_name_only=True)


def _least(both: _Both) -> float:
    """Host ops that must be found; fewer where every event has an id, and the device trace may be cut."""
    has_ids = both.trace.events["record_function_id"].filter(pl.Series(both.event)).count() > 0
    return (_LEAST_BY_ID if has_ids else LEAST) * both.ops


def _refuse_by_process(both: _Both) -> None:
    """The process id, where both know it; ranks of one job run the same ops, so names do not tell them apart."""
    host_process, trace = both.host.process, both.trace
    device_processes = trace.events["process"].filter(pl.Series(both.event)).unique().drop_nulls()
    if host_process is None or not device_processes.len() or host_process in device_processes:
        return
    shown = trace.meta.process if trace.meta.process is not None else device_processes[0]
    raise InputError(
        f"the host trace is of process {host_process}, the device trace of process {shown}",
        slug="host-mismatch",
        where=f"{both.host.path}, {trace.meta.path}",
        hint="give the two traces of one process; ranks of one job look alike but are not the same",
    )


def _mismatch(both: _Both, count: int, clause: str, *, by_name_only: bool = False) -> InputError:
    host_process, device_process = both.host.process, both.trace.meta.process
    processes = (
        f" (process {host_process}, process {device_process})"
        if None not in {host_process, device_process} and host_process != device_process
        else ""
    )
    least = _least(both) / both.ops if by_name_only else LEAST
    return InputError(
        f"host trace and device trace are not of one run{processes}: only {count:,} of {both.ops:,} host ops "
        f"({_percent(count, both.ops)}) {clause}, {100 * least:.0f} % are needed",
        slug="host-mismatch",
        where=f"{both.host.path}, {both.trace.meta.path}",
        hint="give the host trace of the same run and process, or the device trace alone",
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


# -- by ids ------------------------------------------------------------------------------------------------------------


def _by_record_id(both: _Both) -> Matching | None:
    """By record function id: exact, whatever the names; most have to agree, to show that it is one run."""
    row, event = _equal_ids(both, "record_function_id")
    same = both.host_code[row] == both.event_code[event]
    if row.size < _LEAST_BY_ID * both.ops or same.sum() < LEAST * row.size:
        return None
    outcome = _outcomes(both, ms.NO_ID)
    outcome[_outside(both, "record_function_id")] = ms.OUTCOMES.index(ms.OUTSIDE)
    outcome[row] = ms.OUTCOMES.index(ms.BY_RECORD_ID)
    outcome[row[~same]] = ms.OUTCOMES.index(ms.BY_RECORD_ID_RENAMED)
    matching = _matching(both, row, event, outcome, exact=True)
    if row.size >= LEAST * both.ops:
        return matching
    text = f"only {row.size:,} of {both.ops:,} host ops ({_percent(row.size, both.ops)}) are in the device trace"
    return matching.with_notices(Notice("host-ops-missing", "warning", text, both.ops - row.size, where=both.host.path))


def _by_external_id(both: _Both) -> Matching | None:
    """By `External id`, which was the record function id in some older versions: only where the names agree."""
    row, event = _equal_ids(both, "external_id")
    same = both.host_code[row] == both.event_code[event]
    if same.sum() < LEAST * both.ops or same.sum() < LEAST * row.size:
        return None
    row, event = row[same], event[same]
    outcome = _outcomes(both, ms.NO_ID)
    outcome[_outside(both, "external_id")] = ms.OUTCOMES.index(ms.OUTSIDE)
    outcome[row] = ms.OUTCOMES.index(ms.BY_EXTERNAL_ID)
    return _matching(both, row, event, outcome, exact=True)


def _equal_ids(both: _Both, column: str) -> tuple[Ints, Ints]:
    """Rows of host ops and of events whose ids are equal; of several with one id the first."""
    ids = both.trace.events[column]
    event = np.flatnonzero(both.event & ids.is_not_null().to_numpy())
    own = both.host.ops["record_function_id"]
    row = np.flatnonzero(both.op & own.is_not_null().to_numpy())
    if not row.size or not event.size:
        return row[:0], event[:0]
    keys, first = np.unique(ids.fill_null(0).to_numpy()[event], return_index=True)
    event = event[first]
    own_keys, first = np.unique(own.fill_null(0).to_numpy()[row], return_index=True)
    row = row[first]
    at = np.minimum(np.searchsorted(keys, own_keys), keys.size - 1)
    hit = keys[at] == own_keys
    return row[hit], event[at[hit]]


def _outside(both: _Both, column: str) -> Bools:
    """Host ops with ids before the first or after the last of the device trace: the profiler begins a little later."""
    ids = both.trace.events[column].filter(pl.Series(both.event))
    own = both.host.ops["record_function_id"]
    outside = (own < ids.min()) | (own > ids.max())
    return outside.fill_null(value=False).to_numpy() & both.op


# -- by names ----------------------------------------------------------------------------------------------------------


def _by_names(both: _Both) -> Matching:
    in_trace = np.isin(both.host_code, both.event_code[both.event])
    in_host = np.isin(both.event_code, both.host_code[both.op])
    threads = host_lines(both.host, both.host_code, both.op & in_trace)
    lanes = device_lines(both.trace, both.event_code, both.event & in_host)
    fitted = by_names.fit(threads, lanes)
    row, event = by_names.pairs(fitted)
    for iteration in range(1, min(fitted.iterations, _TRIED)):
        if row.size >= LEAST * both.ops:
            break
        row, event = max((row, event), by_names.pairs(fitted, iteration), key=lambda pair: pair[0].size)
    if row.size < LEAST * both.ops:
        row, event = max((row, event), by_names.pairs(fitted, shifted=False), key=lambda pair: pair[0].size)
    if row.size < LEAST * both.ops:
        raise _mismatch(both, row.size, "are found in the same order")
    outcome = _outcomes(both, ms.NO_PLACE)
    outcome[both.op & ~in_trace] = ms.OUTCOMES.index(ms.NO_NAME)
    outcome[row] = ms.OUTCOMES.index(ms.BY_NAMES)
    matching = _matching(both, row, event, outcome, exact=False, iterations=fitted.iterations)
    if fitted.iterations == 1:
        return matching
    text = (
        f"the host trace fits {fitted.iterations} iterations of the device trace equally well; the first is taken, and "
        "what the graph says because of it is inferred"
    )
    return matching.with_notices(Notice("several-iterations", "info", text, fitted.iterations, where=both.host.path))


# -- the result --------------------------------------------------------------------------------------------------------


def _outcomes(both: _Both, unmatched: str) -> Ints:
    """Numbers of outcomes before anything is matched."""
    codes = both.no_op.to_physical().cast(pl.Int64).fill_null(ms.OUTCOMES.index(unmatched))
    return codes.to_numpy().copy()


def _matching(both: _Both, row: Ints, event: Ints, outcome: Ints, *, exact: bool, iterations: int = 1) -> Matching:
    rank = both.trace.rank if both.trace.rank is not None else both.host.rank
    host_op = np.full(both.trace.events.height, -1, dtype=np.int64)
    host_op[event] = both.host.ops["id"].to_numpy()[row]
    thread = both.host.ops["thread"]
    ops = pl.DataFrame({"thread": thread.filter(pl.Series(both.op))}).group_by("thread").len("ops")
    matched = (
        pl.DataFrame({"thread": thread.gather(row), "lane": both.trace.events["lane"].gather(event)})
        .group_by("thread", "lane")
        .len("matched")
    )
    threads = (
        ops.join(matched, on="thread", how="left", nulls_equal=True)
        .with_columns(pl.col("matched").fill_null(0))
        .select(list(ms.THREADS))
        .cast(ms.THREADS)
        .sort("thread", "lane")
    )
    return Matching(
        host=both.host,
        host_op=host_op,
        outcome=pl.Series("outcome", ms.OUTCOMES, dtype=ms.Outcome).gather(outcome),
        exact=exact,
        iterations=iterations,
        threads=threads,
        notices=tuple(notice.of_rank(rank) for notice in both.host.notices),
        rank=rank,
    )
