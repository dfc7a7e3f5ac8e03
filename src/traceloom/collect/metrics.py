"""The service's own series, declared once: docs/reference/fleet-metrics.md is made of them.

What hosts say is known by the service that leads alone; the others do not have those series.
"""

from __future__ import annotations

import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from traceloom.agent.metrics import Reading

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from traceloom.collect.service import Service

_NS = 1e9


class FleetMetric(msgspec.Struct, frozen=True):
    """A metric of the service. `name` is whole, but for the `_total` of a counter."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


_DECLARED = (
    FleetMetric("traceloom_fleet_leads", "gauge", "1 on the service that talks to hosts and commits rows, else 0."),
    FleetMetric("traceloom_fleet_tasks", "gauge", "Analyses of captures by how far they are.", ("state",)),
    FleetMetric(
        "traceloom_fleet_requests", "counter", "Requests over HTTP by route and status code.", ("route", "code")
    ),
    FleetMetric(
        "traceloom_fleet_store_bytes", "gauge",
        "Space of the disk of the store, free and used. An object store does not say.", ("state",),
    ),
    FleetMetric("traceloom_fleet_usage_waiting", "gauge", "Minutes of hosts that are not in the tables yet."),
    FleetMetric("traceloom_fleet_memory_bytes", "gauge", "Resident memory of the service, without its workers."),
    FleetMetric(
        "traceloom_fleet_cpu_seconds", "counter", "Processor time of the service, without its workers that still run."
    ),
    FleetMetric("traceloom_fleet_hosts", "gauge", "Hosts by whether they were heard in the last minute.", ("state",)),
    FleetMetric("traceloom_fleet_host_up", "gauge", "1 where it was heard in the last minute, else 0.", ("host",)),
    FleetMetric(
        "traceloom_fleet_host_clock_offset_seconds", "gauge", "How far the service's clock is ahead of the host's.",
        ("host",),
    ),
    FleetMetric(
        "traceloom_fleet_devices", "gauge", "Devices of hosts that are there, by whether they can be read.", ("state",)
    ),
    FleetMetric("traceloom_fleet_jobs", "gauge", "Jobs that run on hosts that are there."),
    FleetMetric(
        "traceloom_fleet_traces", "gauge", "Requests for traces that are open, and the last ones that ended, by state.",
        ("state",),
    ),
    FleetMetric(
        "traceloom_fleet_usage_refused_rows", "counter",
        "Rows of usage that cannot be: of minutes that have not been, or of devices with more than 60 s in one.",
        ("host",),
    ),
)  # fmt: skip
FLEET_METRICS = {metric.name: metric for metric in _DECLARED}


class FleetSeries:
    """What Prometheus gets of a service, as its client library asks for it."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        """All series but those of requests over HTTP, which are counted where they are answered."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        families = {
            name: kinds[metric.kind](name, metric.help, labels=metric.labels) for name, metric in FLEET_METRICS.items()
        }
        for name, labels, value in self._readings():
            families[name].add_metric(labels, value)
        yield from (family for family in families.values() if family.samples)

    def _readings(self) -> Iterator[Reading]:
        service = self.service
        yield Reading("traceloom_fleet_leads", (), float(service.pipeline.leads))
        for of_task, tasks in service.state.counts().items():
            yield Reading("traceloom_fleet_tasks", (of_task,), tasks)
        yield Reading("traceloom_fleet_usage_waiting", (), service.state.waiting_minutes())
        if service.objects.directory is not None:
            space = shutil.disk_usage(service.objects.directory)
            yield Reading("traceloom_fleet_store_bytes", ("free",), space.free)
            yield Reading("traceloom_fleet_store_bytes", ("used",), space.used)
        used = resource.getrusage(resource.RUSAGE_SELF)
        yield Reading("traceloom_fleet_cpu_seconds", (), used.ru_utime + used.ru_stime)
        statm = Path("/proc/self/statm")
        if statm.exists():  # Linux alone says what is resident now
            resident = int(statm.read_text().split()[1]) * resource.getpagesize()
            yield Reading("traceloom_fleet_memory_bytes", (), resident)
        if (desk := service.hosts) is None:
            return
        # The loop goes on meanwhile: what it changes is copied first.
        fresh, members = desk.fresh(), sorted(desk.members)
        up = sum(host in fresh for host in members)
        yield Reading("traceloom_fleet_hosts", ("here",), up)
        yield Reading("traceloom_fleet_hosts", ("lost",), len(members) - up)
        devices, jobs = Counter({"well": 0, "stale": 0}), set()
        for host in members:
            yield Reading("traceloom_fleet_host_up", (host,), float(host in fresh))
            # Also where there is none: of a counter that begins at 1, Prometheus does not see the first.
            yield Reading("traceloom_fleet_usage_refused_rows", (host,), desk.refused_rows.get(host, 0))
        for host, now in fresh.items():
            beat = now.heartbeat
            if beat.clock is not None:
                yield Reading("traceloom_fleet_host_clock_offset_seconds", (host,), beat.clock.offset_ns / _NS)
            devices.update("stale" if device.stale else "well" for device in beat.devices)
            jobs |= {process.job for process in beat.processes if process.job}
        for state, count in devices.items():
            yield Reading("traceloom_fleet_devices", (state,), count)
        yield Reading("traceloom_fleet_jobs", (), len(jobs))
        for of_request, requests in Counter(request.state for request in list(desk.requests.values())).items():
            yield Reading("traceloom_fleet_traces", (of_request,), requests)
