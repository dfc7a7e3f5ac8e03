"""The process that evaluates points of a sweep: jobs on standard input, results on standard output.

It is started by `traceloom.workload.simulate.sweep`; the workload is read with its first point.
"""

import json
import os
import sys
from typing import Any

from traceloom.errors import TraceloomError
from traceloom.workload.simulate.sweep import SweepEvaluator, SweepQuestion


def main() -> None:
    """Evaluates points until there are no more."""
    evaluator: SweepEvaluator | None = None
    for line in sys.stdin:
        job = json.loads(line)
        if evaluator is None:
            lists = ("inputs", "overrides")
            question: dict[str, Any] = {
                k: tuple(v) if k in lists else v for k, v in job["question"].items()
            }
            evaluator = SweepEvaluator(SweepQuestion(**question))
        try:
            answer: dict[str, Any] = {"row": evaluator(job["point"])}
        except TraceloomError as error:
            answer = {"refused": error.to_dict()}
        try:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # the parent process has gone
            os._exit(1)
