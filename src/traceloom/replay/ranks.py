"""A process for each rank: our own, or those that torchrun started; what they measured is put together.

Our processes find each other through a file, so no port is needed. Under torchrun the results go to rank 0 over its
store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from traceloom.errors import InputError, PartialError, TraceloomError, UsageError
from traceloom.model import units
from traceloom.model.notice import Notice
from traceloom.replay.communication import BACKENDS, RunningGroups, check_agreement
from traceloom.replay.plan import ReplayPlan
from traceloom.replay.processes import Say, run_processes, take_part
from traceloom.replay.replayed import RankReplayed, Replayed
from traceloom.replay.running import RunOptions
from traceloom.workers import shared_folder

if TYPE_CHECKING:
    import torch.distributed as dist


def replay(plan: ReplayPlan, options: RunOptions | None = None, *, say: Say = lambda _: None) -> Replayed | None:
    """Run a plan, each rank in a process of its own.

    Args:
        plan: What is run.
        options: How.
        say: Told what is being done.

    Returns:
        What it gave; None in processes of torchrun other than the first.

    Raises:
        UsageError: `wrong-usage`: ranks that the plan does not have; `no-such-module`.
        InputError: `different-collectives`, `too-little-memory`, `no-device`, `no-torch`, `wrong-world-size`.
        CheckError: `op-failed`, with `strict`.
        PartialError: `rank-failed`: a rank ended before its time.
    """
    options = options or RunOptions()
    ranks = list(plan.ranks) if options.ranks is None else sorted(set(options.ranks))
    if strange := [rank for rank in ranks if rank not in plan.ranks]:
        raise UsageError(
            f"the plan has no rank {strange[0]}",
            slug="wrong-usage",
            hint=f"it has {units.counted(len(plan.ranks), 'rank')}: {', '.join(map(str, plan.ranks))}",
        )
    check_agreement(plan, ranks)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _under_torchrun(plan, options, ranks, say)
    with shared_folder() as folder:
        plan.save(folder / "run.plan")
        job = {"options": asdict(options)}
        hint = "replay it alone with --ranks {rank}"
        answers = run_processes("traceloom.replay.ranks", job, ranks, folder, say, hint=hint)
    return _together(plan, options, ranks, answers)


def _together(
    plan: ReplayPlan, options: RunOptions, ranks: Sequence[int], answers: Sequence[dict[str, Any]]
) -> Replayed:
    """The results of all ranks as one."""
    of_ranks = {rank: RankReplayed.from_dict(answer["rank"]) for rank, answer in zip(ranks, answers, strict=True)}
    missing = tuple(rank for rank in range(plan.world_size) if rank not in ranks)
    notices = [Notice(**notice) for notice in answers[0]["notices"]]
    if missing and any(rank_plan.collectives.height for rank_plan in plan):
        text = f"{units.counted(len(missing), 'rank')} of {plan.world_size} did not run: " + (
            "communication was left out" if len(ranks) == 1 else "groups are those of the ranks that ran"
        )
        notices.append(Notice("ranks-missing", "warning", text, count=len(missing)))
    return Replayed(
        plan.source, answers[0]["device"], options.pace, options.seed, answers[0]["environment"], of_ranks, missing,
        tuple(notices),
    )  # fmt: skip


def main() -> None:
    """What a process of ours does: one rank."""
    take_part(_replayed)


def _replayed(job: dict[str, Any], say: Say) -> dict[str, Any]:
    """The result of the rank that a job names."""
    folder, process, ranks = Path(job["folder"]), job["process"], job["ranks"]
    plan = ReplayPlan.load(folder / "run.plan")
    options = RunOptions(**{**job["options"], "imports": tuple(job["options"]["imports"])})
    store = None
    if _communicate(plan, ranks):
        import torch.distributed as dist

        store = dist.FileStore(str(folder / "store"), len(ranks))
    return _run_rank(plan, options, ranks, process, store, len(ranks), say)


def _communicate(plan: ReplayPlan, ranks: list[int]) -> bool:
    """Whether collectives run: among several ranks, and of one whose groups had no other rank when recorded."""
    if len(ranks) > 1:
        return True
    members = dict(plan.groups.select("name", "ranks").iter_rows())
    used = plan.ranks[ranks[0]].collectives["group"].unique()
    return used.len() > 0 and all(members.get(name) == ranks for name in used)


def _under_torchrun(plan: ReplayPlan, options: RunOptions, ranks: list[int], say: Say) -> Replayed | None:
    """One of torchrun's processes runs its rank; the first puts all together."""
    from torch.distributed import DistNetworkError, PrefixStore, rendezvous

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != len(ranks):
        raise InputError(
            f"torchrun started {units.counted(world_size, 'process')} for {units.counted(len(ranks), 'rank')}",
            slug="wrong-world-size",
            hint=f"start {len(ranks)} of them, or name as many ranks with --ranks",
        )
    try:
        timeout = timedelta(seconds=options.timeout_s)
        store, process, _ = next(rendezvous("env://", timeout=timeout))
    except DistNetworkError as error:
        raise InputError(
            f"the processes do not find each other: {error}",
            slug="no-rendezvous",
            hint="give torchrun another --master-port",
        ) from error
    try:
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        answer = _run_rank(plan, options, ranks, process, store if _communicate(plan, ranks) else None, sharing, say)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, TraceloomError):
            raise
        raise PartialError(f"rank {ranks[process]} failed: {error}", slug="rank-failed") from error
    results = PrefixStore("traceloom", store)
    results.set(str(process), msgspec.json.encode(answer))
    if process:
        results.wait(["done"], timeout)
        return None
    answers = [msgspec.json.decode(results.get(str(other))) for other in range(world_size)]
    results.set("done", b"")
    return _together(plan, options, ranks, answers)


def _run_rank(  # noqa: PLR0917  (each is of another kind)
    plan: ReplayPlan,
    options: RunOptions,
    ranks: list[int],
    process: int,
    store: dist.Store | None,
    sharing: int,
    say: Say,
) -> dict[str, Any]:
    """Run one rank in this process; what `_together` takes."""
    from traceloom.replay.binding import bind, need_torch

    need_torch()
    import torch
    import torch.distributed as dist

    from traceloom.replay.kernels import KernelLoader
    from traceloom.replay.running import Execution, device_of, environment, import_ops, record_passes, run_passes

    namespaces = import_ops(options.imports)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    torch.set_flush_denormal(True)
    device, notices = device_of(plan, options, process)
    communication, begin = None, None

    def agree(goes_on: bool) -> bool:
        flag = torch.tensor([int(goes_on)])
        if communication is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    if store is not None:
        limit = timedelta(seconds=options.timeout_s)
        dist.init_process_group("gloo", store=store, rank=process, world_size=len(ranks), timeout=limit)
        backend = options.backend or BACKENDS.get(device.type, "gloo")
        try:
            communication = RunningGroups.join(plan, ranks, backend, options.timeout_s)
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"no groups with the backend {backend}: {error}", slug="no-backend", hint="leave --backend out"
            ) from error
        begin = dist.barrier
    say("the first pass")
    bound = partial(bind, recorded=plan.torch, further=namespaces)
    of_rank = plan.ranks[ranks[process]]
    with tempfile.TemporaryDirectory(prefix="traceloom-kernels-") as folder:
        kernels = KernelLoader(of_rank, device, Path(folder) if options.trust else None)
        execution = Execution(of_rank, device, options, communication, sharing, bind=bound, kernels=kernels)
        result = run_passes(execution, options, begin=begin, agree=agree, say=say)
        if options.record is not None:
            say(f"recording into {options.record}")
            source = plan.source or "a plan"
            record_passes(execution, options.record, source, force=options.force, begin=begin)
    return {
        "rank": result.to_dict(),
        "device": device.type,
        "notices": [asdict(notice) for notice in notices],
        "environment": environment(device),
    }
