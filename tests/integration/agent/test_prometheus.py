"""Debian's Prometheus scrapes an agent; what it has then answers our dashboard and that of dcgm-exporter."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.prometheus import Prometheus, free_port, prometheus, until
from traceloom.agent.accelerators.backend import DeviceEvent, DeviceProcess, Sample
from traceloom.agent.accelerators.simulated import SampleWriter, SimulatedAccelerator
from traceloom.agent.config import Accelerators, Config
from traceloom.errors import TraceloomError
from traceloom.server.client import AgentClient

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "agent" / "grafana-dashboard.json").read_bytes())
TOKEN = "a-token-of-this-test"
STEP_S, WAIT_S = 0.25, 0.05
TRAIN = f"train-{os.getpid()}"  # an agent sees the jobs of all tests that run beside it
# A rank that reports a step now and then. It knows the standard library alone, as a job in any language could.
JOB = f"""
import http.client, json, socket, sys, time
path = sys.argv[1]
while True:
    try:
        connection = http.client.HTTPConnection("agent")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        body = json.dumps({{"steps": [{STEP_S}, {STEP_S}], "loader_wait_seconds": {2 * WAIT_S}}})
        connection.request("POST", "/api/v1/steps", body, {{"Content-Type": "application/json"}})
        connection.getresponse().read()
    except OSError:
        pass  # the agent has not begun
    time.sleep(0.5)
"""
# The expressions of dcgm-exporter's dashboard (grafana.com/dashboards/12239): of its first versions, and since it
# distinguishes hosts by `Hostname` and partitions by their numbers.
DCGM = [
    expression.replace("{OF}", f"{{{labels}}}")
    for labels in ('instance=~"127.+", gpu=~"[0-7]"', 'Hostname=~"node1", gpu=~"[0-7]"')
    for expression in (
        "DCGM_FI_DEV_GPU_TEMP{OF}",
        "avg(DCGM_FI_DEV_GPU_TEMP{OF})",
        "DCGM_FI_DEV_POWER_USAGE{OF}",
        "sum(DCGM_FI_DEV_POWER_USAGE{OF})",
        "DCGM_FI_DEV_SM_CLOCK{OF} * 1000000",
        "DCGM_FI_DEV_GPU_UTIL{OF}",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{OF}",
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE{OF}",
        "DCGM_FI_DEV_FB_USED{OF}",
        "DCGM_FI_DEV_MEM_CLOCK{OF} * 1000000",
        "DCGM_FI_DEV_MEM_COPY_UTIL{OF}",
        "DCGM_FI_DEV_XID_ERRORS{OF}",
        "rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{OF}[10s]) / 1000",
        "max(DCGM_FI_DEV_GPU_TEMP{OF}) by (Hostname, gpu, uuid)",
        "sum(max(DCGM_FI_DEV_POWER_USAGE{OF}) by (gpu))",
        "max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{OF}) by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)",
        "max(DCGM_FI_DEV_FB_USED{OF}) by (Hostname, gpu, UUID)",
    )
]


def tree_of_sys(directory: Path) -> Path:
    """/sys of this host with an InfiniBand port besides, which hosts for tests lack."""
    (directory / "class").mkdir(parents=True)
    for entry in [*Path("/sys").iterdir(), *Path("/sys/class").iterdir()]:
        place = directory / entry.relative_to("/sys")
        if entry.name not in {"class", "infiniband"}:
            place.symlink_to(entry)
    port = directory / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n", encoding="ascii")
    for name, number in {"port_xmit_data": 1000, "port_rcv_data": 2000, "symbol_error": 3}.items():
        (port / "counters" / name).write_text(f"{number}\n", encoding="ascii")
    return directory


def recording(path: Path, pid: int) -> None:
    """Who is on device 0 and what happened to device 1, for an hour; simulated devices are idle of processes."""
    devices = SimulatedAccelerator(Config(host="node1", accelerators=Accelerators(simulated=2)))
    at_ns = time.time_ns()
    sample = Sample(
        at_ns=at_ns,
        devices=devices.devices(),
        processes=[DeviceProcess(device=devices.uuid(0), pid=pid, memory_bytes=2**30)],
        events=[
            DeviceEvent(
                at_ns=at_ns, device=devices.uuid(1), kind="xid", code=79, text="fell off the bus"
            )
        ],
    )
    writer = SampleWriter(path)
    writer.write(sample)
    writer.write(Sample(at_ns=at_ns + 3600 * 10**9))
    writer.close()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("Debian's package prometheus is not installed")
    directory = tmp_path_factory.mktemp("host")
    agent_socket, address = directory / "agent.sock", f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "TRACELOOM_JOB": TRAIN,
        "TRACELOOM_DTYPE": "bf16",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    with (directory / "log").open("wb") as log:
        job = subprocess.Popen([sys.executable, "-c", JOB, str(agent_socket)], env=environment)
        recording(directory / "devices.jsonl", job.pid)
        (directory / "agent.toml").write_text(
            f'host = "node1"\n[paths]\nsocket = "{agent_socket}"\nhistory = "{directory}/agent.db"\n'
            f'audit = "{directory}/audit.jsonl"\n[collect]\nperiod = 0.5\nsys = "{tree_of_sys(directory / "sys")}"\n'
            f'[history]\ninterval = 0.5\n[accelerators]\nrecorded = "{directory}/devices.jsonl"\n'
            f'backends = ["simulated", "recorded"]\nsimulated = 8\n'
            f'[[tcp.tokens]]\nname = "prometheus"\nsha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"\n',
            encoding="utf-8",
        )
        agent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "traceloom",
                "agent",
                "run",
                "--config",
                str(directory / "agent.toml"),
                "--tcp",
                address,
                "--compat",
                "dcgm",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            (directory / "token").write_text(TOKEN, encoding="ascii")
            configuration = {
                "scrape_configs": [
                    {
                        "job_name": "traceloom",
                        "scrape_interval": "1s",
                        "static_configs": [{"targets": [address]}],
                        "authorization": {"credentials_file": str(directory / "token")},
                    }
                ]
            }

            def begun() -> Any:
                assert agent.poll() is None, (directory / "log").read_text(encoding="utf-8")
                try:
                    return AgentClient(agent_socket).get("status")["devices"] == 8
                except TraceloomError:
                    return False

            until(begun)
            with prometheus(directory / "prometheus", json.dumps(configuration)) as server:
                yield server
        finally:
            job.kill()
            job.wait()
            agent.send_signal(signal.SIGTERM)
            agent.wait(60)
    assert "Traceback" not in (directory / "log").read_text(encoding="utf-8")


def filled(expression: str) -> str:
    """With what Grafana puts in for its variables: the job is ours, whatever else runs on this host."""
    values = {"$instance": ".*", "$job": TRAIN, "$__rate_interval": "20s"}
    return re.sub(r"\$\w+", lambda match: values[match[0]], expression)


def test_every_panel_of_the_dashboard_has_an_answer(answers: Prometheus) -> None:
    for expression in [
        target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
    ]:
        if "pressure" in expression and not Path("/proc/pressure/cpu").exists():
            continue  # this kernel was built without
        until_answered(answers, filled(expression))


def until_answered(answers: Prometheus, expression: str) -> list[dict[str, Any]]:
    try:
        return until(lambda: answers.ask(expression))
    except AssertionError as error:
        raise AssertionError(f"nothing answers {expression}") from error


def test_every_panel_of_the_dashboard_of_dcgm_exporter_has_an_answer(answers: Prometheus) -> None:
    for expression in DCGM:
        series = until_answered(answers, expression)
        if "XID" not in expression:  # which one device had
            assert len(series) == (1 if re.match("avg|sum", expression) else 8), expression


def test_both_names_of_a_metric_have_one_value(answers: Prometheus) -> None:
    for theirs, ours in {
        "sum(DCGM_FI_DEV_SM_CLOCK) * 1e6": 'sum(traceloom_gpu_clock_hertz{domain="sm"})',
        "sum(DCGM_FI_DEV_FB_USED) * 1024 * 1024": "sum(traceloom_gpu_memory_used_bytes)",
        "sum(DCGM_FI_DEV_POWER_USAGE)": "sum(traceloom_gpu_power_watts)",
        "max(DCGM_FI_DEV_XID_ERRORS)": "max(traceloom_gpu_last_xid)",
    }.items():
        until_answered(answers, f"abs({theirs} / {ours} - 1) < 1e-4")
    assert answers.number("max(DCGM_FI_DEV_XID_ERRORS)") == 79


def test_jobs_and_their_steps_are_what_the_job_reported(answers: Prometheus) -> None:
    panels = {
        panel["title"]: panel["targets"][0]["expr"]
        for panel in DASHBOARD["panels"]
        if "targets" in panel
    }
    (job,) = until_answered(answers, filled(panels["Jobs"]))
    assert (job["metric"]["exported_job"], job["metric"]["job"]) == (TRAIN, "traceloom")
    assert float(job["value"][1]) == 1.0
    (process,) = until_answered(answers, filled(panels["Processes on devices"]))
    assert (process["metric"]["rank"], process["metric"]["exported_job"]) == ("0", TRAIN)
    until_answered(answers, filled(panels["Mean step time by rank"]))
    assert answers.number(filled(panels["Mean step time by rank"])) == pytest.approx(STEP_S)
    until_answered(answers, filled(panels["Waits for the data loader"]))
    assert answers.number(filled(panels["Waits for the data loader"])) == pytest.approx(
        WAIT_S / STEP_S
    )
    # It declares its type: the bounds of its FLOP/s are the same.
    until(
        lambda: answers.ask(
            'abs(traceloom_job_flops{bound="low"} - ignoring (bound) traceloom_job_flops{bound="high"}) < 1'
        )
    )


def test_an_error_of_a_device_is_seen_when_it_comes_first(answers: Prometheus) -> None:
    """Its counter begins at 1, which is no increase to Prometheus."""
    panel = next(panel for panel in DASHBOARD["panels"] if panel["title"].startswith("Errors"))
    shown = [
        series
        for target in panel["targets"]
        for series in until_answered(answers, filled(target["expr"]))
        if float(series["value"][1]) > 0
    ]
    assert [(series["metric"]["index"], series["metric"]["xid"]) for series in shown] == [
        ("1", "79")
    ]


def test_every_question_of_the_how_to_has_an_answer(answers: Prometheus) -> None:
    page = (ROOT / "docs" / "how-to" / "agent-prometheus.md").read_text(encoding="utf-8")
    questions = re.findall(r"^\| .+\? \| `(.+)` \|$", page, re.MULTILINE)
    assert len(questions) >= 7
    for question in questions:
        if "pressure" not in question or Path("/proc/pressure/cpu").exists():
            until_answered(answers, question)


def test_variables_of_the_dashboard_have_values(answers: Prometheus) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert match is not None
            series = until_answered(answers, filled(match[1]))
            assert all(match[2] in each["metric"] for each in series), variable["query"]


def test_prometheus_takes_every_series_of_a_scrape(answers: Prometheus) -> None:
    until(lambda: answers.ask("up == 1"))
    assert (
        answers.number("scrape_samples_scraped")
        == answers.number("scrape_samples_post_metric_relabeling")
        > 400
    )
