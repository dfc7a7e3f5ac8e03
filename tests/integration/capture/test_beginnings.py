"""From when on a program is recorded: every operator of every program is kept."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytestmark = pytest.mark.torch

HIDDEN_CAP = """
import json, os
os.environ["TRACELOOM_RECORD"] = json.dumps({**json.loads(os.environ["TRACELOOM_RECORD"]), "early_cap": CAP})
"""


def operators(run: Any, name: str) -> int:
    return sum(event["name"] == name for event in run.events() if event.get("cat") == "cpu_op")


def with_cap(text: str, seconds: float) -> str:
    """The program with a shorter cap of the early part, so that a test need not wait for a minute."""
    return HIDDEN_CAP.replace("CAP", str(seconds)) + text


@pytest.mark.parametrize("iterations", [3, pytest.param(3000, marks=pytest.mark.thorough)])
def test_bare_operators_are_recorded_from_the_first_one_on(recorder: Any, iterations: int) -> None:
    run = recorder.python(
        f"""
        import torch, traceloom
        for _ in range({iterations}):
            with traceloom.scope("multiply"):
                torch.ones(4, 4) @ torch.ones(4, 4)
        """,
        train=False,
    )
    assert run.code == 0
    assert operators(run, "aten::matmul") == iterations
    assert run.names().count("traceloom.scope:multiply") == iterations


def test_torch_in_a_worker_thread_alone_is_recorded(recorder: Any) -> None:
    run = recorder.python(
        """
        import threading, torch
        thread = threading.Thread(target=lambda: [torch.ones(4).add(1) for _ in range(100)])
        thread.start()
        thread.join()
        """,
        train=False,
    )
    assert operators(run, "aten::add") == 100


def test_the_window_begins_with_the_first_operator_not_with_the_imports_before_it(
    recorder: Any,
) -> None:
    run = recorder.python(
        "import torch, time; time.sleep(1.2)\nfor _ in range(50): torch.ones(4).add(1)", train=False
    )
    window = run.rank()["window"]
    assert window["end_ns"] - window["start_ns"] < 0.6e9
    assert window["start_ns"] - run.rank()["created_ns"] > 1.1e9
    assert operators(run, "aten::add") == 50


def test_what_came_long_before_the_first_module_is_kept_in_a_file_of_its_own(recorder: Any) -> None:
    run = recorder.python(
        """
        import time
        for _ in range(30): torch.ones(4).add(1)
        time.sleep(2.2)
        for _ in range(3): model(torch.randn(4, 16))
        """
    )
    window = run.rank()["window"]
    assert operators(run, "aten::addmm") == 6
    assert operators(run, "aten::add") == 0
    before = run.json(window["before"]["file"])["traceEvents"]
    kept = [event["name"] for event in before if event.get("cat") == "cpu_op"]
    assert (kept.count("aten::add"), len(kept)) == (30, window["before"]["operators"])
    assert window["end_ns"] - window["start_ns"] < 1e9


def test_a_program_that_loads_for_longer_than_the_cap_is_recorded_when_it_begins_to_work(
    recorder: Any,
) -> None:
    text = "import time, torch\ntorch.ones(3)\ntime.sleep(1.5)\n"
    bare = recorder.python(
        with_cap(text + "for _ in range(300): torch.ones(4).add(1)", 0.6), train=False
    )
    assert operators(bare, "aten::add") == 300
    modules = "model = torch.nn.Linear(4, 4)\nfor _ in range(300): model(torch.ones(2, 4))"
    run = recorder.python(with_cap(text + modules, 0.6), "--force", train=False)
    assert operators(run, "aten::addmm") == 300


def test_an_early_part_that_is_full_is_kept_and_the_next_one_does_not_replace_it(
    recorder: Any,
) -> None:
    text = """
import time, torch
for _ in range(200): torch.ones(4).add(1)
time.sleep(1.0)
for _ in range(20): torch.ones(4).mul(2)
"""
    run = recorder.python(with_cap(text, 0.8), train=False)
    assert operators(run, "aten::add") == 200
    assert operators(run, "aten::mul") == 0


def test_children_of_multiprocessing_are_recorded_if_they_are_the_job_and_not_beside_it(
    recorder: Any,
) -> None:
    text = """
    import torch, torch.multiprocessing as mp
    def work(number): return [float(torch.ones(4).add(number).sum()) for _ in range(20)][-1]
    if __name__ == "__main__":
        with mp.get_context("spawn").Pool(2) as pool: print(pool.map(work, range(2), chunksize=1))
        EXTRA
    """
    alone = recorder.python(text.replace("EXTRA", "pass"), train=False)
    assert alone.out == "[4.0, 8.0]\n"
    assert sum(operators_of(alone, part, "aten::add") for part in alone.capture["ranks"]) == 40
    recorder.script("for _ in range(10): step()", "train.py")
    training = text.replace("EXTRA", "exec(open('train.py').read())")
    run = recorder.python(training, "--force", train=False)
    assert [part["window"]["first_step"] for part in run.capture["ranks"]] == [3]


def test_children_that_come_one_after_the_other_are_all_recorded(recorder: Any) -> None:
    run = recorder.python(
        """
        import torch, torch.multiprocessing as mp
        def work(count): [torch.ones(4).add(1) for _ in range(count)]
        if __name__ == "__main__":
            for count in (3, 5, 7):
                worker = mp.get_context("spawn").Process(target=work, args=(count,))
                worker.start(); worker.join()
        """,
        train=False,
    )
    assert sorted(operators_of(run, part, "aten::add") for part in run.capture["ranks"]) == [
        3,
        5,
        7,
    ]


def operators_of(run: Any, part: dict[str, Any], name: str) -> int:
    return sum(event["name"] == name for event in run.json(part["window"]["file"])["traceEvents"])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_loader_workers_are_not_recorded_however_they_are_started(
    recorder: Any, method: str
) -> None:
    run = recorder.python(
        f"""
        import torch
        class Rows(torch.utils.data.Dataset):
            def __len__(self): return 64
            def __getitem__(self, at): return torch.ones(16).mul(at)
        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(Rows(), 4, num_workers=2, multiprocessing_context="{method}")
            print(sum(float(batch.sum()) for batch in loader))
        """,
        train=False,
    )
    assert run.out == "32256.0\n"
    assert [part["name"] for part in run.capture["ranks"]] == ["rank0"]
    assert operators(run, "aten::mul") == 0
    assert operators(run, "aten::item") >= 16


def test_a_server_with_worker_threads_is_recorded_on_all_of_them(recorder: Any) -> None:
    run = recorder.python(
        """
        import http.client, http.server, threading, time, torch
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                torch.ones(8).add(1)
                self.send_response(200); self.end_headers()
            def log_message(self, *_): pass
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            connection = http.client.HTTPConnection(*server.server_address)
            connection.request("GET", "/"); connection.getresponse().read(); connection.close()
        server.shutdown()
        """,
        "--after",
        "0.5",
        "--duration",
        "1.2",
        train=False,
    )
    threads = {event["tid"] for event in run.events() if event["name"] == "aten::add"}
    assert len(threads) == operators(run, "aten::add") > 20


def test_a_main_thread_that_waits_for_its_workers_is_no_obstacle_to_a_window_by_time(
    recorder: Any,
) -> None:
    run = recorder.python(
        """
        import threading, time, torch
        def work():
            end = time.monotonic() + 4
            while time.monotonic() < end: torch.ones(8).add(1); time.sleep(0.001)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """,
        "--after",
        "0.3",
        "--duration",
        "0.5",
        train=False,
    )
    window = run.rank()["window"]
    assert window["end_ns"] - window["start_ns"] < 3e9
    assert operators(run, "aten::add") > 20  # some hundred, where nobody else uses the machine


PLAYED_DEVICE = """
import torch
from traceloom.capture import attach as inject, main_thread as moments
from traceloom.capture.settings import Settings
used, known = [], len(torch.cuda._queued_calls)
torch.cuda.is_initialized = moments.is_device_ready = lambda *_: bool(used)
recorder = inject.attach(Settings("run"))
torch.ones(3)
print(recorder.plan.phase.value)
for call, _ in torch.cuda._queued_calls[known:]: call()  # as PyTorch does when a device is first used
used.append(True)
print(recorder.plan.phase.value)
"""


def test_where_there_is_a_device_nothing_begins_before_the_program_uses_it(recorder: Any) -> None:
    run = recorder.plain([sys.executable, recorder.script(PLAYED_DEVICE, train=False)])
    assert run.out.split() == ["idle", "early"], run.err
