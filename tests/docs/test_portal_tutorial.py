"""The tutorial about pages, as it is written: a service, an agent and a job beside one another, and a trace of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("torch", "htpy", "sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="torch or the extra `fleet` is not installed")

from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's"),
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "portal.md"
JOB = f"tutorial-{os.getpid()}"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def in_a_fresh_place(folder: Path, install: str) -> Path:
    """The Python of a new environment, after what the tutorial installs by pip: this source as a wheel."""
    source, wheels = PAGE.parents[2], folder / "wheels"

    def run(*command: str | Path) -> None:
        done = subprocess.run(
            [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "wheel", source, "--no-deps", "-w", wheels)
    run(sys.executable, "-m", "venv", folder / "fresh")
    [wheel] = wheels.glob("traceloom-*.whl")
    words = [re.sub(r"^traceloom(?=\[)", str(wheel), word) for word in shlex.split(install)]
    assert words[:2] == ["pip", "install"]
    run(folder / "fresh" / "bin" / "pip", *words[1:], "-c", source / "constraints.txt")
    return folder / "fresh" / "bin" / "python"


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tl"))  # names of sockets are short
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("installed", ["here", "by pip"])
def test_a_job_is_traced_from_a_page_by_what_the_tutorial_says(
    folder: Path, installed: str
) -> None:
    install, cat, agent, job = blocks("bash")
    assert install.splitlines()[1] == "traceloom serve"
    began = time.monotonic()
    python = (
        Path(sys.executable)
        if installed == "here"
        else in_a_fresh_place(folder, install.splitlines()[0])
    )
    (folder / "train.py").write_text(blocks("python")[0])
    # The same commands, beside whatever else runs on this machine.
    config = folder / "agent.toml"
    config.write_text(
        f'[paths]\nsocket = "{folder}/s"\nhistory = "{folder}/a.db"\nkineto = "{folder}/k"\n'
    )
    commands = folder / "bin" / "traceloom"
    commands.parent.mkdir()
    commands.write_text(f'#!/bin/sh\nexec {python} -m traceloom "$@"\n')
    commands.chmod(0o755)
    bare = (
        [] if installed == "here" else ["env", "-u", "PYTHONPATH"]
    )  # nothing of the source stands in the way
    service = RunningService(folder, command=[*bare, str(python), "-m", "traceloom", "serve"])
    environment = service.environment | {
        "PATH": f"{commands.parent}:{python.parent}:{os.environ['PATH']}"
    }
    if bare:
        del environment["PYTHONPATH"]

    def start(script: str) -> subprocess.Popen[bytes]:
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                ["bash", "-euc", script],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    started: list[subprocess.Popen[bytes]] = []
    try:
        # as the user's HOME is: the test's own
        token = subprocess.run(
            ["bash", "-euc", cat.replace("~/.config", str(folder))],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        cookie = service.signed_in(token)
        until(lambda: "No host belongs to the fleet yet" in service.browse("/", cookie).text)
        joining = service.browse("/hosts", cookie, {"host": "", "days": ""}).text
        (folder / "host.token").write_text(re.findall(r"tle_[\w-]+", joining)[0])
        started.append(
            start(
                agent.replace("http://127.0.0.1:9466", service.url).replace(
                    "run ", f"run --config {config} "
                )
            )
        )
        until(lambda: ">here<" in service.browse("/hosts", cookie).text)
        started.append(
            start(
                job.replace("agent env", f"agent env --config {config}").replace(
                    "=tutorial", f"={JOB}"
                )
            )
        )
        until(lambda: JOB in service.browse("/jobs?jobs.q=all", cookie).text, 120)
        form = {"by": "steps", "length": "3", "profilers": "timeline"}
        asked = service.browse(f"/jobs/{JOB}", cookie, form)
        assert asked.status == 303, asked.text
        request = asked.headers["Location"]
        until(lambda: "The trace is there" in service.browse(request, cookie).text, 300)
        [report] = re.findall(
            r'href="(/captures/[^"]+)"[^>]*>Open the report', service.browse(request, cookie).text
        )
        assert JOB in service.browse(report, cookie).text
        print(f"{installed}: the trace stands on the page after {time.monotonic() - began:.0f} s")
    except BaseException:
        print((folder / "log").read_text())
        raise
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
        assert service.end() == 0
