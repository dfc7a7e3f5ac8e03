"""Findings against the truth: faults planted into made jobs and into real training runs on the CPU.

    python benchmarks/findings_truth.py [made] [real] [--only FAULT] [--repeats 3] [--first]
    python benchmarks/findings_truth.py random [--jobs 100] [--seed 1]
    python benchmarks/findings_truth.py hidden [--jobs 100] [--seed 1]
    python benchmarks/findings_truth.py sizes [--jobs 20] [--only FAULT]

Made jobs: the saving that the expected finding predicts, against the same job simulated again
without the fault. Real
runs: the same against the time of a step after the real fix, by the wall times of steps that nobody recorded: in each
run steps with and without the fault take turns after those that are recorded (see findings_job.py).
`--first` asks for the processor ahead of all others (needs the right to), without which a busy
machine measures its other work. Random
jobs: how far changes and findings are off, by kind, against the same jobs simulated again with the change, or without
what makes a rank late. Hidden: the same where one rank alone was recorded, and its peers were not. Sizes: twelve
faults of random sizes on devices of three vendors, `--jobs` of each, against the job simulated without the fault, and
ten times as many jobs without one (tests/support/planted_sizes.py); a finding of these is false.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import traceloom
from traceloom.capture.manifest import select_nearest_steps
from traceloom.changes.bounds import compute_lower_bound_ns
from traceloom.changes.changes import parse
from traceloom.changes.whatif import scenario_of
from traceloom.findings import RULES, Context, Ranked, findings, rank
from traceloom.graph import Plan, calibrate
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.trace.notice import Finding

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.jobs import Change, Job, Run
from support.jobs.at_random import to_change, with_a_late_rank
from support.jobs.planted import clean_jobs, several_ranks, single_rank
from support.planted_sizes import PEAK, Job as SizedJob, cases, clean, write

HERE = Path(__file__).parent
TRIES, ENOUGH = 4, 16  # runs, until one has so many steps that tell what the fault costs
FROM = 30  # as in findings_job.py: from here on every other step is without the fault
_COUNTS = 0.02  # of the step: smaller savings are not judged
_LATE = ("straggler", "host-pause", "data-starved")
EXPECTED = {
    "none": (),
    "sleep": ("host-pause",),
    "loader": ("data-starved",),
    "workers": ("data-starved",),
    "elements": ("python-bound",),
    "python": ("host-pause",),
    "recomputation": ("recomputation",),
    "item": (),
    "straggler": ("host-pause", "straggler"),  # the sleep itself, or the rank that it makes late
    "straggler-fsdp": ("host-pause", "straggler"),
    "busy": ("straggler",),
    "busy-fsdp": ("straggler",),
    "copies": ("host-copies",),
    "tiny": ("tiny-operators",),
}


@dataclass(frozen=True)
class Row:
    """One line of the table; times in ns per step."""

    fault: str
    step: float
    truth: float
    expected: tuple[str, ...]
    found: Ranked

    def line(self) -> str:
        """As Markdown."""
        slugs = [finding.slug for finding in self.found.time]
        place = next((number for number, slug in enumerate(slugs) if slug in self.expected), None)
        first = slugs[0] if slugs else "nothing"
        cells = [
            self.fault,
            f"{self.step / 1e6:.2f} ms",
            f"{self.truth / 1e6:.2f} ms ({self.truth / self.step:.0%})",
        ]
        if place is None:
            saving = self.found.time[0].saving_fraction if slugs else 0.0
            cells += ["–", f"{first} {saving or 0:.1%}", "–"]
        else:
            saved = self.found.time[place].saving_ns or 0
            low, high = (
                getattr(self.found.time[place], f"saving_{end}_ns") for end in ("low", "high")
            )
            between = "" if low is None else f" ({low / 1e6:.2f} to {high / 1e6:.2f})"
            cells += [
                f"{place + 1}",
                f"{slugs[place]} {saved / 1e6:.2f} ms{between}",
                f"{saved / self.truth - 1:+.0%}",
            ]
        return "| " + " | ".join(cells) + " |"


HEAD = (
    "| fault | step | truth | place | predicted | off by |\n| --- | --: | --: | --: | --- | --: |"
)


def made(only: str) -> Iterator[Row]:
    """Made jobs with one fault each, and clean ones."""
    for planted in itertools.chain(single_rank(), several_ranks()):
        if only in ("", planted.fault):
            with tempfile.TemporaryDirectory() as folder:
                session = traceloom.load(planted.run.write(Path(folder) / "run"))
                found, step = findings(session), Context.of(session).step_ns
            yield Row(planted.fault, step, planted.cost_per_step_ns, (planted.slug,), found)
    for name, job in clean_jobs().items():
        if only in ("", "clean"):
            with tempfile.TemporaryDirectory() as folder:
                session = traceloom.load(job.run().write(Path(folder) / "run"))
                yield Row(f"clean: {name}", Context.of(session).step_ns, 0, (), findings(session))


def recorded(fault: str, folder: Path, *, fixed: bool, first: bool, ranks: int) -> Path:
    """Record a real run of a job."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(traceloom.__file__).parents[1]),
    }
    env |= {"FINDINGS_FIRST": "1"} if first else {}
    job = [sys.executable, str(HERE / "findings_job.py"), fault, *(["fixed"] if fixed else [])]
    if fault.startswith(("straggler", "busy")):
        job[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # at first a loader with workers has batches in store, and memory is new
    window = ["--steps", "20..25"]
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "record",
        "--quiet",
        "--force",
        "-o",
        str(folder),
        *window,
        "--",
        *job,
    ]
    for _ in range(TRIES):
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        if undisturbed(folder) >= ENOUGH:
            return folder
    raise SystemExit(
        f"{fault}: the recorder wrote its files until the job was over; is the machine busy?"
    )


def undisturbed(folder: Path) -> int:
    """Steps behind the recorded ones during which nothing was recorded and nothing written; of the
    rank with fewest.
    """
    ranks = json.loads((folder / "capture.json").read_text())["ranks"]
    return min(part["steps"]["state"][FROM:].count("unrecorded") for part in ranks)


def step_ns(folder: Path, *, odd: bool) -> float:
    """Median time of the even or the odd steps that nobody recorded; of the slowest rank."""
    slowest = 0.0
    for part in json.loads((folder / "capture.json").read_text())["ranks"]:
        told = zip(part["steps"]["duration_ns"], part["steps"]["state"], strict=True)
        times = [
            time
            for number, (time, state) in enumerate(told)
            if state == "unrecorded" and number % 2 == odd
        ]
        slowest = max(slowest, statistics.median(times))
    return slowest


def predicted(folder: Path) -> Ranked:
    """Findings of a real run, as they would be of one in which all steps have the fault.

    What recording costs is told by steps with the fault alone: those without are the experiment's,
    not the user's.
    """
    context = Context.of(traceloom.load(folder))
    ratios = []
    for part in json.loads((folder / "capture.json").read_text())["ranks"]:
        times, states = part["steps"]["cpu_ns"], part["steps"]["state"]
        recorded = [number for number, state in enumerate(states) if state == "recorded"]
        plain = [
            number
            for number, state in enumerate(states)
            if state == "unrecorded" and number > 2 and (number < FROM or number % 2 == 0)
        ]
        ran, ran_plain = (
            [times[number] for number in some]
            for some in (recorded, select_nearest_steps(plain, recorded))
        )
        ratios.append(statistics.median(ran) / statistics.median(ran_plain))
    context.host_ratio = max(ratios, default=None)
    return rank(context, RULES)


def real(only: str, repeats: int, *, first: bool, ranks: int) -> Iterator[Row]:
    """Real runs: the median of the predictions against the median of the measurements."""
    for fault, expected in EXPECTED.items():
        if only not in ("", fault):
            continue
        with tempfile.TemporaryDirectory() as name:
            steps, truths, found = [], [], []
            for number in range(repeats):
                run = recorded(
                    fault, Path(name) / f"faulty{number}", fixed=False, first=first, ranks=ranks
                )
                steps.append(step_ns(run, odd=False))
                fixed = run
                if fault == "workers":
                    fixed = recorded(
                        fault, Path(name) / f"fixed{number}", fixed=True, first=first, ranks=ranks
                    )
                truths.append(steps[-1] - step_ns(fixed, odd=True))
                found.append(predicted(run))
        yield Row(
            fault,
            statistics.median(steps),
            statistics.median(truths),
            expected,
            _middle(found, expected),
        )


def _middle(found: list[Ranked], expected: tuple[str, ...]) -> Ranked:
    """The one with the median prediction."""

    def saving(one: Ranked) -> int:
        return next((finding.saving_ns or 0 for finding in one.time if finding.slug in expected), 0)

    return sorted(found, key=saving)[statistics.median_low(range(len(found)))]


def distributions(count: int, seed: int) -> Iterator[str]:
    """How far what-ifs of random jobs are off, and the first finding of random jobs with a late
    rank; Markdown.
    """
    answers = [
        answer
        for changed in to_change(count, seed)
        for answer in _answers(changed.job, changed.changes, range(len(changed.job.ranks)))
    ]
    yield from _errors(answers)
    yield f"\n{sum(answer.impossible for answer in answers)} answers beyond what is possible\n"
    yield from _late(count, seed)


def hidden(count: int, seed: int) -> Iterator[str]:
    """How far what-ifs are off where one rank of several was recorded, and another one is late;
    Markdown.
    """
    changes = (
        ("gpu * 0.5", Change(kernels=0.5)),
        ("host * 0.7", Change(host=0.7)),
        ("network * 2", Change(collectives=0.5)),
        ("collectives remove", Change(collectives=0)),
    )
    for name, beside in (("the late rank alone", 0), ("a rank that waits for it", 1)):
        yield f"\nRecorded is {name}.\n"
        yield from _errors(
            [
                answer
                for late in with_a_late_rank(count, seed, steps=4)
                for answer in _answers(
                    late.job, changes, [(late.rank + beside) % len(late.job.ranks)]
                )
            ]
        )


@dataclass(frozen=True)
class Answer:
    """What a change was said to do to a job, and what it does: windows of the recorded ranks, ns."""

    change: str
    window_ns: int
    truth_ns: int
    told_ns: int
    impossible: bool


def _answers(
    job: Job, changes: Iterable[tuple[str, Change]], ranks: Collection[int]
) -> Iterator[Answer]:
    run = job.run()
    graph = calibrate(join_ranks([link_rank(run.trace(rank).build()) for rank in ranks]))
    plan, window = Plan(graph), _window(run, ranks)
    for text, change in changes:
        scenario = scenario_of(graph, [parse(text)])
        after = int(np.ptp(scenario.times(plan)))
        impossible = after < compute_lower_bound_ns(graph, scenario, window) - graph.nodes.height
        yield Answer(text, window, _window(job.run(change), ranks), after, impossible)


def sizes(count: int, only: str) -> Iterator[str]:
    """Place and saving of faults of random sizes, and findings of jobs without one; Markdown."""
    yield "| fault | devices | jobs | first | off by, p50 | p95 | most |"
    yield "| --- | --- | --: | --: | --: | --: | --: |"
    chosen = (case for case in cases(range(count)) if only in ("", case.fault))
    for (fault, vendor), group in itertools.groupby(chosen, lambda case: (case.fault, case.vendor)):
        first, errors = 0, []
        for case in group:
            time = _found(case.faulty)
            first += bool(time) and time[0].slug == case.slug
            told = next(
                (finding.saving_ns or 0 for finding in time if finding.slug == case.slug), 0
            )
            errors.append(abs(told / case.truth_ns() - 1))
        percentiles = " | ".join(f"{np.percentile(errors, share):.1%}" for share in (50, 95, 100))
        yield f"| {fault} | {vendor} | {count} | {first} | {percentiles} |"
    if only in ("", "clean"):
        false = sum(bool(_found(job)) for job in clean(range(10 * count)))
        yield f"\n{false} of {10 * count} jobs without a fault have a finding\n"


def _found(job: SizedJob) -> tuple[Finding, ...]:
    with tempfile.TemporaryDirectory() as folder:
        session = traceloom.load(write(job, Path(folder) / "trace.json"), cache=False)
    return rank(Context.of(session, PEAK), RULES).time


def _window(run: Run, ranks: Collection[int]) -> int:
    spans = [span for rank in ranks for span in run.of_rank(rank)]
    return max(span.end for span in spans) - min(span.start for span in spans)


def _errors(answers: Iterable[Answer]) -> Iterator[str]:
    """A line for each change, and one for all."""
    times: dict[str, list[float]] = defaultdict(list)
    savings: dict[str, list[float]] = defaultdict(list)
    for one in answers:
        times[one.change].append(abs(one.told_ns / one.truth_ns - 1))
        saved = one.window_ns - one.truth_ns
        if abs(saved) >= _COUNTS * one.window_ns:
            savings[one.change].append(abs((one.window_ns - one.told_ns - saved) / saved))
    yield "| change | jobs | new time, p50 | p95 | savings of 2 % and more | p50 | p95 | most |"
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    for text, errors in times.items():
        big = savings[text] or [0.0]
        name = text.replace("|", r"\|")
        yield (
            f"| {name} | {len(errors)} | {np.median(errors):.2%} | {np.percentile(errors, 95):.2%} | "
            f"{len(savings[text])} | {np.median(big):.1%} | {np.percentile(big, 95):.1%} | {max(big):.1%} |"
        )
    every = [error for errors in times.values() for error in errors]
    big = [error for errors in savings.values() for error in errors]
    yield (
        f"| all | {len(every)} | {np.median(every):.2%} | {np.percentile(every, 95):.2%} | {len(big)} | "
        f"{np.median(big):.1%} | {np.percentile(big, 95):.1%} | {max(big):.1%} |"
    )


def _late(count: int, seed: int) -> Iterator[str]:
    errors, missed, false = [], 0, 0
    for late in with_a_late_rank(count, seed):
        with tempfile.TemporaryDirectory() as folder:
            session = traceloom.load(late.job.run().write(Path(folder) / "run"))
            time = findings(session).time
            step = Context.of(session).step_ns
        told = next((finding for finding in time if finding.slug in _LATE), None)
        if late.cost_ns < _COUNTS * step:
            false += told is not None and (told.saving_fraction or 0) >= 2 * _COUNTS
        elif told is None or told is not time[0]:
            missed += 1
        else:
            errors.append(abs((told.saving_ns or 0) / late.cost_ns - 1))
    yield "| a late rank is | jobs | off by, p50 | p95 | most |"
    yield "| --- | --: | --: | --: | --: |"
    yield (
        f"| found first | {len(errors)} | {np.median(errors):.1%} | {np.percentile(errors, 95):.1%} | "
        f"{max(errors):.1%} |"
    )
    yield f"| not found first | {missed} | | | |"
    yield f"| found though it costs nothing | {false} | | | |"


def main() -> None:
    """Run what is asked for, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", default=["made", "real"], help="made, real, random, hidden, sizes"
    )
    parser.add_argument("--jobs", type=int, default=100, help="random jobs of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of random jobs")
    parser.add_argument("--only", default="", help="one fault, by its name; or clean")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each real job")
    parser.add_argument("--first", action="store_true", help="take the processor ahead of others")
    parser.add_argument("--ranks", type=int, default=2, help="of jobs with several")
    arguments = parser.parse_args()
    for name, lines in (("random", distributions), ("hidden", hidden)):
        for line in lines(arguments.jobs, arguments.seed) if name in arguments.what else ():
            print(line, flush=True)
    for line in sizes(arguments.jobs, arguments.only) if "sizes" in arguments.what else ():
        print(line, flush=True)
    if not {"made", "real"} & set(arguments.what):
        return
    print(HEAD)
    if "made" in arguments.what:
        for row in made(arguments.only):
            print(row.line(), flush=True)
    if "real" in arguments.what:
        for row in real(
            arguments.only, arguments.repeats, first=arguments.first, ranks=arguments.ranks
        ):
            print(row.line(), flush=True)


if __name__ == "__main__":
    main()
