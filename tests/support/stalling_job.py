"""Jobs that step until they are told to stop: a torchrun of stock PyTorch, and processes without it that start fast."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until
from traceloom.server.client import AgentClient

# Rank 0 waits in `work.wait()`, the others in the collective itself. `control` holds `KIND RANK`: how which rank stops.
TRAINING = """
    import datetime, os, pathlib, threading, time
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.control_plane import worker_main
    from traceloom.server.client import AgentClient

    CONTROL = pathlib.Path(os.environ["CONTROL"])
    RANK = int(os.environ["RANK"])


    def stops():
        kind, _, rank = CONTROL.read_text().partition(" ")
        return kind if rank == str(RANK) else ""


    def sleep_long():
        while stops():
            time.sleep(0.02)  # SLEEPS


    class Flag:
        released = False


    def released_later():
        flag, lock = Flag(), threading.Lock()
        lock.acquire()

        def wait():
            while stops():
                time.sleep(0.02)
            flag.released = True
            lock.release()

        threading.Thread(target=wait, name="releases", daemon=True).start()
        return flag, lock


    def spin_around(flag):
        while not flag.released:
            pass


    def take_lock(lock):
        with lock:
            pass


    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            while stops() == "loader":
                time.sleep(0.02)
            return torch.ones(4)


    def stop(kind):
        if kind == "sleep":
            sleep_long()
        elif kind in ("spin", "lock"):
            flag, lock = released_later()
            spin_around(flag) if kind == "spin" else take_lock(lock)


    def train():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        socket = os.environ.get("REPORTS_TO")
        client = AgentClient(pathlib.Path(socket), 60) if socket else None
        batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=2))
        begun = time.monotonic()
        while True:
            kind = stops()
            if kind and kind != "loader":
                stop(kind)
            loss = model(next(batches)).sum()
            optimizer.zero_grad()
            loss.backward()
            gradient = torch.ones(4)
            if RANK == 0:
                work = dist.all_reduce(gradient, async_op=True)
                work.wait()  # WAITS
            else:
                dist.all_reduce(gradient)
            optimizer.step()
            time.sleep(0.05)
            if client is not None:
                client.post("steps", {"steps": [time.monotonic() - begun], "rank": RANK})
            begun = time.monotonic()


    if os.environ.get("TORCH_WORKER_SERVER_SOCKET"):
        train = worker_main()(train)
    train()
"""

# No PyTorch: it reports its steps, or does what `control` says: KIND of all, or `KIND RANK` of one.
REPORTING = """
    import contextlib, os, pathlib, time
    from traceloom.server.client import AgentClient
    from traceloom.errors import TraceloomError

    CONTROL = pathlib.Path(os.environ["CONTROL"])
    RANK = os.environ["RANK"]
    if "USER_ID" in os.environ:  # imports are done: the packages may be closed to others
        os.setgroups([])
        os.setgid(int(os.environ["USER_ID"]))
        os.setuid(int(os.environ["USER_ID"]))
    client = AgentClient(pathlib.Path(os.environ["REPORTS_TO"]), 60)


    def mode():
        kind, _, rank = CONTROL.read_text().partition(" ")
        return kind if rank in ("", RANK) else "idle"


    def wait_for_others():
        while mode() == "idle":
            time.sleep(0.02)


    def forward(depth):
        return sum(range(200_000)) if not depth else forward(depth - 1)


    def evaluate():
        layers = 0
        while mode() == "evaluate":
            end = time.monotonic() + 0.15
            while time.monotonic() < end:
                forward(layers % 7)
            layers += 1


    def checkpoint():
        with (CONTROL.parent / f"checkpoint{RANK}").open("wb") as file:
            while mode() == "checkpoint":
                file.seek(0)
                file.write(bytes(8 << 20))
                file.flush()
                os.fsync(file.fileno())


    while True:
        kind = mode()
        if kind in {"step", "work"}:
            if kind == "work":
                forward(int(time.monotonic() * 20) % 7)
            with contextlib.suppress(TraceloomError):  # the agent starts again
                client.post("steps", {"steps": [0.05]})
            time.sleep(0.05 if kind == "step" else 0)
        elif kind == "idle":
            wait_for_others()
        elif kind == "evaluate":
            evaluate()
        elif kind == "checkpoint":
            checkpoint()
"""


class StallingJob:
    """A job that runs; `tell` says what it does from now on, `processes` are those that were started."""

    def __init__(self, directory: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self.directory, self.processes = directory, processes

    def tell(self, text: str) -> None:
        """Told whole, or not yet."""
        _tell(self.directory, text)

    def line(self, mark: str) -> int:
        """The line of the program with a mark."""
        lines = (self.directory / "train.py").read_text(encoding="utf-8").splitlines()
        return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def _tell(directory: Path, text: str) -> None:
    new = directory / "control.new"
    new.write_text(text, encoding="ascii")
    new.replace(directory / "control")


@contextmanager
def torchrun_job(
    directory: Path,
    ranks: int,
    name: str,
    *,
    reports_to: Path | None = None,
    servers: Path | None = None,
) -> Iterator[StallingJob]:
    """Stock torchrun over gloo; with `servers` its control servers listen in that directory, which has a short name."""
    (directory / "train.py").write_text(textwrap.dedent(TRAINING), encoding="utf-8")
    _tell(directory, "")
    environment = {
        **os.environ,
        "CONTROL": str(directory / "control"),
        "TRACELOOM_JOB": name,
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"REPORTS_TO": str(reports_to)} if reports_to else {}
    export = f"export TORCH_WORKER_SERVER_SOCKET={servers}/$RANK.sock; " if servers else ""
    job = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--no-python",
            "sh",
            "-c",
            f"{export}exec {sys.executable} {directory}/train.py",
        ],
        env=environment,
    )
    try:
        yield StallingJob(directory, [job])
    finally:
        _tell(directory, "")
        job.terminate()
        job.wait(60)


@contextmanager
def reporting_job(
    directory: Path, ranks: int, name: str, reports_to: Path, user: int | None = None
) -> Iterator[StallingJob]:
    """Processes that report their steps, as another user where one is named."""
    (directory / "train.py").write_text(textwrap.dedent(REPORTING), encoding="utf-8")
    _tell(directory, "step")
    shared = {
        "CONTROL": str(directory / "control"),
        "TRACELOOM_JOB": name,
        "REPORTS_TO": str(reports_to),
    }
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {} if user is None else {"USER_ID": str(user)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(directory / "train.py")],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        yield StallingJob(directory, processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(60)


def stepping(client: AgentClient, name: str, ranks: int = 2) -> None:
    """Wait until the agent knows how all ranks of a job step."""

    def are_seen() -> bool:
        rows = [row for row in client.get("processes")["processes"] if row["owner"]["job"] == name]
        return len([row for row in rows if row["steps_per_second"] is not None]) >= ranks

    until(lambda: name in client.get("hangs")["watched"] and are_seen(), 180)
