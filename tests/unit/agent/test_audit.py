"""The audit log: one line each, nothing is ever cut, no disk stops the agent."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from traceloom.agent import audit
from traceloom.agent.audit import AuditLog


def test_lines_are_added_and_cannot_be_forged(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log" / "audit.jsonl")
    log.write("uid 1000", "pause", "done", pid=7)
    log.write('evil\n{"who": "uid 0"}', "pa\x1b[2Juse", "not-allowed")
    AuditLog(log.path).write("uid 0", "pause", "done")  # after a restart
    lines = log.path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["who"] for line in lines] == [
        "uid 1000",
        'evil\n{"who": "uid 0"}',
        "uid 0",
    ]
    assert "\x1b" not in lines[1]
    assert log.path.stat().st_mode & 0o027 == 0


def test_many_threads_never_mix_lines(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    threads = [
        threading.Thread(
            target=lambda name=name: [
                log.write(f"uid {name}", "x" * 500, "done") for _ in range(50)
            ]
        )
        for name in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        len([json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]) == 200
    )


def test_a_disk_that_refuses_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    log = AuditLog(tmp_path / "file" / "audit.jsonl")
    log.write("uid 1", "pause", "done")
    assert log.lost == 1
    assert "file exists" in log.last_error
    (tmp_path / "file").unlink()
    log.write("uid 1", "pause", "done")
    assert (log.lost, log.last_error) == (1, "")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("", encoding="utf-8")
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "target")
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("uid 1", "pause", "done")
    assert log.lost == 1
    assert not (tmp_path / "target").read_text(encoding="utf-8")


def test_the_oldest_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 100)
    monkeypatch.setattr(audit, "MAX_FILES", 3)
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(40):
        log.write("uid 1", f"request {number}", "done")
    assert len(list(tmp_path.iterdir())) <= 3 + 1
    kept = "".join(file.read_text(encoding="utf-8") for file in tmp_path.iterdir())
    assert "request 39" in kept
    assert 'request 3"' not in kept


def test_a_large_file_is_put_aside_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 300)
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(12):
        log.write("uid 1", f"request {number}", "done")
    lines = [
        line
        for file in sorted(tmp_path.iterdir())
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert len(list(tmp_path.iterdir())) > 1
    assert sorted(json.loads(line)["what"] for line in lines) == sorted(
        f"request {number}" for number in range(12)
    )


def test_a_line_is_short_whatever_was_asked_for(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("uid 1000", "/api/v1/requests", "not-allowed", wanted={"ranks": [10**9] * 65_536})
    (line,) = log.path.read_text(encoding="utf-8").splitlines()
    assert len(line) < 10_000
    entry = json.loads(line)
    assert (entry["who"], entry["what"], entry["result"]) == (
        "uid 1000",
        "/api/v1/requests",
        "not-allowed",
    )
    assert '"ranks":[1000000000' in entry["cut"]
