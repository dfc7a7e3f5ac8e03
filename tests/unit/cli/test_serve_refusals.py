"""What `traceloom serve` cannot do it says before it begins, in one line, and leaves nothing running."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn", "htpy"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from traceloom.cli import main  # noqa: E402


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "a-file").write_text("no directory")
    return tmp_path


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--proxy-from", "127.0.0.1"], 2, ["wrong-usage", "go together"]),
        (
            ["--proxy-from", "no network", "--proxy-user-header", "X-User"],
            2,
            ["wrong-usage", "no such proxy"],
        ),
        (["--store", "s3://bucket/x"], 2, ["wrong-usage", "need a state beside them"]),
        (["--store", "ftp://bucket/x"], 2, ["wrong-usage", "no object store has such addresses"]),
        (["--demo", "--state", "s.db"], 2, ["wrong-usage", "a demo keeps its state in its store"]),
        (["--state", "mysql://u@h/d"], 2, ["wrong-usage", "SQLite or PostgreSQL"]),
        (["--engine", "abacus"], 2, ["unknown-engine", "abacus"]),
        (["--engine", "dask://nowhere"], 2, ["wrong-usage", "HOST:PORT"]),
        (["--engine", "dask://192.0.2.1:8786"], 2, ["engine-without-tls"]),
        (["--webhooks-to", "no network"], 3, ["wrong-config", "that is no network"]),
        (["--address", "0.0.0.0:0"], 3, ["tcp-without-tls"]),
        (["--address", "127.0.0.1:0", "--certificate", "no.pem"], 3, ["tls-unusable"]),
        (["--store", "{home}/a-file"], 3, ["cannot-write"]),
        (["--address", "127.0.0.1:{taken}"], 3, ["socket-unusable", "another may run there"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_cannot_be_is_refused(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: list[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        children = {child.pid for child in psutil.Process().children()}
        assert main(["serve", *(text.format(home=home, taken=port) for text in arguments)]) == code
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    for word in words:
        assert word in output.err
    assert not output.out
    assert {
        child.pid for child in psutil.Process().children()
    } <= children  # the writer of tables has ended


def test_tables_that_cannot_be_read_stop_it_with_their_reason(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = home / "traceloom" / "fleet" / "tables" / "kernels" / "_delta_log"
    log.mkdir(parents=True)
    (log / "00000000000000000000.json").write_text("no log")
    assert main(["serve", "--address", "127.0.0.1:0"]) == 3
    error = capsys.readouterr().err
    assert "unreadable" in error
    assert "kernels" in error
