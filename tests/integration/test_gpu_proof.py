"""`make gpu-proof` on a machine without a GPU: some of its checks really run, and the device parts are named."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_proof.py"


@pytest.mark.torch
@pytest.mark.thorough
@pytest.mark.parametrize("sums", [False, True])
def test_checks_run_on_a_cpu_and_the_parts_of_a_device_are_skipped_by_name(
    tmp_path: Path, sums: bool
) -> None:
    pytest.importorskip("torch")
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--only",
        "fail,sums,nccl" if sums else "fail,nccl",
        "-o",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    document = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    rows = {row["check"]: row for row in document["rows"]}
    # Not the checks of time: other tests run beside this one.
    products = ("products: count", "products: arithmetic", "memory: peak")
    for name in ("fail: output", *(products if sums else ())):
        assert rows[name]["verdict"] == "pass", rows[name]
        assert rows[name]["recorded"] == rows[name]["expected"]
    assert rows["fail: output"]["recorded"] == "exit code 3, 12 lines"
    for name in ("nccl", *(["sums: copies and allocations"] if sums else [])):
        assert rows[name]["verdict"] == "skipped: no CUDA device"
    failed = any(row["verdict"].startswith("FAIL") for row in document["rows"])
    assert done.returncode == (5 if failed else 0), done.stderr
    assert (tmp_path / "table.md").read_text(encoding="utf-8").strip() in done.stdout
    kept = [tmp_path / "recordings" / one["file"] for one in document["recordings"]]
    if sums:
        assert {"capture.json", "rank0.kineto.json.gz"} == {path.name for path in kept}
    assert all(path.stat().st_size <= 300_000 for path in kept)


def test_a_value_outside_its_tolerance_fails_the_whole() -> None:
    spec = importlib.util.spec_from_file_location("gpu_proof", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    table = module.Table()
    table.compare("as expected", (100, 109), share=0.05, slack=4)
    table.check_limit("below", (100, 0), "ns", factor=1.5, slack=0)
    assert (table.exit_code, [row.verdict for row in table.rows]) == (0, ["pass", "pass"])
    table.compare("too far", (100, 110), share=0.05, slack=4)
    table.check_limit("above", (100, 151), "ns", factor=1.5, slack=0)
    assert (table.exit_code, [row.verdict for row in table.rows[2:]]) == (5, ["FAIL", "FAIL"])
    assert "| too far " in table.render()
