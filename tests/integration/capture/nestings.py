"""A program of random nestings: annotations around steps, in threads and generators, profilers, recordings.

usage: nestings.py SEED RECORDINGS DIRECTORY; without a directory nothing is recorded, and PyTorch alone does no harm
either. Every annotation may begin under one recorder and end under another one.
"""

import contextlib
import random
import sys
import threading

import torch
from torch.profiler import record_function

import traceloom

torch.set_num_threads(1)
seed, recordings = int(sys.argv[1]), int(sys.argv[2])
dice = random.Random(seed)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
open_annotations: list = []
stop = threading.Event()


def step() -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def suspended():
    with record_function("generator"):
        while True:
            torch.ones(3).sum()
            yield


def worker(number: int) -> None:
    chance = random.Random(seed * 100 + number)
    while not stop.is_set():
        with record_function(f"thread {number}"):
            for _ in range(chance.randrange(1, 40)):
                torch.ones(4).add(1)
            stop.wait(chance.random() * 0.004)


def act() -> None:
    kind = dice.choice(
        [
            "step",
            "step",
            "step",
            "open",
            "close",
            "generator",
            "raise",
            "scope",
            "around",
            "hook",
            "profiler",
        ]
    )
    if kind == "step":
        step()
    elif kind == "open":
        annotation = record_function(f"open {len(open_annotations)}")
        annotation.__enter__()
        open_annotations.append(annotation)
    elif kind == "close" and open_annotations:
        open_annotations.pop(dice.randrange(len(open_annotations))).__exit__(None, None, None)
    elif kind == "generator":
        generator = suspended()
        next(generator)
        generators.append(generator)
        if len(generators) > 3:
            next(generators.pop(dice.randrange(4)))
    elif kind == "raise":
        with contextlib.suppress(ValueError), record_function("raises"):
            step()
            raise ValueError
    elif kind == "scope":
        with traceloom.scope("scope"):
            step()
    elif kind == "around":
        with record_function("around several"):
            for _ in range(dice.randrange(1, 5)):
                step()
    elif kind == "hook":  # the step is made inside the backward pass
        parameter = next(model.parameters())
        handle = parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(torch.randn(4, 8)).sum().backward()
        handle.remove()
    elif kind == "profiler":
        # With no step between two of its windows, PyTorch's profiler does by itself what is looked for here.
        schedule = torch.profiler.schedule(
            wait=dice.randrange(2), warmup=1, active=dice.randrange(1, 3), repeat=dice.randrange(3)
        )
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=cpu, schedule=dice.choice([None, schedule])
        ) as profiler:
            for _ in range(dice.randrange(1, 8)):
                with record_function("profiled"):
                    step()
                    if dice.random() < 0.7:
                        profiler.step()


generators: list = []
threads = [threading.Thread(target=worker, args=(number,)) for number in range(dice.randrange(3))]
for thread in threads:
    thread.start()
for number in range(recordings):
    options = dice.choice(
        [
            {},
            {"steps": "1..3"},
            {"steps": "0..2"},
            {"memory": True},
            {"steps": "1..2", "stacks": True},
            {"duration": 0.02},
        ]
    )
    recording = (
        traceloom.record(f"{sys.argv[3]}/{number}", quiet=True, **options)
        if sys.argv[3:]
        else contextlib.nullcontext()
    )
    with recording:
        for _ in range(dice.randrange(1, 12)):
            act()
    for _ in range(dice.randrange(3)):
        act()
stop.set()
for thread in threads:
    thread.join()
for annotation in open_annotations:
    annotation.__exit__(None, None, None)
generators.clear()
print("done")
