"""Small recordings with one fault each: what the findings say of them, as worked out by hand (failing/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

import traceloom
from traceloom.findings import RULES, Context, Ranked, findings, rank
from traceloom.report import memory
from traceloom.report.memory_sources import read_memory_sources
from traceloom.testing import TraceBuilder
from traceloom.trace.notice import Finding
from traceloom.trace.session import Session

KNOBS = ("CUDA_", "cuda", "nvidia", "NCCL_MAX_CTAS", "tensor core", "TF32")


@pytest.fixture
def given(shared_data: Path) -> Path:
    if not (shared_data / "failing").is_dir():
        pytest.skip("the failing inputs are not on this machine")
    return shared_data


def found_in(path: Path) -> Ranked:
    return findings(traceloom.load(path, cache=False))


def first(path: Path) -> Finding:
    return found_in(path).time[0]


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("failing/04_hipfree_every_op.json", "97.2 %"),
        ("kineto/mi300_ddp_resnet18_no_allocator.json.gz", "99.4 %"),
    ],
)
def test_a_missing_allocator_is_one_finding_of_the_right_vendor(
    given: Path, name: str, share: str
) -> None:
    found = found_in(given / name)
    finding = found.time[0]
    assert [other.slug for other in found.time].count("device-allocation") == 1
    assert finding.slug == "device-allocation"
    assert f"({share})" in finding.title
    assert "the caching allocator is off" in finding.title
    for text in (text for one in found.time for text in (one.title, one.advice)):
        assert not [knob for knob in KNOBS if knob in text.replace("torch.cuda", "")]


def test_data_made_on_the_host_is_found_with_what_it_costs(given: Path) -> None:
    path = given / "failing" / "05_data_made_on_cpu.json"
    finding = first(path)
    assert finding.slug == "host-operator"
    assert "aten::normal_" in finding.title
    # 12.0 ms now; without it the copy and the kernel of a step follow each other, 7.55 ms
    assert finding.saving_ns == pytest.approx(12_000_000 - 7_550_000, rel=0.01)


def test_a_copy_of_a_few_numbers_is_no_finding(given: Path) -> None:
    assert found_in(given / "failing" / "09_reshape_of_8_elements.json").time == ()


def test_memory_whose_allocations_and_frees_cancel_does_not_grow(given: Path) -> None:
    found = found_in(given / "kineto" / "kineto2021_resnet50_workers0.json.gz")
    assert not [finding for finding in found.memory if finding.slug == "memory-growth"]


def test_a_snapshot_without_history_shows_a_moment_and_no_peak(given: Path) -> None:
    def told(name: str) -> dict[str, object]:
        return memory.build_document(read_memory_sources([str(given / "failing" / name)]))  # type: ignore[return-value]

    document = told("08_snapshot_without_history.pickle")
    sentence = str(document["sentence"])
    assert "holds 524 MB at the moment of the snapshot; its peak was not recorded" in sentence
    document = told("08_blocks_larger_than_asked.pickle")
    assert "holds 199 MB asked for" in str(document["sentence"])
    (row,) = document["ranks"][0]["memories"]  # type: ignore[index]
    assert "210 MB allocated" in memory.describe_allocator(row)


def test_growth_of_many_tensors_is_one_finding() -> None:
    trace = TraceBuilder(device_name=None)
    address = 4096
    for step in range(8):
        trace.step(step, 1000 * step, 900)
        for op in range(3):
            start = 1000 * step + 100 * (op + 1)
            trace.op(f"aten::leak{op}", start, 50)
            trace.allocation(start + 10, 100_000 * (op + 1), address=address, device_type=0)
            address += 1_000_000
    context = Context.of(Session((trace.build(),), "made"))
    found = rank(context, RULES).memory
    assert [finding.slug for finding in found] == ["memory-growth"]
    assert found[0].title.endswith("and 2 other places leave 600 kB behind in every step")


@pytest.mark.parametrize("known", [True, False], ids=["other addresses", "no addresses"])
def test_the_balance_decides_where_frees_do_not_find_their_allocations(known: bool) -> None:
    trace = TraceBuilder()
    for step in range(8):
        trace.step(step, 1000 * step, 900)
        for op in range(5):
            start, size = 1000 * step + 100 * (op + 1), 100_000 * (op + 1)
            trace.op(f"aten::held{op}", start, 50)
            address = (10 * step + op + 1) << 20
            trace.allocation(start + 10, size, address=address if known else 0, device_type=1)
            # given back within the step, as another thread's records tell it
            free = address + (1 << 40)
            trace.allocation(start + 20, -size, address=free if known else 0, device_type=1)
    context = Context.of(Session((trace.build(),), "made"))
    assert rank(context, RULES).memory == ()
