"""A service to which jobs, rules and webhooks talk, as users run it: over HTTP, with commands, and a host that is ours."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402
from support.webhooks import is_genuine, receiver  # noqa: E402
from traceloom.agent.fleet_link.client import ServiceClient, ServiceError  # noqa: E402
from traceloom.agent.fleet_link.protocol import (  # noqa: E402
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostProcess,
    HostReport,
    ReportResponse,
    UsageRow,
)
from traceloom.fleet.store.tables import Tables  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "autoprofile.md"
# The loop of the page, until its trace is asked for.
LOOP = """
import sys, time
batches = iter(lambda: bool(profile.request or profile.last_error), True)
def train(_batch):
    time.sleep(0.02)
{example}
print(profile.request, profile.last_error)
"""


class JobHost:
    """A host that joined the fleet, and tells of jobs as agents do."""

    def __init__(self, service: RunningService, *jobs: str) -> None:
        token = service.client().post("agents", {"host": "node1", "days": 1})["token"]
        self.client = ServiceClient(service.url)
        self.client.credential = self.client.post(
            "agents/enrol", Enrolment(token=token, host="node1"), HostCredentials
        ).credential
        self.processes = [
            HostProcess(
                key=f"{job}{rank}@1",
                pid=rank + 1,
                uid=0,
                job=job,
                rank=rank,
                user="ada",
                polls=True,
                steps=100_000,
                steps_per_second=10.0,
            )
            for job in jobs
            for rank in range(2)
        ]

    def beat(self, *usage: UsageRow) -> None:
        beat = Heartbeat(
            sent_ns=time.time_ns(),
            boot_id="b",
            version="1",
            processes=self.processes,
            usage=list(usage),
        )
        self.client.post("agents/node1/heartbeat", beat, HeartbeatResponse)

    def fail(self, request: str) -> None:
        report = HostReport(state="failed", reason="quota", detail="the disk is full")
        self.client.post(f"agents/node1/requests/{request}", report, ReportResponse)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    running = RunningService(tmp_path_factory.mktemp("fleet"), "--webhooks-to", "127.0.0.1")
    yield running
    assert running.end() == 0


@pytest.fixture(scope="module")
def host(service: RunningService) -> Iterator[JobHost]:
    until(lambda: service.client().get("check"))
    host = until(lambda: _joined(service))
    yield host
    host.client.close()


def _joined(service: RunningService) -> JobHost | None:
    """Once the service leads."""
    try:
        return JobHost(service, "train", "idle")
    except ServiceError as error:
        if error.slug != "not-leading":
            raise
        return None


@pytest.mark.thorough
def test_ranks_of_a_loop_ask_for_one_trace_and_say_what_the_job_is(
    service: RunningService, host: JobHost
) -> None:
    host.beat()
    variables = {"TRACELOOM_TOKEN": service.token, "TRACELOOM_JOB": "train"}
    [example] = [part for part in PAGE.read_text().split("```") if part.startswith("python\n")]
    example = example.removeprefix("python\n").replace(
        "https://fleet.example.org:9466", service.url
    )
    command = [sys.executable, "-c", LOOP.format(example=example)]
    nobody = {
        name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}
    }
    # Two do not know their rank; of two ranks that do, the second would wait for ever.
    loops = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**nobody, **variables},
        )
        for _ in range(2)
    ]
    asked = [loop.communicate(timeout=120) for loop in loops]
    requests = [
        request
        for request in service.client().get("requests")["requests"]
        if request["spec"]["job"] == "train"
    ]
    assert [[f"{request['id']} \n" for request in requests]] * 2 == [[out] for out, _ in asked], (
        asked
    )
    assert (requests[0]["who"], requests[0]["spec"]["steps"]) == (
        f"local@{socket.gethostname()}",
        3,
    )
    tables = Tables(str(service.folder / "store"))
    rows = until(lambda: tables.scan("jobs").filter(job="train").collect().to_dicts())
    assert [(row["model"], row["user"], row["framework"]) for row in rows] == [("gpt", "ada", None)]


def test_a_rule_that_is_set_traces_a_job_and_a_webhook_hears_how_it_ended(
    service: RunningService, host: JobHost, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[triggers]]\nname = "idle"\non = "usage"\nbusy_below = 0.5\nminutes = 1\nwhere = {job = "idle"}\n'
    )
    assert "idle" in service.run("fleet", "triggers", "set", str(rules))
    assert service.run("fleet", "triggers", "show") == rules.read_text()
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[budgets]\n")
    service.run("fleet", "triggers", "set", str(wrong), code=3)
    with receiver() as hook:
        secret = service.run(
            "fleet", "webhooks", "add", "ci", hook.url, "--events", "request.failed"
        ).strip()
        service.run("fleet", "webhooks", "test", "ci")
        assert is_genuine(secret, hook.came[0])
        service.run("fleet", "webhooks", "add", "metadata", "http://169.254.169.254/", code=3)
        minute = time.time_ns() // 60_000_000_000 - 1
        host.beat(
            UsageRow(
                minute=minute, device="g", job="idle", state="idle-allocated", device_ms=60_000
            )
        )

        def fired() -> str:
            [rule] = service.client().get("triggers")["rules"]
            return rule["last"]["request"] if rule["last"] is not None else ""

        request = until(fired)
        assert service.client().get(f"requests/{request}")["trigger"]["rule"] == "idle"
        host.fail(request)
        until(lambda: len(hook.came) == 2)
        body = json.loads(hook.came[1].body)
        assert is_genuine(secret, hook.came[1])
        assert (body["event"], body["request"]["id"], body["request"]["job"]) == (
            "request.failed",
            request,
            "idle",
        )
        assert "the disk is full" in body["request"]["detail"]
        [listed] = until(
            lambda: [
                w
                for w in json.loads(service.run("fleet", "webhooks", "--json"))["webhooks"]
                if w["delivered"]
            ]
        )
        assert (listed["waiting"], listed["error"], "secret" in listed) == (0, "", False)
        service.run("fleet", "webhooks", "remove", "ci")
    assert secret not in (service.folder / "serve.log").read_text()
    assert secret not in json.dumps(service.client().get("audit"))
