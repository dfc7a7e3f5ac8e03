"""Who is to blame for a job that stands still, held against made jobs whose culprit is known."""

from __future__ import annotations

import json
from statistics import mean

from support.stuck_jobs import KINDS, StuckJob, make_stuck_job
from traceloom.analyze.stuck_jobs import FlightVerdict, find_late_ranks
from traceloom.formats.flight_recorder import read_flight_record

GRIDS = ((3, 2), (4, 4), (8, 4), (16, 8), (32, 16))


def judge(job: StuckJob) -> FlightVerdict:
    records = [
        read_flight_record(json.dumps(dump).encode(), rank) for rank, dump in job.dumps.items()
    ]
    return find_late_ranks(records, job.absent)


def test_confidences_are_those_of_the_truth(thorough: bool) -> None:
    errors, right, told = [], 0, 0
    for kind in KINDS:
        for number, (rows, columns) in enumerate(GRIDS if thorough else GRIDS[:3]):
            for seed in range(2):
                job = make_stuck_job(kind, rows, columns, seed + 10 * number)
                verdict = judge(job)
                named = dict.fromkeys(verdict.ranks, verdict.confidence or 0.0)
                if job.culprit is None:
                    assert not named, verdict.sentence
                    continue
                told += 1
                right += verdict.ranks == (job.culprit,) and (verdict.confidence or 0) >= 0.8
                errors.append(
                    mean(
                        (named.get(rank, 0.0) - (rank == job.culprit)) ** 2
                        for rank in {*named, job.culprit}
                    )
                )
    assert mean(errors) <= 0.1
    assert right >= 60 / 70 * told
