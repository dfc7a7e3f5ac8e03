"""From when on a program is recorded: its first call of a module, a second without any, or a moment."""

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


BUSY = """
import time
def busy(seconds, end=None):
    end = time.monotonic() + seconds
    while time.monotonic() < end: torch.ones(4).add(1); time.sleep(0.001)
"""


@pytest.mark.thorough
def test_everything_from_the_first_call_of_a_module_on_is_recorded_and_nothing_before(
    recorder: Any,
) -> None:
    run = recorder.python(
        """
        for _ in range(30): torch.ones(4).add(1)
        for _ in range(3): model(torch.randn(4, 16))
        for _ in range(20): torch.ones(4).add(1)
        """
    )
    assert operators(run, "aten::addmm") == 6
    assert operators(run, "aten::add") == 20
    assert run.rank()["window"]["kind"] == "early"


def test_a_program_that_calls_no_module_is_recorded_after_a_second(recorder: Any) -> None:
    run = recorder.python(
        "import torch, traceloom\n"
        + BUSY
        + "busy(2.5)\nwith traceloom.scope('multiply'): torch.ones(4, 4) @ torch.ones(4, 4)",
        train=False,
    )
    window = run.rank()["window"]
    assert (window["kind"], window["first_step"]) == ("early", None)
    assert window["start_ns"] - run.rank()["created_ns"] > 0.9e9
    assert operators(run, "aten::add") > 100
    assert operators(run, "aten::matmul") == run.names().count("traceloom.scope:multiply") == 1


@pytest.mark.thorough
def test_a_program_that_is_over_before_that_is_none_that_computes(recorder: Any) -> None:
    run = recorder.python("import torch\nfor _ in range(3): torch.ones(4).add(1)", train=False)
    assert run.code == 0
    assert run.ours[-1].endswith("[no-torch-calls]")
    assert not run.directory.exists()


@pytest.mark.thorough
def test_a_program_that_defines_a_module_is_waited_for(recorder: Any) -> None:
    run = recorder.python(
        """
        import time, torch
        class Net(torch.nn.Module):
            def forward(self, x): return x * 2
        end = time.monotonic() + 2
        while time.monotonic() < end: torch.ones(4).add(1); time.sleep(0.001)
        for _ in range(7): Net()(torch.ones(3))
        """,
        train=False,
    )
    assert (operators(run, "aten::add"), operators(run, "aten::mul")) == (0, 7)


def test_torch_in_a_worker_thread_alone_is_recorded(recorder: Any) -> None:
    text = "import threading, torch\n" + BUSY
    text += "thread = threading.Thread(target=busy, args=(3,))\nthread.start()\nthread.join()"
    assert operators(recorder.python(text, train=False), "aten::add") > 50


@pytest.mark.thorough
def test_the_window_begins_with_the_first_operator_not_with_what_is_before_it(
    recorder: Any,
) -> None:
    run = recorder.python(
        "import torch, time; time.sleep(3)\nfor _ in range(50): torch.ones(4).add(1)", train=False
    )
    window = run.rank()["window"]
    assert window["end_ns"] - window["start_ns"] < 0.6e9
    assert window["start_ns"] - run.rank()["created_ns"] > 2.5e9
    assert operators(run, "aten::add") == 50


def test_a_program_without_steps_is_recorded_for_so_long(recorder: Any) -> None:
    text = """
import time, torch
model = torch.nn.Linear(4, 4)
end = time.monotonic() + 3
while time.monotonic() < end: model(torch.ones(2, 4)); time.sleep(0.001)
for _ in range(20): torch.ones(4).mul(2)
"""
    run = recorder.python(with_cap(text, 0.8), train=False)
    window = run.rank()["window"]
    assert 0.75e9 < window["end_ns"] - window["start_ns"] < 2.5e9
    assert operators(run, "aten::addmm") > 20
    assert operators(run, "aten::mul") == 0


@pytest.mark.thorough
def test_children_of_multiprocessing_are_recorded_if_they_are_the_job_and_not_beside_it(
    recorder: Any,
) -> None:
    text = """
    import time, torch, torch.multiprocessing as mp
    def work(number):
        end = time.monotonic() + 3
        while time.monotonic() < end: last = float(torch.ones(4).add(number).sum())
        return last
    if __name__ == "__main__":
        pool = mp.get_context("spawn").Pool(2)
        print(pool.map(work, range(2), chunksize=1))
        pool.close()  # `with` would end the workers by SIGTERM
        pool.join()
        EXTRA
    """
    alone = recorder.python(text.replace("EXTRA", "pass"), train=False)
    assert alone.out == "[4.0, 8.0]\n"
    assert min(operators_of(alone, part, "aten::add") for part in alone.capture["ranks"]) > 20
    recorder.script("for _ in range(10): step()", "train.py")
    training = text.replace("EXTRA", "exec(open('train.py').read())")
    run = recorder.python(training, "--force", train=False)
    assert [part["window"]["first_step"] for part in run.capture["ranks"]] == [3]


@pytest.mark.thorough
def test_children_that_come_one_after_the_other_are_all_recorded(recorder: Any) -> None:
    run = recorder.python(
        """
        import torch, torch.multiprocessing as mp
        def work(count):
            model = torch.nn.Linear(2, 2)
            for _ in range(count): model(torch.ones(1, 2))
        if __name__ == "__main__":
            for count in (3, 5, 7):
                worker = mp.get_context("spawn").Process(target=work, args=(count,))
                worker.start(); worker.join()
        """,
        train=False,
    )
    assert sorted(operators_of(run, part, "aten::addmm") for part in run.capture["ranks"]) == [
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
            total = torch.nn.Linear(16, 1, bias=False)
            torch.nn.init.ones_(total.weight)
            print(sum(float(total(batch).sum()) for batch in loader))
        """,
        train=False,
    )
    assert run.out == "32256.0\n"
    assert [part["name"] for part in run.capture["ranks"]] == ["rank0"]
    assert operators(run, "aten::mul") == 0
    assert operators(run, "aten::item") >= 16


@pytest.mark.thorough
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


@pytest.mark.thorough
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
import os, torch
from traceloom.capture import attach, exits
from traceloom.capture.settings import Settings
used, known = [], len(torch.cuda._queued_calls)
exits._DEVICE_FILES, torch.version.cuda = ("/dev/null",), "12.8"
torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = (lambda: bool(used)), (lambda: False)
recorder = attach.attach(Settings("run", early_cap=60.0))
model, seen = torch.nn.Linear(2, 2), []
weight = torch.ones(2, requires_grad=True)
def see(): seen.append(recorder.plan.phase.value)
model(torch.ones(1, 2)); see()
if USES:
    for call, _ in torch.cuda._queued_calls[known:]: call()  # as PyTorch does when a device is first used
    used.append(True)
see()
for _ in range(3): weight.sum().backward(); see()
print(*seen)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("uses", "phases"),
    [
        (True, ["waiting", "waiting", "recording", "recording", "recording"]),
        (False, ["waiting", "waiting", "waiting", "recording", "recording"]),
    ],
)
def test_where_there_is_a_device_its_first_use_is_waited_for_and_not_for_long(
    recorder: Any, uses: bool, phases: list[str]
) -> None:
    text = PLAYED_DEVICE.replace("USES", str(uses))
    run = recorder.plain([sys.executable, recorder.script(text, train=False)])
    assert run.out.split() == phases, run.err
