"""How far what-ifs are off, by kind of change, against made jobs whose true time is known.

    python benchmarks/whatif_truth.py [--seeds 20] [--first 0] [--only SUBJECT] [--list]

The jobs are those of `tests/support/longest_paths.py`: loaders, pipelines, clocks, communicators,
long calls, copies and synchronisations, without any record of what waited for what. An error is the
difference of the told and the true saving as a share of the larger of the two, or of 1 % of the
window where both are smaller. `--list` names each answer that is off by more than 15 %. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

import traceloom
from traceloom.changes.changes import parse
from traceloom.changes.whatif import whatif
from traceloom.errors import UsageError
from traceloom.graph import Plan, link_session

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.longest_paths import SUBJECTS, MadeJob, make_effects, measure_error, random_recipe

_FALSE = 0.15


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    changes: dict[str, None] = {}
    errors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for subject in SUBJECTS:
        for seed in range(options.first, options.first + options.seeds):
            if options.only not in subject:
                continue
            job = MadeJob(random_recipe(seed, subject))
            with tempfile.TemporaryDirectory() as folder:
                graph = link_session(traceloom.load(job.write(Path(folder))))
            plan, window = Plan(graph), job.window
            for effect in make_effects(job):
                changes.setdefault(effect.text)
                try:
                    found = whatif(graph, [parse(effect.text)], plan=plan)
                except UsageError:
                    continue
                true, told = job.true_saving(effect), found.saved_ns / 1000
                error = measure_error(told, true, window)
                for about in (effect.text, subject, "all"):
                    errors[about, found.trusted].append(error)
                if options.list and error > _FALSE:
                    trust = "trusted" if found.trusted else ""
                    print(
                        f"{subject} {seed}: {effect.text}: told {told:.0f} us of {found.before_ns / 1000:.0f}, "
                        f"true {true:.0f} of {window:.0f} {trust}"
                    )
    print("| what | answers | median | p95 | worst | not trusted | median | p95 | worst |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: | --: |")
    for about in (*changes, *SUBJECTS, "all"):
        cells = [about]
        for trusted in (True, False):
            values = errors[about, trusted]
            cells.append(str(len(values)))
            cells += (
                [f"{np.percentile(values, share):.1%}" for share in (50, 95, 100)]
                if values
                else ["–"] * 3
            )
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
