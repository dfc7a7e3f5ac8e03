"""The commands of the page about questions print what the page says, asked of a service in a process of its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import fill  # noqa: E402
from support.prometheus import free_port  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.cli import main  # noqa: E402
from traceloom.fleet.store.tables import Tables  # noqa: E402
from traceloom.testing.fleet_weeks import build_weeks  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "questions.md"
COMMAND = re.compile(r"^\$ traceloom (.*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A service of this user, whose tables hold made weeks."""
    tables = Tables(str(tmp_path / "store"))
    tables.create()
    fill(tables, build_weeks())
    url = f"127.0.0.1:{free_port()}"
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("TRACELOOM_SERVER", f"http://{url}")
    log = tmp_path / "serve.log"
    words = [
        sys.executable,
        "-m",
        "traceloom",
        "serve",
        "--store",
        str(tmp_path / "store"),
        "--address",
        url,
    ]
    with (
        log.open("wb") as out,
        subprocess.Popen(words, stdout=out, stderr=out, env=dict(os.environ)) as process,
    ):
        try:
            until(lambda: b"answers at" in log.read_bytes() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()
            assert process.wait(60) == 0, log.read_text()


@pytest.mark.usefixtures("served")
def test_commands_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    for name, block in zip(
        ("owners.toml", "prices.toml"),
        re.findall(r"```toml\n(.*?)```", text, re.DOTALL),
        strict=True,
    ):
        Path(name).write_text(block, encoding="utf-8")
    printed = text
    for command, output in COMMAND.findall(text):
        assert main(shlex.split(command)) == 0, capsys.readouterr().err
        now = capsys.readouterr().out
        printed = printed.replace(
            f"$ traceloom {command}\n{output}", f"$ traceloom {command}\n{now}", 1
        )
    (tmp_path / "questions.md").write_text(printed, encoding="utf-8")
    assert printed == text, f"the page as it should be: {tmp_path / 'questions.md'}"
