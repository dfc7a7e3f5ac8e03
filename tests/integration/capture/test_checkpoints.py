"""Marks around activation checkpointing: there while it is recorded, and nothing else is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import traceloom
from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.autograd import find_recomputed_work
from traceloom.capture.modules import NAME

pytestmark = pytest.mark.torch

JOB = """
import torch.utils.checkpoint as there
from torch.utils.checkpoint import checkpoint

def original():
    return there._checkpoint_without_reentrant_generator.__code__.co_filename == there.__file__

layers = [torch.nn.Linear(8, 8) for _ in range(3)]
seen = set()

def failing(x):
    raise ValueError("mine")

def pass_through(reentrant):
    x = torch.randn(4, 8, requires_grad=True)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    x.sum().backward()
    seen.add(original())
    try:
        checkpoint(failing, x, use_reentrant=False)
    except ValueError as error:
        seen.add(str(error))

for _ in range(12):
    pass_through({reentrant})
    step()
print(sorted(map(str, seen)), original())
"""


def test_each_checkpoint_has_a_mark_before_and_behind_it(recorder: Any) -> None:
    run = recorder.python(JOB.replace("{reentrant}", "False"))
    # replaced while it is recorded, as it was before and after; errors of the user's own come through
    assert run.out == "['False', 'True', 'mine'] True\n"
    trace = traceloom.load(run.directory).traces[0]
    marks = trace.events.filter(trace.events["name"] == NAME)
    # three whole checkpoints, and one that only begins
    whole = marks.drop_nulls("step").group_by("step").len()
    assert whole.height == 5
    assert set(whole["len"].to_list()) == {7}
    found = find_recomputed_work(trace)
    assert np.count_nonzero(found.own) == marks.height
    assert not (found.own & found.root).any()
    assert set(build_forest(trace).row[found.own].tolist()) == set(marks["event"].to_list())


@pytest.mark.thorough
def test_the_older_way_has_no_marks(recorder: Any) -> None:
    run = recorder.python(JOB.replace("{reentrant}", "True"))
    assert run.out.endswith("True\n")
    # only that one which fails, and is made the newer way
    repeated = [name for name in run.names() if name == "CheckpointFunctionBackward"]
    assert len([name for name in run.names() if name == NAME]) == len(repeated) // 3 > 0
