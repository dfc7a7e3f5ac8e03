"""Which part of a run is recorded."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def spans(run: Any, prefix: str) -> list[tuple[float, float]]:
    events = [event for event in run.events() if str(event.get("name")).startswith(prefix)]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in events)


@pytest.fixture(scope="module")
def usual(shared_recorder: Any) -> Any:
    """A run that is recorded without any option."""
    return shared_recorder.python("for _ in range(12): step()")


@pytest.fixture(scope="module")
def with_graph(shared_recorder: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with a graph step."""
    beside = type(shared_recorder)(tmp_path_factory.mktemp("graph"))
    return beside.python("for _ in range(12): step()", "--graph")


def test_by_default_five_steps_are_recorded_from_the_fourth_on(usual: Any) -> None:
    run = usual
    rank = run.rank()
    assert run.code == 0
    assert run.files == {"capture.json", "rank0.capture.json", "rank0.kineto.json.gz"}
    assert rank["settings"]["shapes"] is True
    assert rank["notices"] == []
    assert rank["window"]["kind"] == "steps"
    assert (rank["window"]["first_step"], rank["window"]["step_count"]) == (3, 5)
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert rank["step_source"] == "optimizer"
    states = rank["steps"]["state"]
    assert states[:8] == ["early"] * 3 + ["recorded"] * 5
    assert set(states[8:]) <= {"unrecorded", "disturbed"}
    assert len(states) == 12
    assert all(duration > 0 for duration in rank["steps"]["duration_ns"])
    assert rank["graph_step"] is None
    shapes = [event for event in run.events() if event.get("args", {}).get("Input Dims")]
    assert len(shapes) > 10


def test_steps_begin_at_the_end_of_the_optimizer_and_agree_with_the_step_times(usual: Any) -> None:
    run = usual
    marks, optimizer = spans(run, "traceloom.step#"), spans(run, "Optimizer.step#")
    assert len(optimizer) == 5
    operators = [event for event in run.events() if event.get("cat") == "cpu_op"]
    for begin, _ in marks:  # the optimizer's own annotation is all that is open there
        assert not [op for op in operators if op["ts"] < begin < op["ts"] + op["dur"]]
    for (start, _), (begin, _), (end, _) in zip(optimizer, marks, marks[1:], strict=False):
        assert begin < start < end, "each step holds its optimizer step"
    base = run.json("rank0.kineto.json.gz")["baseTimeNanoseconds"]
    steps = run.rank()["steps"]
    for number in (4, 5, 6, 7):
        mark_ns = round(marks[number - 3][0] * 1000) + base
        # a double holds microseconds since 1970 to about a nanosecond
        assert abs(steps["start_ns"][number] - mark_ns) <= 1000


def test_the_graph_step_is_the_one_behind_the_window(with_graph: Any) -> None:
    run, rank = with_graph, with_graph.rank()
    assert run.theirs == ""
    assert run.files == {
        "capture.json",
        "rank0.capture.json",
        "rank0.kineto.json.gz",
        "rank0.graph.kineto.json.gz",
        "rank0.host.json.gz",
    }
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert rank["steps"]["state"][:9] == ["early"] * 3 + ["recorded"] * 5 + ["graph"]
    assert rank["graph_step"]["step"] == 8
    assert rank["graph_step"]["duration_ns"] == rank["steps"]["duration_ns"][8]


THREADED = """
import threading
def work():
    for _ in range(400): model(torch.ones(2, 16)); stop.wait(0.005)
stop = threading.Event()
thread = threading.Thread(target=work); thread.start()
for _ in range(12): step()
stop.set(); thread.join()
print("done")
"""
SPARSE = """
held = torch.eye(4).to_sparse_csr()
for _ in range(12): step()
print("done")
"""
OBSERVER = """
from torch.profiler import ExecutionTraceObserver
mine = ExecutionTraceObserver().register_callback("mine.json")
for _ in range(12): step()
mine.unregister_callback()
print("done")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", [THREADED, SPARSE, OBSERVER], ids=["threads", "csr", "own"])
def test_the_graph_step_is_left_out_where_it_could_harm(recorder: Any, program: str) -> None:
    run = recorder.python(program, "--graph")
    assert (run.code, run.out) == (0, "done\n"), run.err
    assert [notice["slug"] for notice in run.rank()["notices"]] == ["no-graph-step"]
    assert sum("[no-graph-step]" in line for line in run.ours) == 1
    assert run.rank()["graph_step"] is None
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert not [name for name in run.files if "host" in name or "graph" in name]


def test_host_trace_and_kineto_of_the_graph_step_join_by_record_function_id(
    with_graph: Any,
) -> None:
    run = with_graph
    host = run.json("rank0.host.json.gz")["nodes"]
    kineto = run.json("rank0.graph.kineto.json.gz")["traceEvents"]
    timed = [event for event in run.events() if event.get("cat") == "cpu_op"]
    assert {event["args"]["Record function id"] for event in timed} == {0}, (
        "the timed part runs without the observer"
    )
    in_host = {
        attr["value"]: node["name"]
        for node in host
        for attr in node["attrs"]
        if attr["name"] == "rf_id"
    }
    joined = [
        event
        for event in kineto
        if event.get("cat") == "cpu_op" and in_host.get(event["args"]["Record function id"])
    ]
    operators = [event for event in kineto if event.get("cat") == "cpu_op"]
    assert len(joined) >= len(operators) - 1 > 10
    assert all(in_host[event["args"]["Record function id"]] == event["name"] for event in joined)
    assert any(node["name"].startswith("Optimizer.step#Plain") for node in host)


def test_a_run_that_ends_early_keeps_everything(recorder: Any) -> None:
    run = recorder.python("for _ in range(2): step()")
    assert run.rank()["window"]["kind"] == "early"
    assert run.marks()[:1] == [0]
    assert run.rank()["steps"]["state"] == ["recorded", "recorded"]
    assert "aten::linear" in run.names()
    assert run.rank()["graph_step"] is None


def test_the_chosen_steps_are_recorded(recorder: Any) -> None:
    run = recorder.python("for _ in range(8): step()", "--steps", "2..4")
    rank = run.rank()
    assert (rank["window"]["first_step"], rank["window"]["step_count"]) == (2, 2)
    assert run.marks() == [2, 3, 4]
    assert rank["steps"]["state"][:4] == ["unrecorded"] * 2 + ["recorded"] * 2
    assert run.names().count("Optimizer.step#Plain.step") == 2


@pytest.mark.thorough
def test_stacks_and_memory_are_in_the_trace_when_asked_for(recorder: Any) -> None:
    run = recorder.python("for _ in range(6): step()", "--steps", "3..5", "--stacks", "--memory")
    assert run.theirs == ""
    categories = {event.get("cat") for event in run.events()}
    assert {"python_function", "cpu_instant_event"} <= categories
    assert any(
        event["name"].startswith("nn.Module: Linear")
        for event in run.events()
        if event.get("ph") == "X"
    )
    # Weights and biases: 16*32 + 32 + 32*4 + 4 floats, all alive at the start.
    assert run.rank()["live_bytes_at_start"]["cpu"] >= 4 * 676


def test_inference_without_an_optimizer_gives_a_capture(recorder: Any) -> None:
    run = recorder.python(
        "with torch.no_grad():\n    for _ in range(20): model(torch.randn(4, 16))"
    )
    assert run.names().count("aten::addmm") == 40
    assert "recorded" in run.ours[-2]


def test_a_window_by_time_begins_and_ends_by_the_clock(recorder: Any) -> None:
    run = recorder.python(
        """
        import time, torch
        end = time.monotonic() + 2
        while time.monotonic() < end:
            torch.ones(8) + 1
            time.sleep(0.005)
        """,
        "--after",
        "0.5",
        "--duration",
        "0.6",
        train=False,
    )
    window = run.rank()["window"]
    assert window["kind"] == "time"
    assert 0.55e9 <= window["end_ns"] - window["start_ns"] < 1.4e9
    assert window["start_ns"] - run.rank()["created_ns"] >= 0.4e9
    assert "aten::add" in run.names()


@pytest.mark.thorough
def test_accumulation_stays_within_a_step_and_the_slowest_of_alternating_optimizers_counts(
    recorder: Any,
) -> None:
    run = recorder.python(
        """
        critic = torch.nn.Linear(16, 1)
        judge = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(6):
            for _ in range(3):  # three updates of the critic for one of the generator
                for _ in range(2):  # each over two accumulated batches
                    critic(torch.randn(8, 16)).mean().backward()
                judge.step()
            step()
        """,
        "--steps",
        "2..4",
    )
    assert len(run.rank()["steps"]["start_ns"]) == 6
    assert run.marks() == [2, 3, 4]
    assert run.names().count("Optimizer.step#SGD.step") == 6
    assert run.names().count("Optimizer.step#Plain.step") == 2


@pytest.mark.thorough
def test_traceloom_step_overrules_the_optimizer(recorder: Any) -> None:
    run = recorder.python(
        """
        import traceloom
        for _ in range(5):
            for _ in range(3): step()
            traceloom.step()
        """,
        "--steps",
        "1..3",
    )
    rank = run.rank()
    assert rank["step_source"] == "call"
    assert len(rank["steps"]["start_ns"]) == 5
    assert run.marks() == [1, 2, 3]
    assert run.names().count("Optimizer.step#Plain.step") == 6


def test_a_loop_without_an_optimizer_makes_its_steps_by_its_backward_passes(recorder: Any) -> None:
    run = recorder.python(
        """
        import torch
        weight = torch.randn(8, 8, requires_grad=True)
        for _ in range(10):
            (torch.randn(4, 8) @ weight).square().mean().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
        """,
        train=False,
    )
    rank = run.rank()
    assert (rank["step_source"], len(rank["steps"]["start_ns"])) == ("backward", 10)
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert run.names().count("aten::matmul") == 5


def test_a_window_that_is_never_reached_is_explained(recorder: Any) -> None:
    run = recorder.python("for _ in range(4): step()\nimport sys; sys.exit(7)", "--steps", "50..60")
    assert run.code == 7
    assert run.ours == [
        "traceloom: nothing was recorded: the run did not reach step 50: it made 4 steps [never-reached]"
    ]
    assert not run.directory.exists()


@pytest.mark.parametrize("steps", ["5..5", "x", "7..3", "-1"])
def test_a_choice_of_steps_that_cannot_be_is_refused(recorder: Any, steps: str) -> None:
    run = recorder.record([sys.executable, "-c", "print('ran')"], f"--steps={steps}")
    assert (run.code, run.out) == (2, "")
    assert "#bad-steps" in run.err


def test_a_program_that_trains_in_a_thread_is_recorded_there(recorder: Any) -> None:
    run = recorder.python(
        """
        import threading, time
        for _ in range(50): torch.ones(3) + 1; time.sleep(0.002)  # the main thread uses torch first
        def train():
            for _ in range(12): step()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """
    )
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert run.names().count("Optimizer.step#Plain.step") == 5
    assert len(run.ours) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [(), ("--steps", "3..8")], ids=["first call", "steps"])
def test_with_stacks_no_frame_of_ours_is_in_the_trace(
    recorder: Any, options: tuple[str, ...]
) -> None:
    run = recorder.python("for _ in range(12): step()", "--stacks", *options)
    assert run.theirs == ""
    assert run.rank()["window"]["first_step"] == 3
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    (first, _), *_ = spans(run, "traceloom.step#")
    optimizer = spans(run, "Optimizer.step#")
    assert len(optimizer) == 5
    assert all(start > first for start, _ in optimizer)
    frames = [event["name"] for event in run.events() if event.get("cat") == "python_function"]
    assert [name for name in frames if "script.py" in name and "step" in name]
    assert not [name for name in frames if "traceloom" in name]


@pytest.mark.thorough
def test_stacks_are_left_out_where_the_program_has_a_profile_function(recorder: Any) -> None:
    run = recorder.python(
        """
        import sys
        calls = []
        def mine(*_): calls.append(1)
        sys.setprofile(mine)
        for _ in range(12): step()
        print(sys.getprofile() is mine, len(calls) > 100)
        """,
        "--stacks",
    )
    assert run.out == "True True\n"
    assert [notice["slug"] for notice in run.rank()["notices"]] == ["no-stacks"]
    assert run.marks() == [3, 4, 5, 6, 7, 8]
