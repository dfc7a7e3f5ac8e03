"""A host that is removed while it speaks: what it still sends is refused, and nothing of it comes back."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

import msgspec
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import answering  # noqa: E402
from support.simulated_hosts import SimulatedHost, ranked_process  # noqa: E402
from traceloom.agent.fleet_link.protocol import Heartbeat, UsageRow  # noqa: E402
from traceloom.fleet.store.captures import ServiceState  # noqa: E402


def test_a_heartbeat_that_was_on_its_way_when_its_host_was_removed_is_refused(
    tmp_path: Path,
) -> None:
    with answering(tmp_path) as service:
        token = service.client("operator").post("agents", {"host": "n1"})["token"]
        host = SimulatedHost(
            [service.url], "n1", token, [ranked_process(0, "j")], tmp_path / "hosts"
        )
        host.beat()
        registry = service.service.hosts
        assert registry is not None
        assert set(registry.now) == {"n1"}
        row = UsageRow(
            minute=time.time_ns() // 60_000_000_000 - 1, device="g", state="busy", device_ms=60_000
        )
        body = msgspec.json.encode(Heartbeat(sent_ns=1, boot_id="b", version="1", usage=[row]))
        connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=60)
        connection.putrequest("POST", "/api/v1/agents/n1/heartbeat")
        connection.putheader("Authorization", f"Bearer {host.clients[0].credential}")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        connection.send(body[:-1])
        service.client("operator", "olga").delete("hosts/n1")
        connection.send(body[-1:])
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["slug"]) == (
            401,
            "unknown-host",
        )
        connection.close()
        host.close()
        assert not registry.now
        assert service.admin.get("hosts")["hosts"] == []
        assert service.service.state.waiting_minutes() == 0


def test_minutes_of_a_host_that_is_none_are_not_kept(tmp_path: Path) -> None:
    state = ServiceState(str(tmp_path / "state.db"))
    state.put_host("n1", "credential")
    state.add_usage("n1", {5: "[]", 7: "[]"})
    state.add_usage("gone", {5: "[]"})
    assert state.waiting_minutes() == 2
    assert state.remove_host("n1")
    state.add_usage("n1", {9: "[]"})
    assert state.waiting_minutes() == 2  # what came while it belonged to the fleet stays
    state.close()
