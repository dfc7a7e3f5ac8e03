"""FLOP/s from the activity of pipes: exact where the type is known, an interval where it is not."""

from __future__ import annotations

import json

import pytest

from support.devices import values
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.topline import (
    PEAKS_FILE,
    FlopRate,
    MatrixTypes,
    compute_estimate_error,
    compute_relative_peak,
    estimate_flops,
    find_device_model,
    load_flop_per_clock,
    parse_declared_types,
)

SMS, CLOCK = 132, 1.5e9
H100 = Device(
    uuid="G",
    index="0",
    vendor="nvidia",
    model="H",
    multiprocessors=SMS,
    highest_clock_hz=2e9,
    architecture="hopper",
)
NOT_IN_THE_TABLE = {
    "H800 SXM",
    "H20",
    "GB200",
}  # cut down, or with a number of multiprocessors that is not published
PIPES = {
    "tensor": 0.5,
    "hmma": 0.5,
    "imma": 0.0,
    "dmma": 0.0,
    "dfma": 0.0,
    "fp64": 0.0,
    "fp32": 0.0,
    "fp16": 0.0,
}


def read(
    pipes: dict[str, float],
    device: Device = H100,
    types: tuple[MatrixTypes, ...] = (),
    **others: float,
):
    """(method, low, high) in FLOP per clock of one multiprocessor, and all readings."""
    sampled = {("gpu_pipe_active_ratio", (pipe,)): active for pipe, active in pipes.items()}
    sampled |= {(metric, ()): value for metric, value in others.items()}
    readings, missing = estimate_flops(
        device, {**sampled, ("gpu_clock_hertz", ("sm",)): CLOCK}, types
    )
    rates = {
        labels[1:]: value / SMS / CLOCK for labels, value in values(readings, "gpu_flops").items()
    }
    methods = {method for method, _ in rates}
    bounds = tuple(
        round(rates[method, bound], 6) for method in methods for bound in ("low", "high")
    )
    return (*methods, *bounds), readings, missing


def test_the_table_gives_the_peaks_of_the_data_sheets() -> None:
    names = set()
    for entry in json.loads(PEAKS_FILE.read_text(encoding="utf-8"))["devices"]:
        if entry["name"] in NOT_IN_THE_TABLE:
            assert find_device_model(entry["name"]).architecture == ""
            continue
        model = find_device_model(entry["name"])
        names.add(model.name)
        units = load_flop_per_clock()[model.architecture]
        for kind, peak in entry["flops"].items():
            matrix = kind.endswith("_matrix") or kind not in ("fp64", "fp32")
            unit = f"{kind.removesuffix('_matrix')}_matrix" if matrix else kind
            # FP64 matrix units run at the clock of the vector units.
            clock = (
                model.matrix_clock_hz
                if matrix and kind != "fp64_matrix"
                else model.highest_clock_hz
            )
            assert units[unit] * model.multiprocessors * clock == pytest.approx(peak, rel=0.03), (
                entry["name"],
                kind,
            )
    assert len(names) >= 20


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("tf32", 2048),
        ("bf16", 4096),
        ("fp16", 4096),
        ("float8_e4m3fn", 8192),
        ("torch.bfloat16", 4096),
    ],
)
def test_a_declared_type_is_taken(kind: str, rate: float) -> None:
    types = parse_declared_types(kind)
    assert types is not None
    result, _, _ = read(PIPES, types=(types,))
    assert result == ("declared", 0.5 * rate, 0.5 * rate)


def test_what_is_no_type_of_matrix_units_declares_nothing() -> None:
    assert parse_declared_types("int4") is None
    assert parse_declared_types("") is None


def test_a_mix_of_types_of_a_trace_is_by_flops_not_by_time() -> None:
    """Half the FLOPs in FP8 take half as long as the half in BF16: 2 / (1/4096 + 1/8192) FLOP per clock."""
    result, _, _ = read(PIPES, types=(MatrixTypes({"bf16": 2.0, "fp8": 2.0}, "trace"),))
    assert result == ("trace", *(pytest.approx(0.5 * 2 / (1 / 4096 + 1 / 8192)),) * 2)


def test_a_type_that_the_architecture_does_not_have_is_no_knowledge() -> None:
    ampere = Device(
        uuid="G", index="0", vendor="nvidia", model="A", multiprocessors=SMS, architecture="ampere"
    )
    result, _, _ = read(PIPES, ampere, (MatrixTypes({"fp8": 1.0}, "declared"),))
    assert result == ("bounds", 0.5 * 1024, 0.5 * 2048)


def test_two_jobs_of_different_types_on_a_device_give_an_interval() -> None:
    jobs = (MatrixTypes({"bf16": 1.0}, "declared"), MatrixTypes({"fp8": 1.0}, "declared"))
    assert read(PIPES, types=jobs)[0] == ("declared", 0.5 * 4096, 0.5 * 8192)
    jobs = (MatrixTypes({"bf16": 1.0}, "declared"), MatrixTypes({"bf16": 1.0}, "trace"))
    assert read(PIPES, types=jobs)[0] == ("trace", 0.5 * 4096, 0.5 * 4096), (
        "as well as the lesser is known"
    )


def test_the_ratio_of_half_to_single_decides_where_nothing_is_declared() -> None:
    half, _, _ = read(PIPES | {"fp16": 0.2, "fp32": 0.1})
    vector = 0.2 * 512 + 0.1 * 256
    assert half == ("ratio", 0.5 * 4096 + vector, 0.5 * 8192 + vector), (
        "FP16, or FP8 beside vector work in FP16"
    )
    single, _, _ = read(PIPES | {"fp16": 0.05, "fp32": 0.1})
    vector = 0.05 * 512 + 0.1 * 256
    assert single == ("bounds", 0.5 * 2048 + vector, 0.5 * 8192 + vector), (
        "sums of FP8 products are in FP32"
    )
    ampere = Device(
        uuid="G", index="0", vendor="nvidia", model="A", multiprocessors=SMS, architecture="ampere"
    )
    method, low, high = read(PIPES | {"fp16": 0.2}, ampere)[0]
    assert (method, low) == ("ratio", high), "where there is no FP8 it is FP16"


def test_without_any_knowledge_there_are_bounds() -> None:
    assert read(PIPES)[0] == ("bounds", 0.5 * 2048, 0.5 * 8192)
    volta = Device(
        uuid="G", index="0", vendor="nvidia", model="V", multiprocessors=SMS, architecture="volta"
    )
    assert read(PIPES, volta)[0] == ("bounds", 512, 512), (
        "which are equal where there is only one type"
    )


def test_every_pipe_counts_with_its_rate() -> None:
    types = (MatrixTypes({"bf16": 1.0}, "declared"),)
    rates = {
        "hmma": 4096,
        "dmma": 256,
        "dfma": 256,
        "fp64": 128,
        "fp32": 256,
        "fp16": 512,
        "imma": 0,
        "int": 0,
    }
    idle = dict.fromkeys(PIPES, 0.0)
    for pipe, rate in rates.items():
        assert read({**idle, pipe: 0.25}, types=types)[0] == (
            "declared",
            0.25 * rate,
            0.25 * rate,
        ), pipe


def test_integer_operations_stand_apart() -> None:
    (method, low, high), readings, _ = read({**dict.fromkeys(PIPES, 0.0), "imma": 0.25})
    assert (method, low, high) == ("bounds", 0.0, 0.0)
    assert values(readings, "gpu_integer_ops") == {("G",): 0.25 * 8192 * SMS * CLOCK}


# Matrix products on a real H100 SXM (driver 580, cuBLAS 13): what they were of, what GPM and the clock said meanwhile,
# and how many FLOP/s the program did by its own count.
MEASURED = [
    ("bf16", {"hmma": 0.927643, "fp32": 0.0, "fp16": 0.0}, 1.350e9, 686.2e12),
    ("tf32", {"hmma": 0.928930, "fp32": 0.000909, "fp16": 0.0}, 1.410e9, 359.4e12),
    ("fp8", {"hmma": 0.909732, "fp32": 0.231135, "fp16": 0.0}, 1.260e9, 1247.0e12),
    ("", {"hmma": 0.0, "fp32": 0.771860, "fp16": 0.0}, 1.980e9, 51.77e12),
    ("", {"hmma": 0.0, "dfma": 0.945331, "fp64": 0.000462}, 1.875e9, 58.28e12),
]


@pytest.mark.parametrize(("kind", "pipes", "clock", "counted"), MEASURED)
def test_a_real_device_is_estimated_within_three_percent(
    kind: str, pipes: dict[str, float], clock: float, counted: float
) -> None:
    sampled = {
        ("gpu_pipe_active_ratio", (pipe,)): active
        for pipe, active in {**dict.fromkeys(PIPES, 0.0), **pipes}.items()
    }
    sampled["gpu_clock_hertz", ("sm",)] = clock
    declared = parse_declared_types(kind)
    exact = values(estimate_flops(H100, sampled, (declared,) if declared else ())[0], "gpu_flops")
    assert list(exact.values()) == pytest.approx([counted] * 2, rel=0.03)
    low, high = values(estimate_flops(H100, sampled)[0], "gpu_flops").values()
    assert low <= 1.03 * counted, "nothing is declared"
    assert high >= 0.97 * counted


def test_integer_products_of_an_older_generation_do_half_of_what_their_pipe_could() -> None:
    sampled = {("gpu_pipe_active_ratio", (pipe,)): 0.0 for pipe in PIPES} | {
        ("gpu_pipe_active_ratio", ("imma",)): 0.130969
    }
    sampled["gpu_clock_hertz", ("sm",)] = 1.98e9
    (most,) = values(estimate_flops(H100, sampled)[0], "gpu_integer_ops").values()
    assert 0.45 < 132.85e12 / most < 0.5, "torch._int_mm on the same H100"


def test_only_all_matrix_units_together_are_known() -> None:
    """As an exporter on A100 has it: no split of the matrix units, no vector pipes."""
    ampere = Device(
        uuid="G",
        index="0",
        vendor="nvidia",
        model="A",
        multiprocessors=SMS,
        architecture="ampere",
        highest_clock_hz=3e9,
    )
    declared = (MatrixTypes({"bf16": 1.0}, "declared"),)
    result, readings, _ = read({"tensor": 0.5}, ampere, declared, gpu_graphics_active_ratio=0.9)
    assert result == ("declared", 0.5 * 2048, 0.5 * 2048 + 0.9 * 512), (
        "vector pipes: at most as long as it was active"
    )
    assert values(readings, "gpu_flop_utilization_ratio") == {("G",): 0.25}
    assert read({"tensor": 0.5}, ampere, gpu_sm_active_ratio=0.6)[0] == (
        "bounds",
        512,
        1024 + 0.6 * 512,
    )
    assert read({"tensor": 0.5}, ampere)[0] == ("bounds", 512, 1024 + 512)


def test_utilisation_needs_no_type_and_no_architecture() -> None:
    unknown = Device(uuid="G", index="0", vendor="nvidia", model="N", highest_clock_hz=2e9)
    _, readings, missing = read(PIPES, unknown)
    assert values(readings, "gpu_flop_utilization_ratio") == {("G",): 0.5 * 0.75}
    assert missing == {"gpu_flops": "FLOP per clock of N are not known"}


def test_what_cannot_be_estimated_is_absent_with_a_reason() -> None:
    _, readings, missing = read({})
    assert readings == []
    assert missing["gpu_flops"] == "the activity of the pipes is not known"
    readings, missing = estimate_flops(H100, {("gpu_pipe_active_ratio", ("hmma",)): 0.5})
    assert readings == []
    assert missing["gpu_flops"] == "the clock is not known"


@pytest.mark.parametrize(
    ("low", "high", "error"),
    [(110.0, 110.0, 0.1), (90.0, 90.0, -0.1), (90.0, 110.0, 0.0), (120.0, 200.0, 0.2)],
)
def test_an_estimate_is_compared_with_counted_flops(low: float, high: float, error: float) -> None:
    assert compute_estimate_error(FlopRate(low, high, "ratio"), 50.0, 2.0) == pytest.approx(error)


def test_without_steps_there_is_nothing_to_compare_with() -> None:
    assert compute_estimate_error(FlopRate(1.0, 1.0, "ratio"), 50.0, 0.0) is None


def test_devices_are_compared_by_their_peaks() -> None:
    a100 = find_device_model("NVIDIA A100-SXM4-80GB")
    assert compute_relative_peak(
        find_device_model("nvidia h100  80GB HBM3"), a100
    ) == pytest.approx(989.4 / 312)
    assert compute_relative_peak(find_device_model("Tesla T4"), a100) == pytest.approx(65 / 312), (
        "FP16 where there is no BF16"
    )
    assert compute_relative_peak(None, a100) is None
    assert find_device_model("H100") is None, "a part of a name can be another device"
