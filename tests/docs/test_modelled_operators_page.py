"""Pages that scripts write say what the program holds: models, peaks, what is public; and the how-to works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from traceloom.analyze import flops, roofline
from traceloom.testing import TraceBuilder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["modelled_operators.py", "device_peaks.py", "api_pages.py"])
def test_the_pages_are_up_to_date(script: str) -> None:
    script = str(ROOT / "scripts" / script)
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_example_of_the_how_to_gives_an_operator_its_flops() -> None:
    text = (ROOT / "docs" / "how-to" / "own-operator.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    exec(example[1], {})
    try:
        builder = TraceBuilder().op(
            "my::scale", 0, 10, shapes=[[6, 4], []], types=["float", "Scalar"]
        )
        builder.launch("cudaLaunchKernel", 2, 1, correlation=1).kernel(
            "scale", 20, 5, correlation=1
        )
        row = roofline(builder.build()).operators.row(0, named=True)
        assert (row["name"], row["flops"], row["bytes"]) == ("my::scale", 24, 192)
    finally:
        flops.remove("my::scale")
