"""A worker of `make fuzz`: cases as lines of standard input, outcomes as lines of JSON on standard output."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from support.fuzzing.trying import MOST_BYTES, MOST_SECONDS, Case, attempt

_SPARE = (
    3 << 30
)  # of address space beyond what may be used; libraries reserve much that they never touch


def main() -> None:
    """Run cases until there are no more."""
    seeds = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print is no answer
    reserved = (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (reserved + MOST_BYTES + _SPARE,) * 2)
    for line in sys.stdin:
        kind, verb, seed = line.rstrip("\n").split("\t")
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + 2 * MOST_SECONDS
        # Whoever is still running then is ended by the system.
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        outcome = attempt(Case(kind, verb, int(seed)), seeds)
        json.dump([outcome.code, outcome.seconds, outcome.fault], answers)
        answers.write("\n")
        answers.flush()


if __name__ == "__main__":
    main()
