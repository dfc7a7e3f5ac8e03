"""What hosts and captures say of jobs goes into the table `jobs`: a row for each change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec
import polars as pl

from traceloom.agent.uplink.messages import HostProcess
from traceloom.store.job_facts import JobFacts
from traceloom.store.schemas import day_of
from traceloom.store.state import State
from traceloom.store.tables import Tables

MOST_IN_BATCH = 20_000  # changes
_MOST_LABELS = 100
_MOST_TEXT = 500  # signs of a label, of a host that may be anybody's


def said_of_jobs(processes: Mapping[str, list[HostProcess]]) -> dict[str, JobFacts]:
    """Job -> what its processes say of it: of each fact the first that says something, by host and rank.

    Args:
        processes: Host -> its processes.
    """
    members: dict[str, list[HostProcess]] = defaultdict(list)
    for host in sorted(processes):
        for process in sorted(processes[host], key=lambda process: (process.rank is None, process.rank, process.key)):
            if process.job and "\0" not in process.job:  # which no database keeps
                members[process.job].append(process)
    facts = {}
    for job, of_job in members.items():
        labels: dict[str, str] = {}
        for process in of_job:
            for name, text in process.labels.items():
                if len(labels) < _MOST_LABELS:
                    labels.setdefault(name[:_MOST_TEXT], text[:_MOST_TEXT])
        first = {
            name: next((text for process in of_job if (text := getattr(process, name))), "")
            for name in ("scheduler", "user", "framework")
        }
        facts[job] = JobFacts(**first, labels=dict(sorted(labels.items())))
    return facts


def said_by_captures(captures: pl.DataFrame) -> dict[tuple[str, int], JobFacts]:
    """Job and start of a capture -> what the capture says of the job.

    Args:
        captures: Rows of this table.
    """
    rows = captures.filter(pl.col("job").is_not_null() & pl.col("torch").is_not_null()).select("job", "start_ns")
    return {(job, start_ns): JobFacts(framework="pytorch") for job, start_ns in rows.sort("start_ns").iter_rows()}


def commit_jobs(state: State, tables: Tables, term: str) -> int:
    """Put a batch of changes into the tables, exactly once; how many there were.

    `term`: by which this service leads.
    """
    batch = state.open_job_facts(MOST_IN_BATCH, term)
    if batch is None:
        return 0
    number, waiting = batch
    rows = [
        {
            "day": day_of(said.since_ns), "job": said.job, "valid_from_ns": said.since_ns,
            **{name: value or None for name, value in msgspec.structs.asdict(said.facts).items() if name != "labels"},
            "labels": msgspec.json.encode(said.facts.labels).decode() if said.facts.labels else None,
        }
        for said in waiting
    ]  # fmt: skip
    tables.commit(f"jobs {state.identity}", number, {"jobs": pl.DataFrame(rows, infer_schema_length=None)})
    state.close_job_facts(number, term)
    return len(waiting)
