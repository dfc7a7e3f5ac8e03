"""`kill -9` of who takes part in a request, at each of its states: it ends, with one capture that stands once."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import places  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.simulated_hosts import SimulatedHost, ranked_process  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.fleet.store.tables import Tables  # noqa: E402

SCRIPT = str(Path(__file__).parents[2] / "support" / "interrupted_service.py")
WANTED = {"spec": {"job": "job", "steps": 2}}
ENDED = {"done", "partial", "failed", "cancelled"}
STATES = ("announced", "armed", "running", "collecting", "stitching", "analysing", "done")
QUICK = {("stitching", "before")}


def interrupted(point: str, when: str, number: signal.Signals) -> list[str]:
    """The command of a service that is interrupted there."""
    return [sys.executable, SCRIPT, point, when, str(int(number))]


@contextlib.contextmanager
def hosts_of(services: list[RunningService], folder: Path) -> Iterator[list[SimulatedHost]]:
    urls = [service.url for service in services]
    hosts = []
    try:
        for rank in range(2):
            token = (
                until(lambda: leader(services))
                .client()
                .post("agents", {"host": f"node{rank}"})["token"]
            )
            hosts.append(
                SimulatedHost(urls, f"node{rank}", token, [ranked_process(rank, "job")], folder)
            )
            hosts[-1].beat()
        yield hosts
    finally:
        for host in hosts:
            host.close()


def leader(services: list[RunningService]) -> RunningService | None:
    """The service that talks to hosts now."""
    return next(
        (of for of in services if of.lives and of.ask("GET", "/api/v1/hosts")[0] == 200), None
    )


def request_of(service: RunningService, name: str) -> dict[str, Any] | None:
    """A request; None where the service is away."""
    with contextlib.suppress(OSError):
        code, answer = service.ask("GET", f"/api/v1/requests/{name}")
        if code == 200:
            return dict(answer)
    return None


def ended(services: list[RunningService], hosts: list[SimulatedHost], name: str) -> dict[str, Any]:
    """How a request ended; hosts do what is wanted of them meanwhile."""

    def look() -> dict[str, Any] | None:
        for host in hosts:
            host.go_on()
        for service in services:
            if (now := request_of(service, name)) is not None and now["state"] in ENDED:
                return now
        return None

    result = until(look, 120)
    assert result is not None
    return result


def check_capture(tables: Tables, files: list[Path], request: dict[str, Any]) -> None:
    """The capture of a request stands once: its files, its rows, both ranks."""
    assert (request["state"], request["detail"]) == ("done", "")
    captures = tables.scan("captures").collect()
    assert captures["capture"].to_list().count(request["capture"]) == 1
    kernels = tables.scan("kernels").collect()
    of_capture = kernels.filter(kernels["capture"] == request["capture"])
    assert of_capture["count"].sum() == 2 * 4  # of each rank two steps of a kernel and a copy
    assert sorted(of_capture["rank"].unique()) == [0, 1]
    assert len([path for path in files if path.name == request["capture"]]) == 1


@pytest.mark.parametrize(
    ("state", "when"),
    [
        pytest.param(state, when, marks=() if (state, when) in QUICK else pytest.mark.thorough)
        for state in STATES
        for when in ("before", "after")
    ],
)
def test_a_service_that_is_killed_at_a_state_goes_on(tmp_path: Path, state: str, when: str) -> None:
    store = tmp_path / "store"
    words = ["--store", str(store), "--workers", "1", "--lease", "2"]
    service = RunningService(tmp_path, *words, command=interrupted(state, when, signal.SIGKILL))
    try:
        with hosts_of([service], tmp_path) as hosts:
            name = ""
            with contextlib.suppress(OSError):
                name = service.ask("POST", "/api/v1/requests", body=WANTED)[1]["id"]

            def killed() -> bool:
                for host in hosts:
                    host.go_on()
                return not service.lives

            until(killed)
            service.start(command=None)
            until(lambda: leader([service]))
            requests = service.ask("GET", "/api/v1/requests")[1]["requests"]
            if (state, when) == ("announced", "before"):  # who asked heard nothing, and asks again
                assert requests == []
                hosts[0].beat(), hosts[1].beat()
                name = service.ask("POST", "/api/v1/requests", body=WANTED)[1]["id"]
            else:
                assert [request["id"] for request in requests] == [name or requests[0]["id"]]
                name = requests[0]["id"]
            request = ended([service], hosts, name)
            assert len(service.ask("GET", "/api/v1/requests")[1]["requests"]) == 1
            check_capture(Tables(str(store)), list((store / "captures").glob("*/*")), request)
            assert list((store / "from-hosts").iterdir()) == []
    finally:
        assert service.end() == 0, service.log.read_text()


@pytest.mark.parametrize(
    "state", [pytest.param(state, marks=pytest.mark.thorough) for state in STATES[:4]]
)
def test_an_agent_that_is_killed_at_a_state_goes_on_when_it_is_back(
    tmp_path: Path, state: str
) -> None:
    store = tmp_path / "store"
    service = RunningService(tmp_path, "--store", str(store), "--workers", "1")
    try:
        with hosts_of([service], tmp_path) as hosts:
            name = service.ask("POST", "/api/v1/requests", body=WANTED)[1]["id"]
            first, second = hosts
            if state != "announced":
                for host in hosts:
                    host.report(name, "armed")
            if state in {"running", "collecting"}:
                second.report(name, "running")
            if state == "collecting":
                first.upload(name)
                second.send(name, second.report(name, "uploading").missing[:1])
            assert service.ask("GET", f"/api/v1/requests/{name}")[1]["state"] == state
            second.close()  # and what it knew is gone: it begins anew with what is wanted of it
            check_capture(
                Tables(str(store)),
                list((store / "captures").glob("*/*")),
                ended([service], hosts, name),
            )
    finally:
        assert service.end() == 0, service.log.read_text()


@pytest.mark.thorough
def test_who_analyses_and_who_writes_the_tables_are_replaced_when_they_are_killed(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    service = RunningService(tmp_path, "--store", str(store), "--workers", "1")
    left = [
        "traceloom.fleet.service.worker",
        "traceloom.fleet.service.committer",
    ]  # the second has to write what the first made
    try:
        with hosts_of([service], tmp_path) as hosts:
            name = service.ask("POST", "/api/v1/requests", body=WANTED)[1]["id"]

            def look() -> bool:
                for host in hosts:
                    host.go_on()
                for child in psutil.Process(service.process.pid).children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if (
                            left and child.cmdline()[-1:] == left[:1]
                        ):  # it begins when there is something to do
                            child.kill()
                            del left[0]
                return not left

            until(look)
            request = ended([service], hosts, name)
            check_capture(Tables(str(store)), list((store / "captures").glob("*/*")), request)
    finally:
        assert service.end() == 0, service.log.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["commit", "analysing"])
def test_another_service_takes_over_and_who_only_slept_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    where = places("shared", tmp_path, monkeypatch)
    words = ["--store", where.store, "--state", where.state, "--workers", "1", "--lease", "3"]
    services: list[RunningService] = []
    try:
        for name in (
            "first",
            "second",
        ):  # as on two machines: what hosts send lies with the one that leads
            (tmp_path / name).mkdir()
            if services:  # of the same user, whose home is not the same here
                shutil.copytree(services[0].token_file.parent, tmp_path / name / "traceloom")
            command = interrupted(point, "before", signal.SIGSTOP) if name == "second" else None
            services.append(RunningService(tmp_path / name, *words, command=command))
            if name == "first":
                until(lambda: leader(services))
        first, second = services
        assert second.ask("GET", "/api/v1/hosts")[1]["error"]["slug"] == "not-leading"
        with hosts_of(services, tmp_path) as hosts:
            token = first.client().post("tokens", {"name": "op", "role": "operator"})["token"]
            request = first.ask("POST", "/api/v1/requests", token, WANTED)[1]["id"]
            for host in hosts:
                host.report(request, "armed")
            hosts[0].report(request, "running")
            hosts[0].upload(request)
            first.end(signal.SIGKILL)

            def stopped() -> bool:
                for host in hosts:
                    host.go_on()
                return "\nState:\tT" in Path(f"/proc/{second.process.pid}/status").read_text()

            until(
                stopped, 120
            )  # it took over, had the files sent again, and sleeps now at the point
            first.start()
            until(lambda: leader([first]))
            result = ended([first], hosts, request)
            check_capture(Tables(where.store), [Path(result["capture"])], result)
            second.process.send_signal(signal.SIGCONT)
            until(lambda: b"traceloom_fleet_leads 0.0" in second.ask("GET", "/metrics")[1])
            assert second.ask("GET", "/api/v1/hosts")[1]["error"]["slug"] == "not-leading"
            until(
                lambda: "leads now" in second.log.read_text()
            )  # what it was about to write was refused
            assert request_of(first, request) == result
            check_capture(Tables(where.store), [Path(result["capture"])], result)
    finally:
        for service in services:
            service.process.send_signal(signal.SIGCONT)
            assert service.end() == 0, service.log.read_text()
