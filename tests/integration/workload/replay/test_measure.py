"""This machine measured: real processes, small messages."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from traceloom.analyze.placed_calls import Peak
from traceloom.cli import main
from traceloom.errors import InputError, PartialError
from traceloom.system.processes import WorkerProcess
from traceloom.workload.replay import measure
from traceloom.workload.replay.measure_rank import COLLECTIVES, Task
from traceloom.workload.simulate.machine_file import read_machine

pytest.importorskip("torch")


@pytest.mark.thorough
def test_two_processes_measure_and_simulate_takes_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, written = tmp_path / "machine.toml", tmp_path / "measure.json"
    options = ["--ranks", "2", "--device", "cpu", "--max-size", "16KiB", "--precision", "50%"]
    assert main(["calibrate", "--here", *options, "-o", str(machine), "-o", str(written)]) == 0
    document = json.loads(written.read_text())
    rows = document["transfers"]
    assert {row["collective"] for row in rows} == set(COLLECTIVES)
    assert {(row["from_bytes"], row["to_bytes"]) for row in rows} == {(1024, 16384)}
    assert {*document["machine"]["device"]["peaks"]} == {"fp32", "fp64", "bf16", "memory"}
    assert "transfers-not-measured" not in {notice["slug"] for notice in document["notices"]}
    capsys.readouterr()
    workload = tmp_path / "workload"
    assert (
        main(
            ["generate", "collective", "--ranks", "2", "--size", "4096", "-o", str(workload), "-q"]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["simulate", str(workload), "--machine", str(machine), "--json"]) == 0
    fit = next(row for row in rows if row["collective"] == "all_reduce")
    fitted = fit["alpha_ns"] + 4096 / (
        fit["bandwidth"] or math.inf
    )  # of two ranks all bytes go over the bus
    assert json.loads(capsys.readouterr().out)["after_ns"] == pytest.approx(fitted, rel=1e-3)


def test_kernels_are_not_measured_where_the_peaks_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from traceloom.workload.replay import measure_rank

    monkeypatch.setattr(measure_rank, "find", lambda name: Peak(name, {"fp32": 1e12}, 1e11))
    recorded = measure_rank.measure_here(
        Task(1, 1, "cpu", "gloo", 1024, 4, 0.5, 1.0, "env://"), 0, lambda _: None
    )
    assert (recorded.transfers, recorded.kernels) == ([], [])


@pytest.mark.thorough
def test_hosts_of_a_launcher_are_measured_inside_and_between(tmp_path: Path) -> None:
    """Two hosts of one rank each, as a launcher would say it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    verb = [
        sys.executable,
        "-m",
        "traceloom",
        "calibrate",
        "--here",
        "--device",
        "cpu",
        "--max-size",
        "4KiB",
    ]
    verb += ["--precision", "50%", "-o", str(tmp_path / "machine.toml")]
    ranks = [
        subprocess.Popen(
            verb, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, encoding="utf-8"
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "Wrote" in said[0]
    assert said[1] == ""
    machine = read_machine(tmp_path / "machine.toml")
    assert (machine.ranks, machine.ranks_per_host) == (2, 1)
    assert {transfer.span for transfer in machine.transfers} == {"between"}


def test_a_rank_that_dies_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerProcess] = []

    class Mortal(WorkerProcess):
        def send(self, job: dict[str, object]) -> None:
            super().send(job)
            started.append(self)
            if job.get("process") == 1:
                self.kill()

    monkeypatch.setattr("traceloom.workload.replay.ranks.WorkerProcess", Mortal)
    with pytest.raises(PartialError, match="rank 1 ended with SIGKILL"):
        measure.measure(ranks=2, device="cpu", max_bytes=1024)
    assert all(process.ended() != 0 for process in started)


def test_ranks_that_do_not_find_each_other_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "no port")
    from traceloom.workload.replay.measure_rank import measure_here

    with pytest.raises(InputError, match="does not find") as refused:
        measure_here(Task(2, 2, "cpu", "gloo", 1024, 4, 0.5, 1.0, "env://"), 0, lambda _: None)
    assert refused.value.slug == "no-rendezvous"
