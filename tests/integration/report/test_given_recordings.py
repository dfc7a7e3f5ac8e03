"""Small recordings in which something is odd: what the report says of them, as worked out by hand (failing/README.md)."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import traceloom
from traceloom import Session, analyze
from traceloom.analyze.answer import answer
from traceloom.analyze.critical_path import critical_path
from traceloom.errors import InputError
from traceloom.report import ReportOptions, build


@pytest.fixture
def failing(shared_data: Path) -> Path:
    folder = shared_data / "failing"
    if not folder.is_dir():
        pytest.skip("the failing inputs are not on this machine")
    return folder


def load(path: Path) -> Session:
    return traceloom.load(path, cache=False)


def slugs(session: Session) -> set[str]:
    (trace,) = session.traces
    return {notice.slug for notice in (*trace.notices, *analyze.quality(trace).notices)}


def shares(session: Session) -> dict[str, float]:
    parts = answer(session).parts.group_by("kind").agg(pl.col("fraction").sum())
    return dict(parts.select("kind", "fraction").rows())


def test_records_that_overlap_by_the_jitter_of_the_clock_follow_each_other(failing: Path) -> None:
    session = load(failing / "02_overlap_100ns.json")
    path = critical_path(session, step=2)
    length = dict(path.classes.select("class", "fraction").rows())
    assert length["compute"] == pytest.approx(0.98, abs=0.005)
    assert length.get("pause", 0) < 0.001
    assert "overlapping-gpu-work" not in slugs(session)


def test_two_recordings_of_a_process_are_one_process(failing: Path) -> None:
    session = load(failing / "03_two_windows")
    assert session.process_numbers == (0, 0)
    sentence = answer(session).sentence
    assert sentence.startswith("6 steps of 1.00 ms in 2 windows of the recording: GPU 0 is")
    document = build(session, ReportOptions(full=True))
    assert [row["process_number"] for row in document["ranks"]] == [0, 0]
    (memory,) = document["memory"]["devices"]
    assert memory["peak_bytes"] == pytest.approx(105e6, rel=0.01)
    titles = [finding["title"] for finding in document["findings"]]
    assert len(titles) == len(set(titles))


def test_kernels_without_a_time_are_left_out_and_counted(failing: Path) -> None:
    session = load(failing / "06_four_kernels_ts0.json")
    (notice,) = (one for one in session.traces[0].notices if one.slug == "missing-time")
    assert notice.count == 4
    assert answer(session).step_ns == pytest.approx(1e6, rel=0.01)


def test_a_file_that_lost_half_of_its_times_has_the_other_half(failing: Path) -> None:
    session = load(failing / "07_half_of_the_times_lost.json")
    (notice,) = (one for one in session.traces[0].notices if one.slug == "missing-time")
    assert notice.count == 75
    assert session.traces[0].steps.height == 3
    assert shares(session)["compute"] == pytest.approx(0.80, abs=0.005)


def test_halves_of_events_without_a_category_are_refused_by_what_they_have(failing: Path) -> None:
    with pytest.raises(InputError, match="no category of PyTorch") as raised:
        load(failing / "11_begin_end_pairs.json")
    assert raised.value.slug == "not-a-trace"


def test_a_gpu_on_which_nothing_ran_is_told(failing: Path) -> None:
    session = load(failing / "12_model_on_cpu_gpu_visible.json")
    assert "gpu-not-used" in slugs(session)
    assert "no launch on the GPU that the process sees is recorded" in answer(session).sentence


def test_a_page_has_one_window_which_is_not_that_of_the_profiler(failing: Path) -> None:
    session = load(failing / "10_profiler_span.json")
    assert answer(session).sentence.startswith(
        "A window of 19.9 ms: 90.5 % of the time the CPU runs operators"
    )
    assert answer(session).whole_ns == 19_900_000
    document = build(session, ReportOptions(full=True))
    assert document["critical_path"]["window_ns"] == 19_900_000


def test_kernels_that_share_a_correlation_are_not_missing(failing: Path) -> None:
    assert "launches-without-work" not in slugs(load(failing / "13_shared_correlation.json"))


def test_a_duration_that_cannot_be_is_left_out(failing: Path) -> None:
    session = load(failing / "15_kernel_overruns_successors.json")
    (notice,) = (one for one in session.traces[0].notices if one.slug == "impossible-duration")
    assert (notice.severity, notice.count) == ("warning", 1)
    assert shares(session)["compute"] == pytest.approx(0.60, abs=0.005)


@pytest.mark.parametrize("name", ["steps_a", "steps_b"])
def test_four_steps_of_an_optimizer_are_four_steps(failing: Path, name: str) -> None:
    (trace,) = load(failing / "versions" / f"{name}.json.gz").traces
    assert trace.steps.height == 4


def test_who_only_asks_who_is_there_does_not_communicate(failing: Path) -> None:
    labels = answer(load(failing / "versions" / "no_comm_stack.json")).parts["label"]
    assert not labels.str.contains("communication").any()


def test_a_log_of_the_compiler_is_refused_by_its_name(failing: Path) -> None:
    with pytest.raises(InputError, match="TORCH_TRACE"):
        load(failing / "versions" / "torch_trace_head.log")


@pytest.mark.parametrize(
    ("name", "told", "slug"),
    [
        ("kineto/mi250_minitoy", "1 step of 9.33 ms: ", "cut-steps"),
        ("kineto/mi250_minitoy", "the host loaded code onto the device or set it up", "cut-steps"),
        (
            "kineto/mi300_sglang_decode_graphs",
            "those of the work before, lie before the recording",
            "busy-before-window",
        ),
        (
            "critical_path/simple_add",
            "the host loaded code onto the device or set it up",
            "no-steps",
        ),
        (
            "multirank/sampled_rank0_of_128",
            "cannot be told: most operators were left out of the file",
            "operators-left-out",
        ),
    ],
)
def test_public_traces_are_told_as_their_events_are(
    shared_data: Path, name: str, told: str, slug: str
) -> None:
    session = load(shared_data / f"{name}.json.gz")
    assert told in answer(session).sentence
    assert slug in slugs(session)
