"""Exporters over a real HTTP server: what they print is what is read, and one that misbehaves takes no other with it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path

import msgspec
import pytest

from support.devices import ByHand, values
from support.exporters import AMD, DCGM_3, DCGM_4, DCGM_4_SERIES, TPU, serving, text
from traceloom.agent.accelerators import scrape as scrape_module
from traceloom.agent.accelerators.backend import BackendUnavailable, Device, TimeLimitedBackend
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.accelerators.scrape import ScrapedAccelerator, parse_exporter_text
from traceloom.agent.config import Accelerators, Config
from traceloom.agent.metrics import METRICS, Reading
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.topline import MatrixTypes

MIB = 1 << 20


def _config(*addresses: str) -> Config:
    return Config(accelerators=Accelerators(scrape=addresses, backends=("scrape",)))


def test_exporters_are_not_asked_ten_times_a_second() -> None:
    now = 0.0
    with serving(text(TPU)) as exporter:
        back_end = ScrapedAccelerator(_config(exporter.address), lambda: now)
        for tenth in range(25):
            now = tenth / 10
            assert len(back_end.devices()) == 2
            assert back_end.sample()
    assert len(exporter.paths) == 3


def test_dcgm_exporter_3() -> None:
    with serving(text(DCGM_3)) as exporter:
        back_end = ScrapedAccelerator(_config(exporter.address))
        whole, partition = back_end.devices()
        readings = back_end.sample()
    assert (whole.uuid, whole.index, whole.vendor, whole.model) == (
        "GPU-aaaa",
        "0",
        "nvidia",
        "NVIDIA A100-SXM4-80GB",
    )
    assert (whole.multiprocessors, whole.architecture, whole.highest_clock_hz) == (
        108,
        "ampere",
        1.41e9,
    )
    assert whole.owner == {"pod": "train-0", "namespace": "ml", "container": "trainer"}
    assert (partition.uuid, partition.parent, partition.partition) == (
        "GPU-aaaa/2",
        "GPU-aaaa",
        "3g.40gb gi=2",
    )
    assert partition.owner == {"job": "4242"}
    assert {(reading.metric, *reading.labels): reading.value for reading in readings} == {
        ("gpu_clock_hertz", "GPU-aaaa", "sm"): 1.41e9,
        ("gpu_power_watts", "GPU-aaaa"): 287.43,
        ("gpu_energy_joules_total", "GPU-aaaa"): 5000.0,
        ("gpu_busy_ratio", "GPU-aaaa"): 0.97,
        ("gpu_memory_used_bytes", "GPU-aaaa"): 1024.0 * MIB,
        ("gpu_pipe_active_ratio", "GPU-aaaa", "tensor"): 0.25,
        ("gpu_graphics_active_ratio", "GPU-aaaa"): 0.5,
        ("gpu_link_bytes_per_second", "GPU-aaaa", "pcie", "transmit"): 123456.0,
        ("gpu_memory_used_bytes", "GPU-aaaa/2"): 512.0 * MIB,
    }, "no Xid 0, and no number where DCGM has none"
    Snapshot().put("accelerators", readings, 1)


def test_the_names_of_dcgm_4_6() -> None:
    devices, readings = parse_exporter_text(DCGM_4)
    device = devices["GPU-bbbb"]
    assert (device.pci, device.driver, device.architecture) == (
        "00000000:1B:00.0",
        "580.65.06",
        "hopper",
    )
    expected = {
        (metric, "GPU-bbbb", *labels): value for _, metric, labels, value in DCGM_4_SERIES.values()
    }
    assert {(reading.metric, *reading.labels): reading.value for reading in readings} == expected, (
        "FP16 is blank"
    )


def test_the_exporter_of_amd() -> None:
    with serving(text(AMD)) as exporter:
        back_end = ScrapedAccelerator(_config(exporter.address))
        whole, divided = back_end.devices()
        readings = back_end.sample()
    uuid = "ccff74a1-0000-1000-80e0-c6d49f5b0d86"
    assert (whole.uuid, whole.vendor, whole.model) == (uuid, "amd", "AMD Instinct MI300X OAM")
    assert (whole.multiprocessors, whole.architecture, whole.owner) == (
        304,
        "cdna3",
        {"job": "8", "user": "ada", "partition": "gpu"},
    )
    assert (divided.uuid, divided.partition, divided.multiprocessors) == (
        f"{uuid}/5",
        "cpx 5",
        None,
    )
    assert {(reading.metric, *reading.labels): reading.value for reading in readings} == {
        ("gpu_busy_ratio", uuid): 0.88,
        ("gpu_busy_ratio", f"{uuid}/5"): 0.12,
        ("gpu_memory_busy_ratio", uuid): 0.3,
        ("gpu_power_watts", uuid): 640.0,
        ("gpu_energy_joules_total", uuid): 5.0,
        ("gpu_memory_used_bytes", uuid): 2048.0 * MIB,
        ("gpu_memory_limit_bytes", uuid): 196592.0 * MIB,
        ("gpu_clock_hertz", uuid, "sm"): 2.1e9,
        ("gpu_clock_hertz", uuid, "memory"): 1.3e9,
        ("gpu_temperature_celsius", uuid, "hotspot"): 71.0,
        ("gpu_errors_total", uuid, "ecc-uncorrected", ""): 4.0,
        ("gpu_errors_total", uuid, "ecc-corrected", ""): 9.0,
        ("gpu_errors_total", uuid, "pcie-replay", ""): 2.0,
        ("gpu_temperature_celsius", uuid, "gpu"): 50.0,
        ("gpu_temperature_celsius", uuid, "memory"): 60.0,
        ("gpu_memory_free_bytes", uuid): 1024.0 * MIB,
    }
    prefixed = "".join(
        line if line.startswith("#") else "amd_" + line
        for line in AMD.splitlines(keepends=True)
        if line[0] != "#"
    )
    assert parse_exporter_text(prefixed)[1] == readings, "newer ones print a prefix"


def test_what_is_no_number_is_absent() -> None:
    for value in ("NaN", "+Inf"):
        assert (
            parse_exporter_text(f'DCGM_FI_DEV_POWER_USAGE{{UUID="G",gpu="0"}} {value}\n')[1] == []
        )


def test_power_is_the_first_that_the_exporter_of_amd_has() -> None:
    lines = {
        name: f'{name}{{gpu_id="0",serial_number="7"}} {value}\n'
        for value, name in enumerate(
            ("gpu_power_usage", "gpu_average_package_power", "gpu_package_power"), 1
        )
    }
    told = []
    while lines:
        told += values(parse_exporter_text("".join(lines.values()))[1], "gpu_power_watts").values()
        lines.popitem()
    assert told == [3.0, 2.0, 1.0]


def test_the_exporter_of_tpus() -> None:
    devices, readings = parse_exporter_text(TPU)
    used, other = devices["1234567890123456789-4"], devices["1234567890123456789-0"]
    assert (used.vendor, used.model, used.index, used.owner["pod"]) == (
        "google",
        "tpu-v6e-slice",
        "4",
        "serve-0",
    )
    assert other.owner == {}
    assert values(readings, "gpu_busy_ratio") == {(used.uuid,): 0.42, (other.uuid,): 0.0}
    assert values(readings, "gpu_pipe_active_ratio") == {(used.uuid, "tensor"): 0.25}
    assert values(readings, "gpu_dram_active_ratio") == {(used.uuid,): 0.11}
    assert values(readings, "gpu_memory_used_bytes") == {(used.uuid,): 1.5e10}
    assert values(readings, "gpu_memory_limit_bytes") == {(used.uuid,): 3.2e10}


def test_every_alias_is_read_back() -> None:
    """What we publish under a name of dcgm-exporter has the value that we would read from it."""
    for metric in METRICS.values():
        for alias in metric.dcgm_aliases:
            _, readings = parse_exporter_text(
                f'{alias.name}{{UUID="G",gpu="0"}} {3 * alias.factor}\n'
            )
            assert [(reading.metric, reading.value) for reading in readings] == [
                (metric.name, 3.0)
            ], alias.name
            assert all(
                label in ("G", "", *dict(alias.where).values()) for label in readings[0].labels
            )


def test_flops_of_a_device_whose_exporter_knows_only_all_matrix_units() -> None:
    """108 x 1.41 GHz x 25 % x 2,048, and at most 50 % of the vector pipes' 512."""
    with serving(text(DCGM_3)) as exporter:
        collector = AcceleratorCollector(_config(exporter.address))
        collector.element_types = {"GPU-aaaa": [MatrixTypes({"bf16": 1.0}, "declared")]}
        collector.collect()
        readings = collector.collect()
        collector.close()
    assert values(readings, "gpu_flops") == {}, "its partitions are what counts"
    alone = "".join(line for line in DCGM_3.splitlines(keepends=True) if "GPU_I_ID" not in line)
    with serving(text(alone)) as exporter:
        collector = AcceleratorCollector(_config(exporter.address))
        collector.element_types = {"GPU-aaaa": [MatrixTypes({"bf16": 1.0}, "declared")]}
        readings = collector.collect()
        collector.close()
    cycles = 108 * 1.41e9
    flops = values(readings, "gpu_flops")
    assert flops["GPU-aaaa", "declared", "low"] == pytest.approx(cycles * 0.25 * 2048, rel=1e-12)
    assert flops["GPU-aaaa", "declared", "high"] == pytest.approx(
        cycles * (0.25 * 2048 + 0.5 * 512), rel=1e-12
    )


def test_pipes_come_from_the_exporter_where_the_driver_does_not_count_them() -> None:
    with serving(text(DCGM_3)) as exporter:
        config = _config(exporter.address)
        by_hand = ByHand()
        by_hand.sampled.devices[0] = by_hand.sampled.devices[0].__class__(
            uuid="GPU-aaaa", index="0", vendor="nvidia", model="by NVML"
        )
        by_hand.sampled.readings[0] = by_hand.sampled.readings[0]._replace(labels=("GPU-aaaa",))
        by_hand.reasons["gpu_pipe_active_ratio{tensor}"] = "too old"
        both = [
            TimeLimitedBackend("nvml", lambda: by_hand, 30.0),
            TimeLimitedBackend("scrape", lambda: ScrapedAccelerator(config), 30.0),
        ]
        collector = AcceleratorCollector(config, both)
        readings = collector.collect()
        collector.close()
    assert collector.devices["GPU-aaaa"].model == "by NVML"
    assert collector.capabilities()["gpu_pipe_active_ratio{tensor}"] == "", "as one of them has it"
    assert values(readings, "gpu_busy_ratio")["GPU-aaaa",] == 0.5, "as the driver says"
    assert values(readings, "gpu_pipe_active_ratio")["GPU-aaaa", "tensor"] == 0.25, (
        "as the exporter adds"
    )


@pytest.mark.parametrize("computes", [1, 2])
def test_partitions_of_an_exporter_are_those_of_the_driver(computes: int) -> None:
    """Driver: uuid, multiprocessors, clock of the whole. Exporter: device and number, pipes. Together: FLOP/s."""
    partition = 'UUID="GPU-a",gpu="0",modelName="NVIDIA A100-SXM4-80GB",GPU_I_PROFILE="3g.40gb",GPU_I_ID="2"'
    exported = f'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{partition},pod="p"}} 0.5\n'
    by_hand = ByHand()
    whole = Device(uuid="GPU-a", index="0", vendor="nvidia", model="A", architecture="ampere")
    by_hand.sampled.devices[:] = [whole] + [
        msgspec.structs.replace(
            whole,
            uuid=f"MIG-{n}",
            parent="GPU-a",
            partition=f"3g.40gb gi=2 ci={n}",
            multiprocessors=42,
        )
        for n in range(computes)
    ]
    by_hand.sampled.readings[:] = [Reading("gpu_clock_hertz", ("GPU-a", "sm"), 1e9)]
    by_hand.sampled.processes.clear()
    with serving(text(exported)) as exporter:
        config = _config(exporter.address)
        both = [
            TimeLimitedBackend("nvml", lambda: by_hand, 30.0),
            TimeLimitedBackend("scrape", lambda: ScrapedAccelerator(config), 30.0),
        ]
        collector = AcceleratorCollector(config, both)
        collector.element_types = {"MIG-0": [MatrixTypes({"bf16": 1.0}, "declared")]}
        readings = collector.collect()
        collector.close()
    if computes == 2:
        assert list(collector.devices) == ["GPU-a", "MIG-0", "MIG-1", "GPU-a/2"], (
            "of two, nobody knows which it is"
        )
        return
    assert list(collector.devices) == ["GPU-a", "MIG-0"]
    assert collector.devices["MIG-0"].owner == {"pod": "p"}
    assert values(readings, "gpu_flops")["MIG-0", "declared", "low"] == 42 * 1e9 * 0.5 * 2048


def test_an_exporter_that_stops_leaves_stale_devices_while_others_go_on() -> None:
    with serving(text(DCGM_4)) as stays:
        with serving(text(TPU)) as stops:
            back_end = ScrapedAccelerator(
                _config(stays.address, stops.address), count(step=10).__next__
            )
            assert [device.stale for device in back_end.devices()] == ["", "", ""]
        stale = {device.uuid: device.stale for device in back_end.devices()}
        assert stale["GPU-bbbb"] == ""
        assert "does not answer: " in stale["1234567890123456789-4"]
        assert {reading.labels[0] for reading in back_end.sample()} == {"GPU-bbbb"}
        assert "refused" in back_end.capabilities()[f"exporter {stops.address}"]


def test_the_doctor_hears_of_an_exporter_that_never_answered() -> None:
    collector = AcceleratorCollector(_config("http://127.0.0.1:1/metrics"))
    collector.collect()
    (last_error,) = collector.list_problems()
    assert last_error.startswith("exporter http://127.0.0.1:1/metrics: ")
    collector.close()


def _elsewhere(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(302)
    handler.send_header("Location", "/other")
    handler.end_headers()


def _endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"# nothing but comments\n" * 4096)


def _no_text(handler: BaseHTTPRequestHandler) -> None:
    text("<html>{not metrics</html>")(handler)


def _not_utf8(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("answer", "words"),
    [(_elsewhere, "302"), (_endless, "more than 16 MB"), (_no_text, ""), (_not_utf8, "utf-8")],
    ids=["redirect", "endless", "html", "bytes"],
)
def test_what_is_no_exporter_is_refused(answer, words: str) -> None:
    with serving(answer) as exporter:
        back_end = ScrapedAccelerator(_config(exporter.address))
        assert back_end.devices() == []
        assert words in back_end.capabilities()[f"exporter {exporter.address}"]
        assert exporter.paths == ["/metrics"], "nothing else is asked for"


def test_a_slow_exporter_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_module, "SCRAPE_TIMEOUT_S", 0.2)

    with serving(text(TPU)) as exporter:

        def drips(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            while not exporter.released.wait(0.02):
                handler.wfile.write(b"#\n")

        def hangs(_: BaseHTTPRequestHandler) -> None:
            exporter.released.wait(60)

        for answer in (drips, hangs):
            exporter.answer = answer
            back_end = ScrapedAccelerator(_config(exporter.address), count(step=10).__next__)
            assert back_end.devices() == []
            assert f"exporter {exporter.address}" in back_end.capabilities()
            for thread in threading.enumerate():
                if thread.name == f"scrape {exporter.address}":
                    thread.join(30)
                    assert not thread.is_alive(), "it waits no longer than that"
        exporter.answer = text(TPU)
        assert len(back_end.devices()) == 2, "and asked again the next time"


def test_addresses_may_be_short() -> None:
    with serving(text(TPU)) as exporter:
        host = exporter.address.removeprefix("http://").removesuffix("/metrics")
        assert len(ScrapedAccelerator(_config(host)).devices()) == 2
        assert exporter.paths == ["/metrics"]
    with pytest.raises(ValueError, match="no address"):
        ScrapedAccelerator(_config("ftp://a"))
    with pytest.raises(BackendUnavailable):
        ScrapedAccelerator(_config())


def test_a_file_is_no_exporter(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(TPU, encoding="utf-8")
    with pytest.raises(ValueError, match="no address"):
        ScrapedAccelerator(_config((tmp_path / "metrics").as_uri()))
