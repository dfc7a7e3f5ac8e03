"""From the parts of hosts to a capture that is analysed: once, whatever is tried again, and with its faults said."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import Stores, opened, places  # noqa: E402
from support.simulated_hosts import CLOCK, made_part, ranked_process  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.agent.traces.requests import TraceSpec  # noqa: E402
from traceloom.fleet.service.executors import ProcessEngine  # noqa: E402
from traceloom.fleet.service.pipeline import CapturePipeline  # noqa: E402
from traceloom.fleet.service.request_plan import FleetRequest, HostStatus  # noqa: E402
from traceloom.fleet.service.requests import HostRegistry, RequestCompletion  # noqa: E402

ASKED_NS = 1_790_000_000 * 10**9
_MOST_S = 120.0


class JoiningSite(NamedTuple):
    """A registry, who joins what its hosts sent, and who analyses that."""

    registry: HostRegistry
    joining: RequestCompletion
    pipeline: CapturePipeline
    stores: Stores

    def sent(self, name: str, hosts: Sequence[str]) -> FleetRequest:
        """A request whose hosts have sent a trace of a rank each."""
        progress = {}
        for rank, host in enumerate(hosts):
            files = made_part(
                self.registry.incoming / name / host, host, [ranked_process(rank, "j")]
            )
            progress[host] = HostStatus(state="uploaded", files=files, clock=CLOCK, ranks=(rank,))
        return FleetRequest(
            id=name,
            who="ada",
            asked_ns=ASKED_NS,
            spec=TraceSpec(job="j", steps=2),
            hosts=progress,
            state="stitching",
        )

    async def joined(self, request: FleetRequest, *, analyses: bool = True) -> FleetRequest:
        """The request when it has ended; `analyses`: the pipeline works meanwhile."""
        await self.registry.put(request)
        self.joining.take(self.registry.requests[request.id])

        async def ended() -> None:
            while not self.registry.requests[request.id].ended:
                if analyses and await asyncio.to_thread(self.pipeline.work):
                    await asyncio.to_thread(self.pipeline.commit)
                await asyncio.sleep(0.02)

        await asyncio.wait_for(ended(), _MOST_S)
        return self.registry.requests[request.id]


def at_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: Callable[[JoiningSite], Awaitable[None]]
) -> None:
    monkeypatch.setattr("traceloom.fleet.service.requests._JOIN_POLL_S", 0.02)
    monkeypatch.setattr("traceloom.fleet.store.captures._RETRY_DELAY_NS", 10**7)

    async def run() -> None:
        stores = opened(places("alone", tmp_path, monkeypatch))
        pipeline = CapturePipeline(*stores, ProcessEngine(1))
        pipeline.lead()
        registry = HostRegistry(stores.state, tmp_path / "from-hosts", pipeline.term)
        registry.incoming.mkdir()
        joining = RequestCompletion(registry, pipeline)
        try:
            await test(JoiningSite(registry, joining, pipeline, stores))
        finally:
            await joining.close()
            pipeline.stop()
            stores.state.close()

    asyncio.run(run())


def test_parts_of_two_hosts_become_rows_of_one_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: JoiningSite) -> None:
        request = site.sent("q1", ["n1", "n2"])
        site.joining.take(request)  # whoever takes it twice joins it once
        ended = await site.joined(request)
        assert (ended.state, ended.reason, ended.detail) == ("done", "", "")
        [record] = site.stores.state.captures()
        assert (record.id, record.job, record.uploader, record.day) == (
            ended.capture,
            "j",
            "ada",
            "2026-09-21",
        )
        assert record.bytes == sum(file.size for file in record.files)
        [row] = site.stores.tables.scan("captures").collect().to_dicts()
        assert (row["capture"], row["ranks"], row["hosts"], row["job"]) == (
            ended.capture,
            2,
            2,
            "j",
        )
        content = b"".join(
            site.stores.objects.chunks(f"captures/{record.day}/{record.id}/capture.json")
        )
        document = json.loads(content)
        assert [(rank["rank"], rank["host"]) for rank in document["ranks"]] == [
            (0, "n1"),
            (1, "n2"),
        ]
        assert {key: document["request"][key] for key in ("id", "who", "asked_ns")} == {
            "id": "q1",
            "who": "ada",
            "asked_ns": ASKED_NS,
        }
        clock = {"offset_ns": CLOCK.offset_ns, "error_ns": CLOCK.error_ns}
        assert document["request"]["hosts"] == [
            {"host": host, "clock": clock} for host in ("n1", "n2")
        ]
        # what is joined need not be kept twice
        await asyncio.to_thread(until, lambda: not list(site.registry.incoming.iterdir()))

    at_site(tmp_path, monkeypatch, test)


def test_what_was_stopped_and_is_joined_again_is_the_same_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: JoiningSite) -> None:
        request = site.sent("q2", ["n1"])
        await site.registry.put(request)
        site.joining.take(request)
        await asyncio.to_thread(until, lambda: site.registry.requests["q2"].state != "stitching")
        await site.joining.close()
        assert site.registry.requests["q2"].state == "analysing"
        first = site.registry.requests["q2"].capture
        again = JoiningSite(
            site.registry,
            RequestCompletion(site.registry, site.pipeline),
            site.pipeline,
            site.stores,
        )
        ended = await again.joined(
            request
        )  # as it was before, as if the next service had not heard of the capture
        assert (ended.state, ended.capture) == ("done", first)
        assert [record.id for record in site.stores.state.captures()] == [first]
        assert site.stores.tables.scan("captures").collect()["capture"].to_list() == [first]
        assert len(site.stores.state.tasks(first)) == 1
        await again.joining.close()

    at_site(tmp_path, monkeypatch, test)


def test_parts_that_are_no_capture_fail_the_request_and_leave_nothing_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def test(site: JoiningSite) -> None:
        request = site.sent("q3", ["n1", "n2"])
        (site.registry.incoming / "q3" / "n1" / "capture.json").write_text("{")
        (site.registry.incoming / "q3" / "n2" / "capture.json").write_text(
            '{"format": "traceloom-capture", "ranks": []}'
        )
        ended = await site.joined(request, analyses=False)
        assert (ended.state, ended.reason, ended.capture) == ("failed", "analysis-failed", "")
        assert "no host sent a trace that can be read" in ended.detail
        assert site.stores.state.captures() == []
        assert site.stores.objects.sizes("captures") == {}
        await asyncio.to_thread(until, lambda: not list(site.registry.incoming.iterdir()))

    at_site(tmp_path, monkeypatch, test)


def test_a_host_whose_part_is_none_is_named_though_the_others_make_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: JoiningSite) -> None:
        request = site.sent("q6", ["n1", "n2"])
        (site.registry.incoming / "q6" / "n2" / "capture.json").write_text("{")
        ended = await site.joined(request)
        assert (ended.state, ended.reason) == ("partial", "missing")
        assert "n2: its capture.json cannot be read" in ended.detail

    at_site(tmp_path, monkeypatch, test)


def test_a_capture_that_cannot_be_analysed_makes_the_request_partial_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: JoiningSite) -> None:
        request = site.sent("q4", ["n1"])
        (site.registry.incoming / "q4" / "n1" / "rank0.kineto.json.gz").write_bytes(
            b"\x1f\x8b no gzip"
        )
        ended = await site.joined(request)
        assert (ended.state, ended.reason) == ("partial", "analysis-failed")
        [task] = site.stores.state.tasks(ended.capture)
        assert task.state == "quarantined"
        assert ended.detail
        assert ended.detail in task.error
        assert site.stores.tables.scan("captures").collect().is_empty()

    at_site(tmp_path, monkeypatch, test)


def test_a_store_that_does_not_take_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("traceloom.fleet.service.requests._PAUSE_S", 0.02)

    async def test(site: JoiningSite) -> None:
        directory = site.stores.objects.directory
        assert directory is not None
        (directory / "captures").write_text("where files of captures should lie")

        async def clears() -> None:
            await asyncio.to_thread(until, lambda: "request q5" in caplog.text)  # it was tried
            assert not site.registry.requests["q5"].ended
            (directory / "captures").unlink()

        clearing = asyncio.create_task(clears())
        ended = await site.joined(site.sent("q5", ["n1"]))
        await clearing
        assert ended.state == "done"
        assert [record.id for record in site.stores.state.captures()] == [ended.capture]

    at_site(tmp_path, monkeypatch, test)
