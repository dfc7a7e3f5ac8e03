"""NVML, as a library that is compiled here against NVIDIA's header: what is scripted there is what is read here."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.nvml import H100, compiled, steps, with_device
from traceloom.agent.accelerators.nvml import explain_nvml_error
from traceloom.agent.topline import find_device_model

MIB = 1 << 20
GPU = "GPU-aaaa"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"), old=True)


def test_every_metric_has_the_value_that_the_driver_gives(library: Path, tmp_path: Path) -> None:
    (answer,) = steps(library, tmp_path, {"script": "count 1\n" + H100})
    device = answer["devices"][GPU]
    assert {
        key: device[key] for key in ("index", "vendor", "model", "pci", "driver", "memory_bytes")
    } == {
        "index": "0",
        "vendor": "nvidia",
        "model": "NVIDIA H100 80GB HBM3",
        "pci": "00000000:19:00.0",
        "driver": "580.65.06",
        "memory_bytes": 80 << 30,
    }
    assert (device["multiprocessors"], device["highest_clock_hz"], device["architecture"]) == (
        132,
        1.98e9,
        "hopper",
    )
    expected = {
        ("gpu_up",): 1.0,
        ("gpu_busy_ratio",): 0.97,
        ("gpu_memory_busy_ratio",): 0.41,
        ("gpu_graphics_active_ratio",): 0.98,
        ("gpu_sm_active_ratio",): 0.9,
        ("gpu_sm_occupancy_ratio",): 0.35,
        ("gpu_dram_active_ratio",): 0.4,
        ("gpu_memory_limit_bytes",): 80 << 30,
        ("gpu_memory_reserved_bytes",): 600 << 20,
        ("gpu_memory_free_bytes",): 40 << 30,
        ("gpu_memory_used_bytes",): 42320527360,
        ("gpu_power_watts",): 650.25,
        ("gpu_power_limit_watts",): 700.0,
        ("gpu_energy_joules_total",): 123456.789,
        ("gpu_temperature_celsius", "gpu"): 61.0,
        ("gpu_temperature_celsius", "memory"): 74.0,
        ("gpu_clock_hertz", "sm"): 1.5e9,
        ("gpu_clock_hertz", "memory"): 2.619e9,
        ("gpu_video_busy_ratio", "encoder"): 0.0,
        ("gpu_video_busy_ratio", "decoder"): 0.12,
        ("gpu_errors_total", "pcie-replay", ""): 3.0,
        ("gpu_errors_total", "ecc-corrected", ""): 5.0,
        ("gpu_errors_total", "ecc-uncorrected", ""): 1.0,
        ("gpu_errors_total", "nvlink-crc", ""): 7.0,
        ("gpu_errors_total", "nvlink-replay", ""): 0.0,
        ("gpu_errors_total", "nvlink-recovery", ""): 0.0,
        ("gpu_remapped_rows", "correctable"): 1.0,
        ("gpu_remapped_rows", "uncorrectable"): 2.0,
        ("gpu_remapped_rows", "pending"): 0.0,
        ("gpu_remapped_rows", "failure"): 1.0,
        ("gpu_link_bytes_total", "pcie", "transmit"): 1e6,
        ("gpu_link_bytes_total", "pcie", "receive"): 2e6,
        ("gpu_link_bytes_total", "nvlink", "transmit"): 10 * 1024,
        ("gpu_link_bytes_total", "nvlink", "receive"): 20 * 1024,
        ("gpu_link_bytes_per_second", "pcie", "transmit"): 100 * MIB,
        ("gpu_link_bytes_per_second", "pcie", "receive"): 200 * MIB,
        ("gpu_link_bytes_per_second", "nvlink", "receive"): 300 * MIB,
        ("gpu_link_bytes_per_second", "nvlink", "transmit"): 400 * MIB,
        ("gpu_throttled", "power"): 1.0,
        ("gpu_throttled", "thermal"): 1.0,
        **{
            ("gpu_throttled", reason): 0.0
            for reason in (
                "application-clocks",
                "hardware-slowdown",
                "sync-boost",
                "hardware-thermal",
                "power-brake",
            )
        },
        ("gpu_throttled_seconds_total", "power"): 2.5,
        ("gpu_throttled_seconds_total", "thermal"): 1.0,
        ("gpu_throttled_seconds_total", "sync-boost"): 3.0,
        ("gpu_throttled_seconds_total", "board-limit"): 4.0,
        ("gpu_throttled_seconds_total", "reliability"): 5.0,
        ("gpu_throttled_seconds_total", "hardware-thermal"): 6.0,
        ("gpu_throttled_seconds_total", "power-brake"): 7.0,
        ("gpu_pipe_active_ratio", "tensor"): 0.5,
        ("gpu_pipe_active_ratio", "hmma"): 0.5,
        **{
            ("gpu_pipe_active_ratio", pipe): 0.0
            for pipe in ("imma", "dmma", "dfma", "fp64", "fp16")
        },
        ("gpu_pipe_active_ratio", "fp32"): 0.1,
        ("gpu_pipe_active_ratio", "int"): 0.1,
    }
    estimates = ("gpu_flops", "gpu_flop_utilization_ratio", "gpu_integer_ops", "gpu_info")
    measured = {
        (metric, *labels): value
        for (metric, _, *labels), value in answer["values"].items()
        if metric not in estimates
    }
    assert measured == pytest.approx(expected, rel=1e-12), (
        "and nothing else: no Xid, no reason that is not supported"
    )
    assert (
        answer["capabilities"]["gpu_cycles_total{tensor}"]
        == "this device, or its driver, does not have it"
    )


@pytest.mark.parametrize(
    ("name", "capability", "cores", "multiprocessors", "architecture"),
    [
        ("Tesla V100-SXM2-32GB", "7.0", 5120, 80, "volta"),
        ("Tesla T4", "7.5", 2560, 40, "turing"),
        ("NVIDIA A100-SXM4-80GB", "8.0", 6912, 108, "ampere"),
        ("NVIDIA A10", "8.6", 9216, 72, "ampere-86"),
        ("NVIDIA L40S", "8.9", 18176, 142, "ada"),
        ("NVIDIA GeForce RTX 4090", "8.9", 16384, 128, "ada-geforce"),
        ("NVIDIA B200", "10.0", 18944, 148, "blackwell"),
        ("something new", "12.9", 1000, None, ""),
    ],
)
def test_multiprocessors_are_counted_by_architecture(
    library: Path,
    tmp_path: Path,
    name: str,
    capability: str,
    cores: int,
    multiprocessors: int | None,
    architecture: str,
) -> None:
    script = f"count 1\ng0.uuid G\ng0.name {name}\ng0.capability {capability}\ng0.cores {cores}\n"
    (answer,) = steps(library, tmp_path, {"script": script})
    device = answer["devices"]["G"]
    assert (device["multiprocessors"], device["architecture"]) == (multiprocessors, architecture)
    model = find_device_model(name)
    assert model is None or (model.multiprocessors, model.architecture) == (
        multiprocessors,
        architecture,
    )


def test_known_activity_gives_known_flops(library: Path, tmp_path: Path) -> None:
    """132 x 1.5 GHz x (50 % x 4,096 + 10 % x 256) = 410.6 TFLOP/s in BF16; twice the matrix part in FP8."""
    script = "count 1\n" + H100
    bf16, fp8, unknown = steps(
        library,
        tmp_path,
        {"script": script, "types": {GPU: [{"bf16": 1.0}]}},
        {"types": {GPU: [{"fp8": 1.0}]}},
        {},
    )
    matrix, vector = 132 * 1.5e9 * 0.5 * 4096, 132 * 1.5e9 * 0.1 * 256
    for bound in ("low", "high"):
        assert bf16["values"]["gpu_flops", GPU, "declared", bound] == pytest.approx(
            matrix + vector, rel=1e-14
        )
        assert fp8["values"]["gpu_flops", GPU, "declared", bound] == pytest.approx(
            2 * matrix + vector, rel=1e-14
        )
    assert unknown["values"]["gpu_flops", GPU, "bounds", "low"] == pytest.approx(
        matrix / 2 + vector, rel=1e-14
    ), "FP32 work: TF32 at least"
    assert unknown["values"]["gpu_flops", GPU, "bounds", "high"] == pytest.approx(
        2 * matrix + vector, rel=1e-14
    )
    assert bf16["values"]["gpu_flop_utilization_ratio", GPU] == 0.5 * 1500 / 1980
    assert bf16["values"]["gpu_integer_ops", GPU] == 0.0


def test_integer_operations_of_the_matrix_units_are_no_flops(library: Path, tmp_path: Path) -> None:
    script = "count 1\n" + H100.replace("gpm.7 50", "gpm.7 0").replace("gpm.9 0", "gpm.9 25")
    (answer,) = steps(library, tmp_path, {"script": script, "types": {GPU: [{"bf16": 1.0}]}})
    assert answer["values"]["gpu_integer_ops", GPU] == 132 * 1.5e9 * 0.25 * 8192
    assert answer["values"]["gpu_flops", GPU, "declared", "high"] == 132 * 1.5e9 * 0.1 * 256, (
        "the FP32 pipe alone"
    )


def test_cumulative_cycles_are_counters_where_the_driver_has_them(
    library: Path, tmp_path: Path
) -> None:
    counters = "".join(f"g0.gpm.{number} {number}000000\n" for number in range(248, 261))
    script = "count 1\n" + H100.replace("g0.field.197.0 1000000\n", "") + counters
    (answer,) = steps(library, tmp_path, {"script": script})
    cycles = {
        labels[2]: value
        for labels, value in answer["values"].items()
        if labels[0] == "gpu_cycles_total"
    }
    assert cycles == {
        "elapsed": 248e6,
        "active": 249e6,
        "tensor": 250e6,
        "dmma": 251e6,
        "hmma": 252e6,
        "imma": 253e6,
        "dfma": 254e6,
        "int": 257e6,
        "fp64": 258e6,
        "fp32": 259e6,
        "fp16": 260e6,
    }
    assert answer["values"]["gpu_link_bytes_total", GPU, "pcie", "transmit"] == 255e6, (
        "where the field is not there"
    )
    assert answer["values"]["gpu_link_bytes_total", GPU, "pcie", "receive"] == 2e6
    script = script.replace("g0.field.198.0 2000000\n", "").replace(
        "g0.field.269.0 1000000000\n", ""
    )
    (answer,) = steps(library, tmp_path, {"script": script})
    assert answer["values"]["gpu_link_bytes_total", GPU, "pcie", "receive"] == 256e6
    assert answer["values"]["gpu_throttled_seconds_total", GPU, "thermal"] == 9.0, (
        "as older drivers call it"
    )


def test_what_changes_slowly_is_asked_for_seldom(library: Path, tmp_path: Path) -> None:
    script = "count 1\n" + H100
    changed = script.replace("ecc.corrected 5", "ecc.corrected 6").replace(
        "power 650250", "power 100000"
    )
    _, soon, later = steps(
        library, tmp_path, {"script": script}, {"script": changed, "later": 1.0}, {"later": 5.0}
    )
    for answer, errors in ((soon, 5), (later, 6)):
        assert answer["values"]["gpu_power_watts", GPU] == 100.0
        assert answer["values"]["gpu_errors_total", GPU, "ecc-corrected", ""] == errors


def test_the_rate_of_the_counters_goes_before_the_drivers_own_measurement(
    library: Path, tmp_path: Path
) -> None:
    script = H100.replace("g0.field.197.0 1000000\n", "") + "g0.pcie-rate.tx 7\ng0.pcie-rate.rx 8\n"
    (answer,) = steps(library, tmp_path, {"script": "count 1\n" + script})
    assert answer["values"]["gpu_link_bytes_per_second", GPU, "pcie", "transmit"] == 100 * MIB


def test_links_of_newer_devices_are_added_up(library: Path, tmp_path: Path) -> None:
    script = "\n".join(line for line in H100.splitlines() if ".field.13" not in line)
    script += "\n" + "".join(
        f"g0.field.202.{link} 100\ng0.field.204.{link} 7\n" for link in range(18)
    )
    (answer,) = steps(library, tmp_path, {"script": "count 1\n" + script})
    assert answer["values"]["gpu_link_bytes_total", GPU, "nvlink", "transmit"] == 1800
    assert answer["values"]["gpu_link_bytes_total", GPU, "nvlink", "receive"] == 126


def test_a_number_that_is_none_is_absent(library: Path, tmp_path: Path) -> None:
    (answer,) = steps(
        library, tmp_path, {"script": "count 1\n" + H100.replace("gpm.2 90", "gpm.2 nan")}
    )
    assert ("gpu_sm_active_ratio", GPU) not in answer["values"]
    assert answer["capabilities"]["gpu_sm_active_ratio"] == "the device gave no number"


def test_what_a_device_does_not_have_is_absent_with_a_reason(library: Path, tmp_path: Path) -> None:
    """Only what a device is; each call fails in another way."""
    script = "count 1\ng0.uuid GPU-aaaa\ng0.power !4\ng0.energy !999\n"
    (answer,) = steps(library, tmp_path, {"script": script})
    assert {metric for metric, *_ in answer["values"]} == {"gpu_up", "gpu_info"}, "nothing is 0"
    reasons = answer["capabilities"]
    assert reasons["gpu_busy_ratio"] == "this device, or its driver, does not have it"
    assert reasons["gpu_power_watts"] == "it needs more rights: run the agent as root"
    assert reasons["gpu_energy_joules_total"] == "Unknown Error"
    assert "Hopper" in reasons["gpu_pipe_active_ratio{hmma}"]
    assert reasons["gpu_flops"] == "the clock is not known"
    assert any("gpu_power_watts" in line for line in answer["last_error"])


def test_a_driver_without_the_newer_calls(old_library: Path, tmp_path: Path) -> None:
    (answer,) = steps(
        old_library,
        tmp_path,
        {"script": "count 1\n" + H100 + "g0.pcie-rate.tx 7\ng0.pcie-rate.rx 8\n"},
    )
    values, reasons = answer["values"], answer["capabilities"]
    assert values["gpu_busy_ratio", GPU] == 0.97
    assert values["gpu_memory_used_bytes", GPU] == 42320527360 + (600 << 20), (
        "as version 1 of the call has it"
    )
    assert ("gpu_memory_reserved_bytes", GPU) not in values
    assert values["gpu_link_bytes_per_second", GPU, "pcie", "transmit"] == 7 * 1024
    for metric in (
        "gpu_memory_reserved_bytes",
        "gpu_energy_joules_total",
        "gpu_remapped_rows",
        "gpu_throttled",
    ):
        assert "too old" in reasons[metric], metric
    assert not any(metric in ("gpu_pipe_active_ratio", "gpu_flops") for metric, *_ in values)


def test_two_processes_of_a_device_and_a_process_on_two(library: Path, tmp_path: Path) -> None:
    use = "g0.process-use 100 1000 60, 200 1000 20, 100 2000 20\n"
    script = "count 2\n" + H100 + "g0.processes 100 1048576, 200 2097152, 300 5\n" + use
    script += with_device(1) + "g1.processes 100 4194304\n"
    later = script.replace(use, use.replace("\n", ", 200 3000 90\n"))
    first, second, third = steps(library, tmp_path, {"script": script}, {"script": later}, {})
    of = {(process["device"], process["pid"]): process for process in first["processes"]}
    assert {key: process["memory_bytes"] for key, process in of.items()} == {
        (GPU, 100): 1048576,
        (GPU, 200): 2097152,
        (GPU, 300): 5,
        ("GPU-1", 100): 4194304,
    }
    assert [of[GPU, pid]["busy_ratio"] for pid in (100, 200, 300)] == [0.4, 0.2, 0.0]
    assert of["GPU-1", 100]["busy_ratio"] is None, "this device does not tell"
    use_of = {
        process["pid"]: process["busy_ratio"]
        for process in second["processes"]
        if process["device"] == GPU
    }
    assert use_of == {100: 0.0, 200: 0.9, 300: 0.0}, "since the last time"
    assert {process["busy_ratio"] for process in third["processes"]} == {None}, (
        "nothing new is told"
    )


def test_processes_of_a_server_that_shares_a_device_count_too(
    library: Path, tmp_path: Path
) -> None:
    (answer,) = steps(
        library, tmp_path, {"script": "count 1\n" + H100 + "g0.processes 1 2\ng0.mps 7 8, 1 2\n"}
    )
    assert {process["pid"]: process["memory_bytes"] for process in answer["processes"]} == {
        1: 2,
        7: 8,
    }


PARTITIONS = (
    "g0.mig 1\n"
    "g0m0.uuid MIG-x\ng0m0.name NVIDIA H100 80GB HBM3 MIG 1g.10gb\ng0m0.instance 3\ng0m0.multiprocessors 16\n"
    "g0m0.memory 10468982784 1000 468982784 10000000000\ng0m0.gpm.2 100\ng0m0.gpm.5 50\ng0m0.gpm.7 50\n"
    "g0m0.gpm.11 0\ng0m0.gpm.12 0\ng0m0.gpm.13 0\ng0m0.processes 100 7\n"
    "g0m2.uuid MIG-y\ng0m2.name NVIDIA H100 80GB HBM3 MIG 2g.20gb\ng0m2.instance 5\ng0m2.multiprocessors 32\n"
    "g0m2.gpm.5 25\ng0.processes 999 9\n"
)


def test_partitions_have_identities_metrics_and_processes_of_their_own(
    library: Path, tmp_path: Path
) -> None:
    (answer,) = steps(
        library,
        tmp_path,
        {"script": "count 1\n" + H100 + PARTITIONS, "types": {"MIG-x": [{"bf16": 1}]}},
    )
    devices, values = answer["devices"], answer["values"]
    assert list(devices) == [GPU, "MIG-x", "MIG-y"]
    partition = devices["MIG-x"]
    assert (partition["parent"], partition["partition"], partition["index"]) == (
        GPU,
        "1g.10gb gi=3 ci=0",
        "0:0",
    )
    assert (partition["multiprocessors"], partition["memory_bytes"]) == (16, 9984 * MIB)
    assert values["gpu_memory_used_bytes", "MIG-x"] == 1e10
    assert values["gpu_sm_active_ratio", "MIG-x"] == 1.0
    assert values["gpu_pipe_active_ratio", "MIG-y", "tensor"] == 0.25
    assert ("gpu_power_watts", "MIG-x") not in values
    assert values["gpu_flops", "MIG-x", "declared", "low"] == 16 * 1.5e9 * 0.5 * 4096, (
        "at the clock of its device"
    )
    assert not any(key[:2] == ("gpu_flops", GPU) for key in values), "not counted twice"
    assert [(process["device"], process["pid"]) for process in answer["processes"]] == [
        ("MIG-x", 100)
    ]


def test_partitions_come_and_go(library: Path, tmp_path: Path) -> None:
    without = "count 1\n" + H100
    first, second, third = steps(
        library,
        tmp_path,
        {"script": without},
        {"script": without + PARTITIONS},
        {"script": without},
    )
    assert [list(answer["devices"]) for answer in (first, second, third)] == [
        [GPU],
        [GPU, "MIG-x", "MIG-y"],
        [GPU],
    ]
    assert third["events"] == [["MIG-x", "lost", None], ["MIG-y", "lost", None]]


def test_a_device_that_falls_off_the_bus_is_stale_while_the_others_go_on(
    library: Path, tmp_path: Path
) -> None:
    script = "count 2\n" + H100 + with_device(1)
    first, lost, still, back = steps(
        library,
        tmp_path,
        {"script": script},
        {"script": script + "g1.lost 1\n"},
        {},
        {"script": script},
    )
    assert first["values"]["gpu_up", "GPU-1"] == 1.0
    for answer in (lost, still):
        assert answer["values"]["gpu_up", "GPU-1"] == 0.0
        assert (
            answer["devices"]["GPU-1"]["stale"]
            == "GPU is lost: restart the host, or reset the device"
        )
        assert {metric for metric, device, *_ in answer["values"] if device == "GPU-1"} == {
            "gpu_up",
            "gpu_info",
        }
        assert answer["values"]["gpu_busy_ratio", GPU] == 0.97, "the other goes on"
        assert answer["values"]["gpu_pipe_active_ratio", GPU, "hmma"] == 0.5
    assert back["values"]["gpu_busy_ratio", "GPU-1"] == 0.97
    assert back["values"]["gpu_pipe_active_ratio", "GPU-1", "hmma"] == 0.5
    assert back["events"] == [["GPU-1", "lost", None], ["GPU-1", "back", None]]


def test_the_partitions_of_a_lost_device_are_lost_and_come_back_with_it(
    library: Path, tmp_path: Path
) -> None:
    script = "count 1\n" + H100 + PARTITIONS
    _, lost, back = steps(
        library,
        tmp_path,
        {"script": script},
        {"script": script + "g0.lost 1\n"},
        {"script": script},
    )
    assert [lost["values"]["gpu_up", uuid] for uuid in (GPU, "MIG-x", "MIG-y")] == [0.0] * 3
    assert [back["values"]["gpu_up", uuid] for uuid in (GPU, "MIG-x", "MIG-y")] == [1.0] * 3
    assert back["values"]["gpu_sm_active_ratio", "MIG-x"] == 1.0


def test_a_device_that_was_lost_before_the_agent_started_is_told_of(
    library: Path, tmp_path: Path
) -> None:
    script = "count 2\n" + H100 + with_device(1)
    answer, back = steps(library, tmp_path, {"script": script + "g1.lost 1\n"}, {"script": script})
    assert list(answer["devices"]) == [GPU]
    assert "device 1: GPU is lost: restart the host, or reset the device" in answer["last_error"]
    assert list(back["devices"]) == [GPU, "GPU-1"]
    assert not any("lost" in line for line in back["last_error"])


def test_a_driver_that_hangs_is_given_up_and_tried_again(library: Path, tmp_path: Path) -> None:
    script = "count 1\n" + H100
    hanging = script.replace("g0.power 650250", "g0.power ~600")
    first, hangs, waits, again = steps(
        library,
        tmp_path,
        {"script": script},
        {"script": hanging, "limit": 0.3},
        {"script": script},
        {"later": 10.0},
    )
    assert first["values"]["gpu_up", GPU] == 1.0
    for answer in (hangs, waits):
        assert answer["values"]["gpu_up", GPU] == 0.0
        assert "has not answered for 0.3 s" in answer["devices"][GPU]["stale"]
        assert {metric for metric, *_ in answer["values"]} == {"gpu_up", "gpu_info"}
    assert again["values"]["gpu_power_watts", GPU] == 650.25


def test_a_driver_that_is_reloaded_is_initialised_again(library: Path, tmp_path: Path) -> None:
    script = "count 1\n" + H100
    first, gone, unloaded, back = steps(
        library,
        tmp_path,
        {"script": script},
        {"script": "driver !1\n" + script},
        {"script": "init !9\n" + script, "later": 10.0},
        {"script": script, "later": 100.0},
    )
    assert first["values"]["gpu_busy_ratio", GPU] == 0.97
    assert "Uninitialized" in gone["devices"][GPU]["stale"]
    assert unloaded["values"]["gpu_up", GPU] == 0.0, "it stays, stale, for alerts to see"
    assert (
        any("not loaded" in line for line in unloaded["last_error"])
        or unloaded["devices"][GPU]["stale"]
    )
    assert back["values"]["gpu_busy_ratio", GPU] == 0.97
    assert [event[1] for event in back["events"]] == ["lost", "back"]


def test_xid_errors_are_events_and_counted(library: Path, tmp_path: Path) -> None:
    none = 0xFFFFFFFF
    script = "count 1\n" + H100 + PARTITIONS
    events = f"event.0 0 8 79 {none}\nevent.1 0 8 13 5\nevent.2 0 2 0 {none}\nevent.3 0 8 79 {none}\nevent.4 0 8 999 {none}\n"
    first, second, third = steps(
        library, tmp_path, {"script": script}, {"script": script + events}, {}
    )
    assert first["events"] == []
    for answer in (second, third):
        assert answer["events"] == [
            [GPU, "xid", 79],
            ["MIG-y", "xid", 13],
            [GPU, "ecc", None],
            [GPU, "xid", 79],
            [GPU, "xid", None],
        ], "each once"
        assert answer["values"]["gpu_errors_total", GPU, "xid", "79"] == 2
        assert answer["values"]["gpu_errors_total", "MIG-y", "xid", "13"] == 1
        assert answer["values"]["gpu_errors_total", GPU, "xid", ""] == 1, (
            "one whose number the driver does not know"
        )
    assert second["values"]["gpu_last_xid", "MIG-y"] == 13
    assert second["values"]["gpu_last_xid", GPU] == 79


def test_the_error_that_took_a_device_down_is_told_while_it_is_down(
    library: Path, tmp_path: Path
) -> None:
    script = "count 1\n" + H100
    _, lost, back = steps(
        library,
        tmp_path,
        {"script": script},
        {"script": script + f"g0.lost 1\nevent.0 0 8 79 {0xFFFFFFFF}\n"},
        {"script": script},
    )
    for answer in (lost, back):
        assert answer["values"]["gpu_errors_total", GPU, "xid", "79"] == 1
        assert answer["values"]["gpu_last_xid", GPU] == 79
    assert sorted(lost["events"]) == [[GPU, "lost", None], [GPU, "xid", 79]]


def test_pausing_releases_the_counters_of_the_pipes(library: Path, tmp_path: Path) -> None:
    first, paused, during, more, after = steps(
        library,
        tmp_path,
        {"script": "count 1\n" + H100},
        {"pause": 60.0},
        {},
        {"script": "count 2\n" + H100 + with_device(1) + PARTITIONS},
        {"later": 60.0},
    )
    assert first["streaming"][0] == "1"
    assert (paused["done"], paused["streaming"][0]) == (1, "0")
    assert ("gpu_sm_active_ratio", GPU) not in during["values"]
    assert during["values"]["gpu_busy_ratio", GPU] == 0.97, "what needs no counters goes on"
    assert "GPU-1" in more["devices"]
    assert more["streaming"][1] == "", "nor are those of a device that comes meanwhile taken"
    assert ("gpu_sm_active_ratio", "MIG-x") not in more["values"]
    assert after["values"]["gpu_sm_active_ratio", "MIG-x"] == 1.0
    assert after["streaming"] == ["1", "1"], "taken again when the time is over"
    assert after["values"]["gpu_sm_active_ratio", GPU] == 0.9


def test_no_driver_is_no_failure(tmp_path: Path, library: Path) -> None:
    (answer,) = steps(library, tmp_path, {"script": "init !9\n"})
    assert answer["last_error"] == [
        "nvml: NVIDIA's driver is installed but not loaded: modprobe nvidia, or restart the host"
    ]
    (answer,) = steps(library, tmp_path, {"script": "count 0\n"})
    assert answer["last_error"] == ["nvml: NVIDIA's driver is loaded but lists no device"]
    (answer,) = steps(tmp_path, tmp_path, {})
    assert answer["last_error"] == [
        "nvml: NVIDIA's driver is not installed (libnvidia-ml.so.1); in a container, give it the devices"
    ]
    (answer,) = steps(library, tmp_path, {"script": "init !18\n"})
    assert "was updated while it ran" in answer["last_error"][0]


def test_a_metric_that_a_driver_does_not_know_is_said_so() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert (
        explain_nvml_error(pynvml, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        == "the driver does not know it: newer drivers may"
    )
    assert explain_nvml_error(pynvml, pynvml.NVML_ERROR_TIMEOUT) == "Timeout"
