"""Programs that use torch.compile."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def test_compiled_models_and_optimizers_are_recorded_and_nothing_is_said_about_our_hooks(recorder: Any) -> None:
    script = recorder.script(
        """
        import traceloom
        compiled = torch.compile(model, backend="eager")
        update = torch.compile(optimizer.step, backend="eager")
        def forward(batch):
            with traceloom.scope("forward"):
                return compiled(batch).square().mean()
        whole = torch.compile(forward, backend="eager")
        for _ in range(12):
            whole(torch.randn(8, 16)).backward()
            update()
            optimizer.zero_grad()
        print("done")
        """
    )
    plain, run = recorder.plain([sys.executable, script]), recorder.record([sys.executable, script])
    assert (run.code, run.out) == (0, plain.out)
    # Line numbers of processes and times differ; what is said must not.
    said = [re.sub(r"\d+", "N", text) for text in (run.theirs, plain.err)]
    assert said[0] == said[1]
    assert run.marks() == [3, 4, 5, 6, 7, 8]
    assert len(run.rank()["steps"]["start_ns"]) == 12
