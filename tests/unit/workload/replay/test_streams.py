"""Streams of an accelerator: launched as recorded, with events where one needs what another does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.plans import PlanBuilder

torch = pytest.importorskip("torch")

from traceloom.workload.replay.running import PlanRunner, RunOptions, run_passes  # noqa: E402

pytestmark = pytest.mark.torch
NEG = "aten::neg(Tensor self) -> Tensor"


def two_streams() -> PlanBuilder:
    """x goes through an op on stream 7, one on 20 that needs its result, and one on 7 that needs that of both."""
    build = PlanBuilder()
    x = build.tensor(64, external=True, device="cuda:0")
    first, second, third = (build.tensor(64, device="cuda:0") for _ in range(3))
    build.run(NEG, [{"tensor": 0}], [x], [first], stream=7)
    build.run(NEG, [{"tensor": 0}], [first], [second], stream=20)
    build.run(
        "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor",
        [{"tensor": 0}, {"tensor": 1}],
        [first, second],
        [third],
        stream=7,
    )
    build.run(
        "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)",
        [{"tensor": 0}, {"tensor": 1}, False],
        [x, third],
        [x],
        stream=None,
    )
    return build


def test_events_stand_where_work_changes_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        numbers = iter("abcdef")

        def __init__(self) -> None:
            self.name = next(self.numbers)

        def record(self, stream: Any) -> None:
            log.append(f"record {self.name} on {stream}")

        def wait(self, stream: Any) -> None:
            log.append(f"{stream} waits for {self.name}")

    streams = iter(["s7", "s20"])
    module = SimpleNamespace(
        Stream=lambda _: next(streams),
        Event=Event,
        set_stream=lambda stream: log.append(f"on {stream}"),
        synchronize=lambda: log.append("done"),
        mem_get_info=lambda _: (10**9, 10**9),
        max_memory_allocated=lambda: 5,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: log.append(f"kept for {stream}")
    )
    execution = PlanRunner(two_streams().build(), torch.device("meta"), RunOptions())
    log.clear()
    execution.run_pass(is_recording=True)
    assert log == [
        "done",
        "on s7",
        "record a on s7",
        "on s20",
        "kept for s20",
        "s20 waits for a",
        "record b on s20",
        "on s7",
        "kept for s7",
        "s7 waits for b",
        "done",
    ]
    assert execution.peak_bytes() == 5


def test_memory_is_kept_for_the_stream_of_the_next_op_that_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch made on stream 20 and kept for stream 7, as a loader does; of another tensor nobody makes use."""
    build = PlanBuilder()
    x = build.tensor(64, external=True, device="cuda:0")
    batch, unused, out = (build.tensor(64, device="cuda:0") for _ in range(3))
    keep = "aten::record_stream(Tensor(a!) self, Stream s) -> ()"
    arguments = [{"tensor": 0}, {"object": "Stream"}]
    build.run(NEG, [{"tensor": 0}], [x], [batch], stream=20)
    build.run(NEG, [{"tensor": 0}], [x], [unused], stream=20)
    build.run(keep, arguments, [batch], [], stream=None)
    build.run(keep, arguments, [unused], [], stream=None)
    build.run(NEG, [{"tensor": 0}], [batch], [out], stream=7)
    kept: list[str] = []
    current = ["none"]
    names = iter(["s7", "s20"])
    event = SimpleNamespace(record=lambda _: None, wait=lambda _: None)
    module = SimpleNamespace(
        Stream=lambda _: next(names),
        Event=lambda: event,
        set_stream=lambda stream: current.__setitem__(0, stream),
        current_stream=lambda _: current[0],
        synchronize=lambda: None,
        mem_get_info=lambda _: (10**9, 10**9),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: kept.append(stream))
    execution = PlanRunner(build.build(), torch.device("meta"), RunOptions(strict=True))
    assert execution.stand_ins.height == 0
    kept.clear()
    execution.run_pass(is_recording=True)
    # What keeps the batch for the stream that uses it, before it runs there; the op itself; that of the other tensor,
    # for which there is only the current stream.
    assert kept == ["s7", "s7", "s7"]
    (on_cpu,) = (
        PlanRunner(build.build(), torch.device("cpu"), RunOptions())
        .stand_ins["reason"]
        .unique()
        .to_list()
    )
    assert on_cpu == "no-gpu"


def test_a_plan_of_two_streams_runs_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    execution = PlanRunner(two_streams().build(), torch.device("cuda", 0), RunOptions(strict=True))
    replayed = run_passes(execution, RunOptions(iterations=3))
    assert len(replayed.iteration_ns) == 3
    assert replayed.peak_bytes >= 4 * 64 * 4
