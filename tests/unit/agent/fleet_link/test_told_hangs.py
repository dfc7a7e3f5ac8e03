"""What a host tells the fleet of hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec.structs import replace

from support.triggers import Rules, worker
from traceloom.agent.config import FleetLink
from traceloom.agent.fleet_link.link import FleetConnection
from traceloom.agent.topline import JobAccounting


def test_processes_of_a_job_that_hangs_are_told_as_such_and_no_others(tmp_path: Path) -> None:
    async def told() -> dict[str, bool]:
        rules = Rules(folder=tmp_path)
        rules.run(
            worker(0, job="stuck", rank=0), worker(1, job="stuck", rank=1), worker(2, job="fine")
        )
        rules.put("job_hung", {("stuck",): 1.0, ("fine",): 0.0}, "hangs")
        config = replace(rules.config, fleet=FleetLink(server="http://127.0.0.1:1"))
        uplink = FleetConnection(
            config,
            tmp_path,
            rules.host_snapshot,
            rules.trace_service,
            JobAccounting("H100"),
            "boot",
        )
        beat = uplink._heartbeat([])
        await rules.close()
        return {f"{process.job} {process.rank}": process.hung for process in beat.processes}

    assert asyncio.run(told()) == {"stuck 0": True, "stuck 1": True, "fine None": False}
