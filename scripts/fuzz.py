"""Try every verb on generated damages of every format, and print what came of it.

    python scripts/fuzz.py --cases 20000 --seed 1 --jobs 2
    python scripts/fuzz.py --case kineto:report:123     # one case again, with its output

A case is wrong where it ends with a traceback, `section-failed` or "a defect of Traceloom", loses a
whole entry, takes more than 2 GB of memory or 20 s of processor time. Exit code 5 if one is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.fuzzing.trying import MOST_SECONDS, VERBS, Case, Outcome, attempt, cases  # noqa: E402

_BATCH = 200  # cases of one process; the highest memory of a process is that of all its cases
_SHOWN = 60


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--case", metavar="FORMAT:VERB:SEED", help="run one case again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="traceloom-fuzz-") as home:
        if args.case:
            kind, verb, seed = args.case.rsplit(":", 2)
            outcome = attempt(Case(kind, verb, int(seed)), Path(home))
            print(outcome)
            return 5 if outcome.fault else 0
        outcomes = run(cases(args.cases, args.seed), Path(home), args.jobs)
    print(table(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.fault]
    for outcome in sorted(wrong, key=lambda outcome: outcome.fault)[:_SHOWN]:
        print(f"{outcome.case}: {outcome.fault}")
    print(f"{len(outcomes):,} cases, {len(wrong):,} wrong")
    return 5 if wrong else 0


def run(todo: list[Case], home: Path, jobs: int) -> list[Outcome]:
    """All cases, in batches of one process each."""
    batches = [todo[at : at + _BATCH] for at in range(0, len(todo), _BATCH)]
    began, done, lock = time.monotonic(), Counter[str](), Lock()

    def batch(number: int) -> list[Outcome]:
        seeds = home / f"batch{number}"
        seeds.mkdir()
        outcomes = of_batch(batches[number], seeds)
        subprocess.run(["rm", "-rf", str(seeds)], check=False)
        with lock:
            for outcome in outcomes:
                if outcome.fault:
                    print(f"{outcome.case}: {outcome.fault}", file=sys.stderr)
            done["cases"] += len(outcomes)
            done["wrong"] += sum(bool(outcome.fault) for outcome in outcomes)
            minutes = (time.monotonic() - began) / 60
            print(
                f"{done['cases']:,} of {len(todo):,}, {done['wrong']} wrong, {minutes:.1f} min",
                file=sys.stderr,
            )
        return outcomes

    with ThreadPoolExecutor(jobs) as pool:
        return [outcome for some in pool.map(batch, range(len(batches))) for outcome in some]


def of_batch(todo: list[Case], seeds: Path) -> list[Outcome]:
    """Cases one after the other in one process; in another one after a case that ends it."""
    outcomes: list[Outcome] = []
    environment = {
        **os.environ,
        "TRACELOOM_CACHE_DIR": str(seeds / "cache"),
        "POLARS_MAX_THREADS": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    while len(outcomes) < len(todo):
        rest = todo[len(outcomes) :]
        lines = "".join(f"{case.format}\t{case.verb}\t{case.seed}\n" for case in rest)
        try:
            ran = subprocess.run(
                [sys.executable, "-P", "-m", "support.fuzzing", str(seeds)],
                input=lines,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=len(rest) * MOST_SECONDS,
                env=environment,
                check=False,
            )
            answers, code, said = ran.stdout.splitlines(), ran.returncode, ran.stderr[-300:]
        except subprocess.TimeoutExpired as stopped:
            answers, code, said = (
                (stopped.stdout or b"").decode("utf-8", "replace").splitlines(),
                -9,
                "no end",
            )
        for case, answer in zip(rest, answers, strict=False):
            outcomes.append(Outcome(case, *json.loads(answer)))
        if len(answers) < len(rest):
            case = rest[len(answers)]
            outcomes.append(Outcome(case, code, 0.0, f"the process ended with {code}: {said!r}"))
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Cases by format and verb: how many, how they ended, how long the longest took."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.case.format, outcome.case.verb].append(outcome)
    heads = ("cases", "done", "usage", "refused", "partly", "wrong", "most s")
    lines = [f"{'format':<10} {'verb':<20} " + " ".join(f"{head:>7}" for head in heads)]
    order = {kind: number for number, kind in enumerate(VERBS)}
    for (kind, verb), some in sorted(
        groups.items(), key=lambda item: (order[item[0][0]], item[0][1])
    ):
        codes = Counter(outcome.code for outcome in some)
        wrong = sum(bool(outcome.fault) for outcome in some)
        longest = max(outcome.seconds for outcome in some)
        counts = [len(some), codes[0], codes[2], codes[3], codes[4] + codes[5], wrong]
        numbers = " ".join(f"{count:>7,}" for count in counts)
        lines.append(f"{kind:<10} {verb:<20} {numbers} {longest:>7.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
