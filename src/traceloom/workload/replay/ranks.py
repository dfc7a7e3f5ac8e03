"""Running a replay with one process per rank, and merging the results.

A process gets its job as a line of JSON and writes its answer to a file in a temporary directory;
the output of the process and its libraries goes to another file there, and is shown if it fails.

Our own processes connect through a file, so no port is needed. Under torchrun the results go to
rank 0 over its store.
"""

from __future__ import annotations

import _thread
import json
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from traceloom import errors
from traceloom.errors import InputError, PartialError, TraceloomError, UsageError
from traceloom.system import process as leaving, units
from traceloom.system.processes import WorkerProcess, create_shared_directory
from traceloom.trace.notice import Notice
from traceloom.workload.replay.communication import BACKENDS, RunningGroups, check_agreement
from traceloom.workload.replay.plan import RankReplayResult, Replayed, ReplayPlan
from traceloom.workload.replay.running import RunOptions

if TYPE_CHECKING:
    import torch.distributed as dist


StatusCallback = Callable[[str], None]
_OTHERS_FAIL_S = 3.0
_LAST_LINES = 5


def run_processes(
    main: str,
    job: dict[str, Any],
    ranks: Sequence[int],
    directory: Path,
    on_status: StatusCallback,
    *,
    hint: str,
) -> list[dict[str, Any]]:
    """Starts a process for each rank and waits for all; if one fails, the others are terminated.

    Args:
        main: A module whose `main` calls `take_part`.
        job: The common job; each process also gets `directory`, `process` (its index) and `ranks`.
        ranks: Their names.
        directory: For their files.
        on_status: Called with status messages of the first process.
        hint: What to do if a rank fails; `{rank}` is its name.

    Returns:
        The answer of each.

    Raises:
        PartialError: slug `rank-failed`; or any `TraceloomError` that a rank raised.
    """
    event_queue: queue.SimpleQueue[tuple[int, dict[str, Any] | int]] = queue.SimpleQueue()

    def listen(process: int, worker: WorkerProcess) -> None:
        for answer in worker.answers():
            event_queue.put((process, answer))
        event_queue.put((process, worker.ended()))

    failed: dict[int, dict[str, Any] | int] = {}
    running = set(range(len(ranks)))
    workers: list[WorkerProcess] = []

    def kill() -> None:
        for worker in workers:
            worker.kill()

    with leaving.clean_up_on_exit(kill):
        try:
            for process in range(len(ranks)):
                with leaving.defer_signals():
                    workers.append(WorkerProcess(main, threads=1))
                workers[-1].send(
                    {**job, "folder": str(directory), "process": process, "ranks": list(ranks)}
                )
            for process, worker in enumerate(workers):
                threading.Thread(target=listen, args=(process, worker), daemon=True).start()
            until = None
            while running:
                try:
                    process, event = event_queue.get(
                        timeout=None if until is None else max(0.0, until - time.monotonic())
                    )
                except queue.Empty:
                    break
                if isinstance(event, int):
                    running.discard(process)
                    if event:
                        failed.setdefault(process, event)
                elif "error" in event:
                    failed[process] = event
                elif process == 0:
                    on_status(event["says"])
                if (
                    failed and until is None
                ):  # a failure takes the others down; wait briefly to see which was first
                    until = time.monotonic() + _OTHERS_FAIL_S
        finally:
            kill()
            for worker in workers:
                worker.ended()
    if failed:
        raise _find_first_failure(failed, ranks, directory, hint)
    return [
        msgspec.json.decode((directory / f"{process}.json").read_bytes())
        for process in range(len(ranks))
    ]


def _find_first_failure(
    failed: dict[int, dict[str, Any] | int], ranks: Sequence[int], directory: Path, hint: str
) -> TraceloomError:
    """Returns the root failure: that of a process that ended without a message, else the first
    reported one.
    """
    suffix = ", and the others were ended" if len(ranks) > 1 else ""
    reported = {
        process: failure for process, failure in failed.items() if isinstance(failure, dict)
    }
    exit_codes = {process: code for process, code in failed.items() if isinstance(code, int)}
    if exit_codes:
        process, code = next(iter(exit_codes.items()))
        outcome = (
            f"ended with {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        log = directory / f"{process}.log"
        lines = (
            log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        )
        text = " | ".join(lines[-_LAST_LINES:])
    else:
        process, first = min(reported.items(), key=lambda item: int(item[1]["time_ns"]))
        if first["type"]:
            kind: type[TraceloomError] = getattr(errors, first["type"])
            return kind(**first["error"])
        outcome, text = "failed", first["error"]
    rank = ranks[process]
    message = f"rank {rank} {outcome}{suffix}" + (f": {text}" if text else "")
    return PartialError(message, slug="rank-failed", hint=hint.format(rank=rank))


def take_part(run: Callable[[dict[str, Any], StatusCallback], dict[str, Any]]) -> None:
    """Runs a process that `run_processes` started, and exits.

    Args:
        run: Returns the answer to a job; its second argument receives status messages.
    """
    job = json.loads(sys.stdin.readline())
    directory, process, ranks = Path(job["folder"]), job["process"], job["ranks"]

    def end_with_parent() -> None:  # the parent has gone once the standard input ends
        sys.stdin.read()
        os._exit(1)

    # Not one of `threading`: PyTorch's observer is only used where no other thread may compute.
    _thread.start_new_thread(end_with_parent, ())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    log = os.open(directory / f"{process}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):  # ops and libraries may print
        os.dup2(log, stream)

    def send(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        os.environ |= {
            "RANK": str(process),
            "LOCAL_RANK": str(process),
            "WORLD_SIZE": str(len(ranks)),
        }
        if len(ranks) > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        answer = run(job, lambda text: send(says=text))
        (directory / f"{process}.json").write_bytes(msgspec.json.encode(answer))
    except TraceloomError as error:
        location = ", ".join(
            filter(None, [error.where, f"rank {ranks[process]}" if len(ranks) > 1 else ""])
        )
        send(
            type=type(error).__name__,
            error={**error.to_dict(), "where": location},
            time_ns=time.time_ns(),
        )
    except Exception as error:  # noqa: BLE001  (any error must be reported to the parent)
        traceback.print_exc()
        send(type="", error=f"{type(error).__name__}: {error}", time_ns=time.time_ns())
    finally:
        sys.stdout.flush()
        os._exit(0)  # skip the destructors of process groups, which wait for peers that may be gone


def replay(
    plan: ReplayPlan,
    options: RunOptions | None = None,
    *,
    on_status: StatusCallback = lambda _: None,
) -> Replayed | None:
    """Run a plan, each rank in a process of its own.

    Args:
        plan: The plan.
        options: How to run it.
        on_status: Called with a status message.

    Returns:
        The results; None in processes of torchrun other than the first.

    Raises:
        UsageError: `wrong-usage`: ranks that the plan does not have; `no-such-module`.
        InputError: `different-collectives`, `too-little-memory`, `no-device`, `no-torch`,
            `wrong-world-size`.
        CheckError: `op-failed`, with `strict`.
        PartialError: `rank-failed`: a rank ended prematurely.
    """
    options = options or RunOptions()
    ranks = list(plan.ranks) if options.ranks is None else sorted(set(options.ranks))
    if unknown_ranks := [rank for rank in ranks if rank not in plan.ranks]:
        raise UsageError(
            f"the plan has no rank {unknown_ranks[0]}",
            slug="wrong-usage",
            hint=f"it has {units.format_quantity(len(plan.ranks), 'rank')}: {', '.join(map(str, plan.ranks))}",
        )
    check_agreement(plan, ranks)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_under_torchrun(plan, options, ranks, on_status)
    with create_shared_directory() as directory:
        plan.save(directory / "run.plan")
        answers = run_processes(
            "traceloom.workload.replay.ranks",
            {"options": asdict(options)},
            ranks,
            directory,
            on_status,
            hint="replay it alone with --ranks {rank}",
        )
    return _merge_results(plan, options, ranks, answers)


def _merge_results(
    plan: ReplayPlan, options: RunOptions, ranks: Sequence[int], answers: Sequence[dict[str, Any]]
) -> Replayed:
    result_by_rank = {
        rank: RankReplayResult.from_dict(answer["rank"])
        for rank, answer in zip(ranks, answers, strict=True)
    }
    missing = tuple(rank for rank in range(plan.world_size) if rank not in ranks)
    notices = [Notice(**notice) for notice in answers[0]["notices"]]
    if missing and any(rank_plan.collectives.height for rank_plan in plan):
        text = (
            f"{units.format_quantity(len(missing), 'rank')} of {plan.world_size} did not run: "
            + (
                "communication was left out"
                if len(ranks) == 1
                else "groups are those of the ranks that ran"
            )
        )
        notices.append(Notice("ranks-missing", "warning", text, count=len(missing)))
    return Replayed(
        plan.source,
        answers[0]["device"],
        options.pace,
        options.seed,
        answers[0]["environment"],
        result_by_rank,
        missing,
        tuple(notices),
    )


def main() -> None:
    """Runs one rank in a process of its own."""
    take_part(_run_job)


def _run_job(job: dict[str, Any], on_status: StatusCallback) -> dict[str, Any]:
    directory, process, ranks = Path(job["folder"]), job["process"], job["ranks"]
    plan = ReplayPlan.load(directory / "run.plan")
    options = RunOptions(**{**job["options"], "imports": tuple(job["options"]["imports"])})
    store = None
    if _has_communication(plan, ranks):
        import torch.distributed as dist

        store = dist.FileStore(str(directory / "store"), len(ranks))
    return _run_rank(plan, options, ranks, process, store, len(ranks), on_status)


def _has_communication(plan: ReplayPlan, ranks: list[int]) -> bool:
    """Returns whether collectives run: with several ranks, or with one whose groups had no other
    recorded rank.
    """
    if len(ranks) > 1:
        return True
    members = dict(plan.groups.select("name", "ranks").iter_rows())
    used = plan.ranks[ranks[0]].collectives["group"].unique()
    return used.len() > 0 and all(members.get(name) == ranks for name in used)


def _run_under_torchrun(
    plan: ReplayPlan, options: RunOptions, ranks: list[int], on_status: StatusCallback
) -> Replayed | None:
    """Runs the rank of this torchrun process; the first process merges all results."""
    from torch.distributed import DistNetworkError, PrefixStore, rendezvous

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != len(ranks):
        raise InputError(
            f"torchrun started {units.format_quantity(world_size, 'process')} for {units.format_quantity(len(ranks), 'rank')}",
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
        answer = _run_rank(
            plan,
            options,
            ranks,
            process,
            store if _has_communication(plan, ranks) else None,
            int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            on_status,
        )
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
    return _merge_results(plan, options, ranks, answers)


def _run_rank(  # noqa: PLR0917  (all of them are unrelated)
    plan: ReplayPlan,
    options: RunOptions,
    ranks: list[int],
    process: int,
    store: dist.Store | None,
    sharing: int,
    on_status: StatusCallback,
) -> dict[str, Any]:
    from traceloom.workload.replay.binding import bind_call, require_torch

    require_torch()
    import torch
    import torch.distributed as dist

    from traceloom.workload.replay.kernels import KernelLoader
    from traceloom.workload.replay.running import (
        PlanRunner,
        choose_device,
        describe_environment,
        import_custom_ops,
        record_passes,
        run_passes,
    )

    namespaces = import_custom_ops(options.imports, plan)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    torch.set_flush_denormal(True)
    device, notices = choose_device(plan, options, process)
    communication, wait_for_ranks = None, None

    def agree(goes_on: bool) -> bool:
        flag = torch.tensor([int(goes_on)])
        if communication is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    if store is not None:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=process,
            world_size=len(ranks),
            timeout=timedelta(seconds=options.timeout_s),
        )
        backend = options.backend or BACKENDS.get(device.type, "gloo")
        try:
            communication = RunningGroups.join(plan, ranks, backend, options.timeout_s)
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"no groups with the backend {backend}: {error}",
                slug="no-backend",
                hint="leave --backend out",
            ) from error
        wait_for_ranks = dist.barrier
    on_status("the first pass")
    bound = partial(bind_call, recorded_torch=plan.torch, allowed_namespaces=namespaces)
    rank_plan = plan.ranks[ranks[process]]
    with tempfile.TemporaryDirectory(prefix="traceloom-kernels-") as directory:
        kernels = KernelLoader(rank_plan, device, Path(directory) if options.trust else None)
        execution = PlanRunner(
            rank_plan, device, options, communication, sharing, bind=bound, kernels=kernels
        )
        result = run_passes(
            execution,
            options,
            wait_for_ranks=wait_for_ranks,
            agree_to_continue=agree,
            report_progress=on_status,
        )
        if options.record is not None:
            on_status(f"recording into {options.record}")
            record_passes(
                execution,
                options.record,
                plan.source or "a plan",
                force=options.force,
                wait_for_ranks=wait_for_ranks,
            )
    return {
        "rank": result.to_dict(),
        "device": device.type,
        "notices": [asdict(notice) for notice in notices],
        "environment": describe_environment(device),
    }
