"""The commands of the agent's how-to pages run, in their order and as they stand but for addresses and paths."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import traceloom
from support.prometheus import free_port, prometheus, until
from traceloom.server.client import AgentClient
from traceloom.testing import TraceBuilder

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
# What a test must not do here: install, and change the system. Everything else runs.
LEFT_OUT = ("pip", "sudo", "python3", "cp", "systemctl", "traceloom agent stacks --pid 4711")
# In a shell, `agent run` goes on in the background until the page starts another one, and `top` gives one picture.
FUNCTIONS = """
set -euo pipefail
stop() { if [ -n "${AGENT:-}" ]; then kill "$AGENT"; wait "$AGENT" || true; AGENT=; fi; }
trap stop EXIT
traceloom() {
    if [ "$2" = run ]; then
        stop
        "$PYTHON" -m traceloom "$@" --config agent.toml >> agent.log 2>&1 &
        AGENT=$!
        for _ in $(seq 600); do
            "$PYTHON" -m traceloom agent status --config agent.toml > /dev/null 2>&1 && return
            kill -0 "$AGENT" || { cat agent.log >&2; return 1; }
        done
        return 1
    elif [ "$2" = top ]; then "$PYTHON" -m traceloom "$@" --once --config agent.toml
    else "$PYTHON" -m traceloom "$@" --config agent.toml
    fi
}
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL
    )


def script(page: str, directory: Path, port: int) -> str:
    """The page's blocks, each of which is announced; lines of what is left out are taken away, with what they go on."""
    parts = [FUNCTIONS]
    for number, block in enumerate(blocks(page, "bash")):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        kept = [line for line in lines if not line.startswith(LEFT_OUT)]
        parts.append("\n".join([f"echo == block {number}", *kept]))
    text = "\n".join(parts)
    places = {
        "127.0.0.1:9465": f"127.0.0.1:{port}",
        "/run/traceloom/agent.sock": f"{directory}/agent.sock",
        "/run/gpu-jobs": f"{directory}/gpu-jobs",
        "--pid 4711": '--pid "$JOB"',
    }
    for place, here in places.items():
        text = text.replace(place, here)
    return text


@contextmanager
def job_of_slurm() -> Iterator[int]:
    """A process of the job that the pages speak of: its pid."""
    environment = {**os.environ, "SLURM_JOB_ID": "4242"}
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment
    ) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def run(page: str, directory: Path, more: str = "", *, pid: int = 0) -> str:
    """Run the page; what it printed."""
    (directory / "agent.toml").write_text(
        f'[paths]\nsocket = "{directory}/agent.sock"\nhistory = "{directory}/agent.db"\naudit = "{directory}/audit.jsonl"\n'
        f"[collect]\nperiod = 0.5\n[history]\ninterval = 0.5\n{more}",
        encoding="utf-8",
    )
    (directory / "gpu-jobs").mkdir()
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(Path(traceloom.__file__).parents[1]),
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_GPUS": "0,1",  # as a prolog has them
        "JOB": str(pid),
    }
    done = subprocess.run(
        ["bash", "-c", script(page, directory, free_port())],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(autouse=True)
def _tools() -> None:
    if missing := [
        tool for tool in ("bash", "curl", "openssl", "sha256sum") if shutil.which(tool) is None
    ]:
        pytest.skip(f"{', '.join(missing)} not installed")


def test_commands_of_watch_a_host(tmp_path: Path) -> None:
    trace = TraceBuilder(device_name="NVIDIA H100 80GB HBM3")
    for step in range(4):
        trace.step(step, 1000.0 * step, 1000).launch(
            "cudaMemcpyAsync", 1000.0 * step + 10, 1, correlation=step + 1
        )
        trace.copy(
            "Memcpy HtoD (Pinned -> Device)",
            1000.0 * step + 30,
            90,
            bytes=1_000_000,
            correlation=step + 1,
        )
    (tmp_path / "run1").mkdir()
    trace.write(tmp_path / "run1" / "rank0.json")
    with job_of_slurm() as pid:
        out = run("agent.md", tmp_path, pid=pid)
    assert {
        path.name: path.read_text(encoding="ascii") for path in (tmp_path / "gpu-jobs").iterdir()
    } == {
        "0": "4242\n",
        "1": "4242\n",
    }
    for words in ("slurm-4242", "Processes", "do not work", "traceloom_host_network_bytes_total"):
        assert words in out


def test_commands_of_the_page_about_prometheus(tmp_path: Path) -> None:
    out = run("agent-prometheus.md", tmp_path)
    assert out.count("traceloom_gpu_busy_ratio{") == 8
    assert re.search(r"^[0-9a-f]{64}  -$", out, re.MULTILINE)


def test_configurations_of_the_page_about_prometheus(tmp_path: Path) -> None:
    """What the page has one put into files lets Prometheus see the devices and, by the token, the jobs."""
    if shutil.which("prometheus") is None:
        pytest.skip("Debian's package prometheus is not installed")
    token, address = "a" * 64, f"127.0.0.1:{free_port()}"
    (tmp_path / "traceloom.token").write_text(token, encoding="ascii")
    sum_of_token = (
        subprocess.run(["sha256sum"], input=token.encode(), capture_output=True, check=True)
        .stdout[:64]
        .decode()
    )
    (toml,) = blocks("agent-prometheus.md", "toml")
    (yml,) = blocks("agent-prometheus.md", "yaml")
    (tmp_path / "agent.toml").write_text(
        f'[paths]\nsocket = "{tmp_path}/agent.sock"\nhistory = "{tmp_path}/agent.db"\naudit = "{tmp_path}/audit.jsonl"\n'
        f"[collect]\nperiod = 0.5\n[history]\ninterval = 0.5\n"
        + toml.replace("the sum: 64 hexadecimal digits", sum_of_token),
        encoding="utf-8",
    )
    configuration = yaml.safe_load(
        yml.replace("/etc/prometheus", str(tmp_path)).replace("127.0.0.1:9465", address)
    )
    configuration["scrape_configs"][0]["scrape_interval"] = "1s"
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "agent",
        "run",
        "--simulate",
        "2",
        "--tcp",
        address,
    ]
    with (
        job_of_slurm(),
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [*command, "--config", str(tmp_path / "agent.toml")], stdout=log, stderr=log
        ) as agent,
    ):
        try:
            until((tmp_path / "agent.sock").exists)
            assert AgentClient(tmp_path / "agent.sock", 60).get("status")["host"]
            with prometheus(tmp_path / "prometheus", yaml.safe_dump(configuration)) as server:
                until(lambda: len(server.ask("traceloom_gpu_busy_ratio")) == 2)
                until(
                    lambda: server.ask(
                        'traceloom_job_info{exported_job="slurm-4242", job="traceloom"}'
                    )
                )
        finally:
            agent.terminate()
