"""Types of the simulation document. Written by `scripts/report_schema.py` from simulation.schema.json."""

# fmt: off
# ruff: noqa: UP013 (a line for each key would make it four times as long)
from typing import TypedDict

SimulationRanksRow = TypedDict("SimulationRanksRow", {
    "rank": int, "before_ns": int | None, "end_ns": int | None, "compute_ns": int | None,
    "communication_ns": int | None, "exposed_communication_ns": int | None, "memory_ns": int | None,
    "host_ns": int | None, "other_ns": int | None,
})
SimulationCollectivesRow = TypedDict("SimulationCollectivesRow", {
    "instance": int | None, "kind": str | None, "group": str | None, "ranks": int | None, "bytes": int | None,
    "start_ns": int | None, "end_ns": int | None, "transfer_ns": int | None, "waiting_ns": int | None,
    "bandwidth": float | None, "algorithm": str | None, "flags": str | None, "before_ns": int | None,
    "card_ns": int | None,
})
SimulationLinksRow = TypedDict("SimulationLinksRow", {
    "link": int, "name": str, "source": str, "target": str, "bytes": int, "busy_ns": int, "waiting_ns": int,
})
SimulationPathRow = TypedDict("SimulationPathRow", {
    "what": str, "kind": str, "before_ns": int, "after_ns": int,
})
SimulationBecameCriticalRow = TypedDict("SimulationBecameCriticalRow", {
    "what": str, "kind": str, "rank": int | None, "name": str, "count": int, "time_ns": int,
})
SimulationNoticesRow = TypedDict("SimulationNoticesRow", {
    "slug": str, "severity": str, "count": int, "message": str, "rank": int | None, "where": str,
})
SimulationDeviceAccountRow = TypedDict("SimulationDeviceAccountRow", {
    "rule": str, "kind": str | None, "count": int, "here_ns": int, "there_ns": int, "low_ns": int, "high_ns": int,
})
SimulationDeviceValue = TypedDict("SimulationDeviceValue", {
    "device": str, "recorded": list[str], "host_factor": float, "before_ns": int, "after_ns": int, "low_ns": int,
    "high_ns": int, "account": list[SimulationDeviceAccountRow],
})
SimulationDocument = TypedDict("SimulationDocument", {
    "format": str, "version": int, "traceloom": str, "sentence": str, "mode": str, "name": str, "machine": str,
    "step": int | None, "measured_ns": int | None, "identity_ns": int | None, "identity_error": float | None,
    "before_ns": int | None, "after_ns": int, "low_ns": int | None, "high_ns": int | None,
    "ranks": list[SimulationRanksRow], "collectives": list[SimulationCollectivesRow], "links": list[SimulationLinksRow],
    "path": list[SimulationPathRow], "became_critical": list[SimulationBecameCriticalRow],
    "notices": list[SimulationNoticesRow], "identity": str, "trusted": bool | None,
    "device": SimulationDeviceValue | None,
})
