"""Running a plan and the script written of it once, before the script is called written."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from traceloom.errors import CheckError, InputError
from traceloom.system import units
from traceloom.workload.replay.plan import Replayed, ReplayPlan
from traceloom.workload.replay.planning import StatusCallback
from traceloom.workload.replay.ranks import replay
from traceloom.workload.replay.running import RunOptions
from traceloom.workload.replay.script import write_script

_NOT_HERE = ("no-torch", "no-device", "too-little-memory")  # it may run elsewhere


def write_tried_script(
    plan: ReplayPlan, options: RunOptions, on_status: StatusCallback = lambda _: None
) -> tuple[str, list[str]]:
    """Returns a plan as a script that has run here, and what it leaves out, in words.

    An op that fails in a replay is a stand-in in the script, as in the replay.

    Raises:
        CheckError: `script-failed`: it ends early all the same.
        InputError: `different-collectives`: it would hang.
    """
    world = plan.world_size if len(plan.ranks) == plan.world_size else 1
    ranks = tuple(plan.ranks)[: max(1, world)]
    on_status("trying what is written")
    once = replace(
        options, iterations=1, ranks=ranks, pace="fast", threads="one", record=None, strict=False
    )
    try:
        tried = replay(plan, once, on_status=on_status)
    except InputError as error:
        if error.slug not in _NOT_HERE:
            raise
        return write_script(plan, seed=options.seed), [f"the script was not tried: {error.message}"]
    text = write_script(plan, seed=options.seed, tried=tried)
    if tried is not None:
        _run_script(text, world, options)
    return text, [*_list_left_out(plan, tried, ranks)]


def _run_script(text: str, world: int, options: RunOptions) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    device = [] if options.device is None else ["--device", options.device]
    with tempfile.TemporaryDirectory(prefix="traceloom-") as directory:
        path = Path(directory, "replay.py")
        path.write_text(text, encoding="utf-8")
        command = [sys.executable, *(launcher if world > 1 else []), str(path), "--runs=1", *device]
        try:
            subprocess.run(command, capture_output=True, timeout=options.timeout_s, check=True)
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", None) or b""
            errors = [
                line for line in said.decode("utf-8", "replace").split("\n") if "Error" in line
            ]
            reason = (errors or [str(error)])[-1].strip()
            raise CheckError(f"the script fails: {reason}", slug="script-failed") from error


def _list_left_out(
    plan: ReplayPlan, tried: Replayed | None, ranks: tuple[int, ...]
) -> Iterator[str]:
    omitted: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        omitted.update(plan.ranks[rank].omitted.select("name", "reason").iter_rows())
        if tried is not None:
            result = tried.ranks[rank]
            omitted.update(result.stand_ins.select("name", "reason").iter_rows())
            omitted.update(result.failures.select("name", "text").iter_rows())
    for (name, reason), count in omitted.most_common():
        yield f"left out: {units.format_count(count)} × {name} ({reason.partition(' (arguments ')[0]})"
