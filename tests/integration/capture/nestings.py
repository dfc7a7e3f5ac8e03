"""A program made by chance: annotations, threads, profilers, signals and forks around training steps.

usage: nestings.py SEED. It prints what it did, and is run unrecorded and recorded, with the same result.
"""

import concurrent.futures
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

torch.set_num_threads(1)
seed = int(sys.argv[1])
dice = random.Random(seed)
torch.manual_seed(seed)
FEATURES = (
    "fast",
    "subclass",
    "hooks",
    "pool",
    "thread",
    "profiler",
    "observer",
    "signal",
    "freeze",
    "fork",
    "sparse",
)
# Each program has some of them, so that those which end a recording leave others to be recorded.
features = set(dice.sample(FEATURES, dice.randrange(1, 5)))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
open_annotations: list = []
generators: list = []
kept: list = []  # memory of the program, in which no byte may change
stop = threading.Event()


class InterruptionError(Exception):
    """What a signal handler raises."""


class Annotation(record_function):
    """A subclass, as many programs have one."""


class Doubled(torch.autograd.Function):
    """A function of the user's own, called from C++."""

    @staticmethod
    def forward(ctx, value):
        with record_function("in forward"):
            return value * 2

    @staticmethod
    def backward(ctx, gradient):
        with record_function("in backward"):
            return gradient * 2


def step() -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append([bytearray(size) for size in (600, 2_000, 70_000, 77_847)])


def suspended():
    with record_function("generator"):
        while True:
            torch.ones(3).sum()
            yield


def work_in_thread(number: int) -> None:
    chance = random.Random(seed * 100 + number)
    while not stop.is_set():
        with record_function(f"thread {number}"):
            for _ in range(chance.randrange(1, 40)):
                torch.ones(4).add(1)
            stop.wait(chance.random() * 0.004)


def train_in_thread() -> None:
    own = torch.nn.Linear(4, 4)
    steps = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(dice.randrange(1, 6)):
        own(torch.ones(2, 4)).sum().backward()
        steps.step()


def around_steps(annotation) -> None:
    with annotation:
        for _ in range(dice.randrange(1, 4)):
            step()


def act_open() -> None:
    annotation = record_function(f"open {len(open_annotations)}")
    annotation.__enter__()
    open_annotations.append(annotation)


def act_close() -> None:
    if open_annotations:
        open_annotations.pop(dice.randrange(len(open_annotations))).__exit__(None, None, None)


def act_generator() -> None:
    generator = suspended()
    next(generator)
    generators.append(generator)
    if len(generators) > 3:
        next(generators.pop(dice.randrange(4)))


def act_raise() -> None:
    with contextlib.suppress(ValueError), record_function("raises"):
        step()
        raise ValueError


def act_warn() -> None:
    warnings.warn("shown once at this place", stacklevel=1)


def act_fast() -> None:
    around_steps(torch._C._profiler._RecordFunctionFast("fast"))


def act_subclass() -> None:
    around_steps(Annotation("subclass"))


def act_hooks() -> None:
    if dice.random() < 0.5:  # the step is made inside the backward pass
        parameter = next(model.parameters())
        handle = parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(torch.randn(4, 8)).sum().backward()
        handle.remove()
    else:
        value = torch.ones(3, requires_grad=True)
        (Doubled.apply(value) * 3).sum().backward()


def act_pool() -> None:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda _: model(torch.ones(4, 8)).sum(), range(3)))
    sum(parts).backward()
    optimizer.step()


def act_thread() -> None:
    thread = threading.Thread(target=train_in_thread)
    thread.start()
    thread.join()


def act_profiler() -> None:
    # No two of its windows without a step between them: PyTorch alone does harm then.
    with profile(activities=[ProfilerActivity.CPU]) as own:
        for _ in range(dice.randrange(1, 4)):
            with record_function("profiled"):
                step()
    print("profiled", sum(event.name == "profiled" for event in own.events()) > 0)
    features.discard("profiler")


def act_observer() -> None:
    path = f"observed-{os.getpid()}.json"
    observer = ExecutionTraceObserver().register_callback(path)
    observer.start()
    step()
    observer.stop()
    observer.unregister_callback()
    print("observed", Path(path).stat().st_size > 1000)
    Path(path).unlink()
    features.discard("observer")


def act_signal() -> None:
    def interrupt(*_: object) -> None:
        raise InterruptionError

    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.001, 0.02))
        try:
            while True:
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except InterruptionError:
        torch.set_grad_enabled(True)
        print("interrupted")
    except (RuntimeError, SystemError):  # it hit PyTorch between two of its own lines
        torch.set_grad_enabled(True)
        print("interrupted")


def act_freeze() -> None:
    gc.freeze()


def act_fork() -> None:
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        if dice.random() < 0.5:
            with profile(activities=[ProfilerActivity.CPU]) as own:
                torch.ones(3).add(1)
            sys.exit(sum(event.name == "aten::add" for event in own.events()))
        model(torch.ones(2, 8))
        sys.exit(1)
    print("fork", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def act_sparse() -> None:
    matrix = torch.eye(8).to_sparse_csr()
    value = torch.randn(8, 8)
    for _ in range(5):
        value = matrix @ value


ALWAYS = [step, step, step, step, act_open, act_close, act_generator, act_raise, act_warn]
threads = [
    threading.Thread(target=work_in_thread, args=(number,))
    for number in range(dice.randrange(3) if "fork" not in features else 0)
]
for thread in threads:
    thread.start()
for _ in range(dice.randrange(4, 40)):
    names = [name for name in sorted(features) if f"act_{name}" in globals()]
    acts = ALWAYS + [globals()[f"act_{name}"] for name in names]
    dice.choice(acts)()
stop.set()
for thread in threads:
    thread.join()
for annotation in open_annotations:
    annotation.__exit__(None, None, None)
generators.clear()
changed = sum(len(block) - block.count(0) for row in kept for block in row)
print("done", len(kept), "steps, changed bytes:", changed)
