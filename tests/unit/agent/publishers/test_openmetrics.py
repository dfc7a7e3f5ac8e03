"""The text for Prometheus, read back by prometheus_client's own parsers."""

from __future__ import annotations

import shutil
import subprocess

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from support.agent_server import full_board
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, Reading
from traceloom.agent.publishers import (
    build_device_labels,
    is_openmetrics_preferred,
    render_openmetrics,
)
from traceloom.agent.snapshot import Snapshot

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"


def _samples(text: bytes, parse=parse_openmetrics):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text.decode())
        for sample in family.samples
    }


def test_every_series_is_in_the_text_with_kind_unit_and_help() -> None:
    host_snapshot = full_board()
    text, kind = render_openmetrics(host_snapshot, Config(), OPENMETRICS)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(text.decode())}
    assert len(families) == len(METRICS)
    for metric in METRICS.values():
        family = families[metric.full_name.removesuffix("_total").removesuffix("_info")]
        assert (family.type, family.unit, family.documentation) == (
            metric.kind,
            metric.unit,
            metric.help,
        )
    samples = _samples(text)
    for (name, labels), value, _ in host_snapshot.values():
        pairs = [
            (label, text) for label, text in zip(METRICS[name].labels, labels, strict=True) if text
        ]
        assert samples["traceloom_" + name, tuple(sorted(pairs))] == value


def test_the_plain_format_has_the_same_series() -> None:
    host_snapshot = full_board()
    plain, kind = render_openmetrics(host_snapshot, Config(), "text/plain")
    assert kind.startswith("text/plain; version=0.0.4")
    assert _samples(plain, parse_plain) == _samples(
        render_openmetrics(host_snapshot, Config(), OPENMETRICS)[0]
    )


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    samples = _samples(render_openmetrics(full_board(), Config(), OPENMETRICS)[0])
    labels = (("job", "slurm-7"), ("rank", "0"))
    buckets = {
        dict(key[1])["le"]: value
        for key, value in samples.items()
        if key[0] == "traceloom_step_seconds_bucket"
    }
    assert [buckets["0.001"], buckets["0.01"], buckets["60.0"], buckets["+Inf"]] == [0, 3, 3, 5]
    assert samples["traceloom_step_seconds_count", labels] == 5
    assert samples["traceloom_step_seconds_sum", labels] == 1.25


def test_values_of_labels_are_escaped() -> None:
    text, _ = render_openmetrics(full_board(), Config(), OPENMETRICS)
    commands = {
        dict(key[1])["command"] for key in _samples(text) if key[0] == "traceloom_process_info"
    }
    assert 'python "train".py\n\\' in commands


def test_the_host_is_a_label_of_its_own_series_alone() -> None:
    samples = _samples(render_openmetrics(full_board(), Config(), OPENMETRICS)[0])
    assert {name for name, labels in samples if "host" in dict(labels)} == {"traceloom_host_info"}


def test_an_empty_board_is_an_empty_text() -> None:
    assert render_openmetrics(Snapshot(), Config(), OPENMETRICS)[0] == b"# EOF\n"


def test_a_series_of_two_collectors_stands_once() -> None:
    host_snapshot = Snapshot()
    host_snapshot.put("a", [Reading("gpu_power_watts", ("GPU-0",), 1.0)], 1)
    host_snapshot.put("b", [Reading("gpu_power_watts", ("GPU-0",), 2.0)], 2)
    assert (
        render_openmetrics(host_snapshot, Config())[0].count(b"\ntraceloom_gpu_power_watts{") == 1
    )


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (OPENMETRICS, True),
        ("application/openmetrics-text", True),
        ("", False),
        ("*/*", False),
        ("text/plain;q=0.9, application/openmetrics-text;q=0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=often, text/html", False),
    ],
)
def test_the_format_that_the_scraper_prefers(accept: str, openmetrics: bool) -> None:
    assert is_openmetrics_preferred(accept) == openmetrics


def test_every_alias_of_dcgm_exporter_is_published_with_its_labels_and_unit() -> None:
    host_snapshot = full_board()
    samples = _samples(
        render_openmetrics(host_snapshot, Config(host="node1", compat=("dcgm",)), OPENMETRICS)[0]
    )
    aliases = {alias.name for metric in METRICS.values() for alias in metric.dcgm_aliases}
    published = {name for name, _ in samples if name.startswith("DCGM_FI_")}
    assert published <= aliases
    values = {
        name: value for (name, labels), value, _ in host_snapshot.values() if "GPU-0" in labels
    }
    labels = {
        "gpu": "0",
        "UUID": "GPU-0",
        "device": "nvidia0",
        "pci_bus_id": "00000000:1A:00.0",
        "modelName": "H100",
        "Hostname": "node1",
        "DCGM_FI_DRIVER_VERSION": "570.1",
        "hpc_job": "7",
    }
    key = tuple(sorted(labels.items()))
    assert samples["DCGM_FI_DEV_GPU_UTIL", key] == 100 * values["gpu_busy_ratio"]
    assert samples["DCGM_FI_DEV_FB_USED", key] == values["gpu_memory_used_bytes"] / 2**20
    assert (
        samples["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", key]
        == 1000 * values["gpu_energy_joules_total"]
    )
    assert samples["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", key] == values["gpu_pipe_active_ratio"]


def test_without_the_switch_there_is_no_name_of_dcgm() -> None:
    assert b"DCGM" not in render_openmetrics(full_board(), Config())[0]


def test_a_partition_has_the_labels_of_its_device_with_profile_and_number() -> None:
    host_snapshot = full_board()
    host_snapshot.put(
        "mig",
        [Reading("gpu_busy_ratio", ("MIG-1",), 0.5), Reading("gpu_busy_ratio", ("gone",), 0.5)],
        1,
    )
    host_snapshot.results.pop("all")
    samples = _samples(render_openmetrics(host_snapshot, Config(compat=("dcgm",)), OPENMETRICS)[0])
    ((name, pairs),) = [key for key in samples if key[0].startswith("DCGM")]
    labels = dict(pairs)
    assert (name, labels["UUID"], labels["gpu"], labels["GPU_I_PROFILE"], labels["GPU_I_ID"]) == (
        "DCGM_FI_DEV_GPU_UTIL",
        "GPU-1",
        "1",
        "1g.10gb",
        "7",
    )


def test_a_device_of_two_jobs_names_none() -> None:
    from support.agent_server import process

    host_snapshot = full_board()
    other = process(33, 1, "slurm-9", 0)
    host_snapshot.processes[other.key] = other
    samples = _samples(render_openmetrics(host_snapshot, Config(compat=("dcgm",)), OPENMETRICS)[0])
    jobs = {
        dict(labels)["UUID"]: dict(labels).get("hpc_job")
        for name, labels in samples
        if name == "DCGM_FI_DEV_GPU_UTIL"
    }
    assert jobs == {"GPU-0": None, "GPU-1": "8"}


def test_prometheus_finds_nothing_wrong_with_any_metric() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("Debian's package prometheus is not installed")
    text, _ = render_openmetrics(full_board(), Config())
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("partition", "profile", "number"),
    [
        ("gi=9", "", "9"),
        ("1c.3g.40gb gi=2 ci=1", "1c.3g.40gb", "2"),
        ("1g.10gb+me gi=7", "1g.10gb+me", "7"),
    ],
)
def test_a_partition_is_read_with_and_without_its_profile(
    partition: str, profile: str, number: str
) -> None:
    host_snapshot = full_board()
    device = host_snapshot.devices["MIG-1"]
    host_snapshot.devices["MIG-1"] = msgspec.structs.replace(device, partition=partition)
    labels = build_device_labels(host_snapshot, "h")["MIG-1"]
    assert (labels.get("GPU_I_PROFILE", ""), labels["GPU_I_ID"]) == (profile, number)


def test_no_series_of_dcgm_is_there_twice() -> None:
    """Two collectors have a series, and two compute instances share a GPU instance."""
    host_snapshot = full_board()
    device = host_snapshot.devices["MIG-1"]
    for number in (0, 1):
        uuid = f"MIG-shared{number}"
        host_snapshot.devices[uuid] = msgspec.structs.replace(
            device, uuid=uuid, partition=f"1c.3g.40gb gi=2 ci={number}"
        )
    for collector in ("one", "two"):
        readings = [Reading("gpu_busy_ratio", (uuid,), 0.5) for uuid in host_snapshot.devices]
        host_snapshot.put(collector, readings, 1)
    text = render_openmetrics(host_snapshot, Config(compat=("dcgm",)))[0].decode()
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert sum(name.startswith("DCGM_FI_DEV_GPU_UTIL") for name in series) == len(
        host_snapshot.devices
    )
