"""Whether attaching is allowed here: what Yama and the agent's rights say, and what would help."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from support.agent_server import locations_in
from support.host_tree import HostTree
from traceloom.agent.attach.injection import (
    explain_attach_refusal,
    is_architecture_supported,
    is_ptrace_allowed,
)
from traceloom.agent.config import Config, Traces
from traceloom.agent.doctor import examine_without_agent

pytestmark = pytest.mark.skipif(
    not is_architecture_supported(), reason=f"not for {platform.machine()}"
)
NOBODY, ROOT = "0000000000000000", "000001ffffffffff"


@pytest.mark.parametrize(
    ("scope", "rights", "why", "helps"),
    [
        (None, NOBODY, "", ""),
        ("0\n", NOBODY, "", ""),
        ("1\n", ROOT, "", ""),
        ("2\n", ROOT, "", ""),
        ("1\n", NOBODY, "lets parents and root alone", "run the agent as root"),
        ("2\n", NOBODY, "lets parents and root alone", "ptrace_scope to 0"),
        ("3\n", ROOT, "forbids it to everybody", "started again"),
    ],
)
def test_yama(tmp_path: Path, scope: str | None, rights: str, why: str, helps: str) -> None:
    if not is_ptrace_allowed():
        pytest.skip("ptrace(2) is refused here")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tpython\nCapEff:\t{rights}\n", encoding="ascii")
    if scope is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(scope, encoding="ascii")
    found_why, found_helps = explain_attach_refusal(tmp_path)
    assert bool(found_why) == bool(why)
    assert why in found_why
    assert helps in found_helps


@pytest.mark.parametrize("on", [False, True])
def test_the_doctor_says_whether_it_is_switched_on(tmp_path: Path, on: bool) -> None:
    tree = HostTree(tmp_path)
    config = Config(collect=tree.config().collect, traces=Traces(attach=on))
    (check,) = [
        check
        for check in examine_without_agent(config, locations_in(tmp_path))
        if check.name == "attach"
    ]
    assert (check.area, check.works) == (
        "traces",
        "yes" if on and not explain_attach_refusal()[0] else "no",
    )
    if not on:
        assert "switched off" in check.why
