"""`compat = ["dcgm"]`: the same values under the names and labels of dcgm-exporter, so that its boards go on working.

Its counters lack the `_total` that OpenMetrics asks for, so in that format their type is `unknown`; Prometheus treats
both alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client.core import Metric as Family

from traceloom.agent.metrics import METRICS

if TYPE_CHECKING:
    from traceloom.agent.publish.openmetrics import Readable


def dcgm_families(board: Readable, host: str) -> list[Family]:
    """Families under the names of dcgm-exporter; series whose device is not known any more are left out."""
    labels = device_labels(board, host)
    out: dict[str, Family] = {}
    for (name, values), value, _ in board.values():
        metric = METRICS[name]
        if not metric.dcgm:
            continue
        of_series = dict(zip(metric.labels, values, strict=True))
        device = labels.get(of_series.get("device", ""))
        if device is None:
            continue
        for alias in metric.dcgm:
            if any(of_series.get(label) != wanted for label, wanted in alias.where):
                continue
            family = out.get(alias.name)
            if family is None:
                kind = "gauge" if alias.kind == "gauge" else "unknown"
                family = out[alias.name] = Family(alias.name, f"{metric.help} As {metric.full_name}.", kind)
            family.add_sample(alias.name, device, value * alias.factor)
    return list(out.values())


def device_labels(board: Readable, host: str) -> dict[str, dict[str, str]]:
    """The labels of each device: of a partition those of the device it is part of, with its profile and number.

    Pod, container and job are named where a device has exactly those of one: a series for each would count it twice.
    """
    owners: dict[str, set[tuple[str, str, str, str]]] = defaultdict(set)
    for process in board.processes.values():
        of = process.owner
        scheduled = of.job.partition("-")[2] if of.scheduler in ("slurm", "pbs", "lsf", "flux") else ""
        for uuid in {*process.devices, *process.owner.devices}:
            owners[uuid].add((of.pod, of.namespace, of.container, scheduled))
    out = {}
    for uuid, device in board.devices.items():
        whole = board.devices.get(device.parent, device)
        labels = {
            "gpu": whole.index,
            "UUID": whole.uuid,
            "pci_bus_id": whole.pci,
            "device": f"nvidia{whole.index}",
            "modelName": whole.model,
            "Hostname": host,
            "DCGM_FI_DRIVER_VERSION": whole.driver,
        }
        if device.parent:
            profile, *numbers = device.partition.split()
            labels |= {
                "GPU_I_PROFILE": profile,
                "GPU_I_ID": "".join(re.findall(r"\d+", " ".join(numbers))[:1]) or device.index,
            }
        owner = owners[uuid].copy() - {("", "", "", "")}
        if len(owner) == 1:
            names = ("pod", "namespace", "container", "hpc_job")
            labels |= {name: value for name, value in zip(names, owner.pop(), strict=True) if value}
        out[uuid] = {name: value for name, value in labels.items() if value}
    return out
