"""agent.toml: every key has a default, and what is wrong is refused with its place and the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceloom.agent.config import Config, MetricRule, Paths, XidRule, load, resolve_paths
from traceloom.errors import InputError
from traceloom.server.settings import host_and_port


def _load(directory: Path, text: str) -> Config:
    path = directory / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert _load(tmp_path, "") == Config()


def test_values_are_read(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        'host = "a"\ncompat = ["dcgm"]\n[collect]\nperiod = 2\nperiods = { cpu = 0.5 }\n[history]\nhours = 1.5\n',
    )
    assert (config.host_name, config.compat, config.collect.period, config.collect.periods) == (
        "a",
        ("dcgm",),
        2.0,
        {"cpu": 0.5},
    )
    assert config.history.hours == 1.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[collect]\nperid = 3\n", ["collect.perid", "did you mean `period`"]),
        ("[colect]\n", ["`colect`", "did you mean `collect`"]),
        ('[collect]\nperiod = "often"\n', ["expected `float`", "collect.period"]),
        ('[[tcp.tokens]]\nsha256 = "a"\nnam = "b"\n', ["nam"]),
        ("[collect]\nperiod = 0\n", ["> 0", "collect.period"]),
        ("[collect]\ntimeouts = { disks = -1 }\n", ["> 0", "collect.timeouts"]),
        ("x =\n", ["not TOML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        _load(tmp_path, text)
    assert raised.value.slug == "wrong-config"
    assert all(word in str(raised.value) for word in words)


METRIC = '[[triggers]]\nname = "a"\non = "metric"\nmetric = "dataloader_wait_seconds_total"\n'


def test_rules_are_read(tmp_path: Path) -> None:
    text = (
        METRIC
        + 'above = 1\nfor = 30\nwhere = { job = "x" }\n[[triggers]]\nname = "b"\non = "xid"\ncodes = [79]\n'
    )
    waits, xid = _load(tmp_path, text).triggers
    assert isinstance(waits, MetricRule)
    assert (waits.above, waits.for_seconds, waits.where, waits.cooldown) == (
        1.0,
        30.0,
        {"job": "x"},
        900.0,
    )
    assert isinstance(xid, XidRule)
    assert (xid.name, xid.codes, xid.target) == ("b", (79,), "job")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (METRIC + "abve = 1", ["`triggers.abve`", "did you mean `above`"]),
        (
            METRIC.replace('"metric"', '"metrik"') + "above = 1",
            ['`on = "metrik"`', "did you mean `metric`"],
        ),
        (METRIC.replace('on = "metric"', "") + "above = 1", ["no `on", "step-regression"]),
        (
            METRIC.replace("loader_", "loadr_") + "above = 1",
            ["no such metric", "did you mean `dataloader_wait_seconds_total`"],
        ),
        (
            METRIC.replace("dataloader_wait_seconds_total", "step_seconds") + "above = 1",
            ["no single value", "step-regression"],
        ),
        (METRIC, ["`a` needs one of `above`, `below`"]),
        (METRIC + "above = 1\nbelow = 2", ["`a` needs one of"]),
        (METRIC + "changed = 1", ["`changed` and `within` go together"]),
        (METRIC + "absent = 1\nfor = 2", ["`for` goes with"]),
        (METRIC + "above = 1\nsteps = 1\nduration = 2", ["both `steps` and `duration`"]),
        (METRIC + 'above = 1\nwhere = { jb = "x" }', ["`where.jb`", "did you mean `job`"]),
        (
            METRIC + 'above = 1\ntarget = "rank"',
            ["Invalid enum value".lower(), "triggers[0].target"],
        ),
        (METRIC + "above = 1\n" + METRIC + "below = 1", ["two triggers have the name `a`"]),
        (
            '[[triggers]]\nname = "../b"\non = "oom-kill"',
            ["at most 63 letters, digits", "triggers[0].name"],
        ),
        ('[[triggers]]\nname = "b"\non = "cadence"', ["every"]),
        ("[trigger_budget]\nshare = 2", ["<= 1", "trigger_budget.share"]),
        ("triggers = [3]", ["triggers[0]"]),
        ("triggers = {}", ["triggers"]),
    ],
)
def test_rules_that_are_wrong(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        _load(tmp_path, text)
    assert raised.value.slug == "wrong-config"
    assert all(word in f"{raised.value} {raised.value.hint}" for word in words), str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        load(tmp_path / "none.toml")
    assert raised.value.slug == "unreadable"


def test_a_user_has_places_of_the_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own = resolve_paths(Config())
    assert own.socket == tmp_path / "run" / "traceloom" / "agent.sock"
    assert own.history == tmp_path / "state" / "traceloom" / "agent.db"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert resolve_paths(Config()).socket == Path("/run/traceloom/agent.sock")


def test_what_is_not_named_lies_beside_what_is() -> None:
    """A second agent, which names a socket and a history of its own, shares nothing with the first."""
    other = resolve_paths(
        Config(paths=Paths(socket="/run/other/agent.sock", history="/var/lib/other/agent.db"))
    )
    assert (other.kineto, other.requests, other.traces) == (
        Path("/run/other/kineto"),
        Path("/var/lib/other/requests.db"),
        Path("/var/lib/other/traces"),
    )


def test_a_directory_of_its_own_holds_all_of_a_second_agent(tmp_path: Path) -> None:
    places = resolve_paths(Config(paths=Paths(root=str(tmp_path), audit="/var/log/other.jsonl")))
    assert places.audit == Path("/var/log/other.jsonl")
    others = {name: getattr(places, name) for name in places.__struct_fields__ if name != "audit"}
    assert all(path.parent == tmp_path for path in others.values())
    assert len(set(others.values())) == len(others)


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:9465", ("::1", 9465)), ("host:1", ("host", 1))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert host_and_port(text) == address


@pytest.mark.parametrize("text", ["80", "a:99999", "::1:80", "a:b", ""])
def test_no_addresses(text: str) -> None:
    with pytest.raises(InputError, match="no address"):
        host_and_port(text)


@pytest.mark.parametrize(
    "text",
    [
        "[access]\nrequests_per_second = 0",
        "[access]\nconnections = 0",
        "[access]\nseconds = 0.0",
        "[history]\ninterval = 0",
        "[history]\nrecent_seconds = 0",
        "[otlp]\nperiod = 0",
        "[otlp]\nperiod = inf",
        "[otlp]\ntimeout = -1",
        "[traces]\npoll = 0",
        "[collect]\nperiod = nan",
        "[fleet]\nheartbeat = 0",
    ],
)
def test_a_rate_or_a_period_of_nothing_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as error:
        _load(tmp_path, text)
    assert error.value.slug == "wrong-config"


@pytest.mark.parametrize(
    "value", ["[]", '["metric"]', "{a = 1}", "1", "2026-01-31", "true", "[[[]]]"]
)
def test_what_is_no_name_of_a_kind_of_rule_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError) as error:
        _load(tmp_path, f'[[triggers]]\nname = "x"\non = {value}\n')
    assert error.value.slug == "wrong-config"


def test_two_agents_have_two_audit_logs() -> None:
    paths = [
        resolve_paths(Config(paths=Paths(history=f"/var/lib/{name}/agent.db"))).audit
        for name in ("one", "two")
    ]
    assert paths == [Path("/var/lib/one/audit.jsonl"), Path("/var/lib/two/audit.jsonl")]
