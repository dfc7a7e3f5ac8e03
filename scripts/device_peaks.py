"""Write docs/reference/device-peaks.md from the table of peaks; `--check` says whether it is up to
date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from made_page import write_or_check

import traceloom

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "device-peaks.md"
TABLE = Path(traceloom.__file__).parent / "analyze" / "peaks.json"
TYPES = ("fp64", "fp64_matrix", "fp32", "fp32_matrix", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
HEAD = """\
# Peaks of devices

Dense rates (without sparsity) that the [roofline](../concepts/roofline.md) compares with: TFLOP/s by element type
(TOP/s for int8), TB/s of the device memory. `_matrix` is the rate of matrix units where it differs from that of vector
units. A device is recognised by one of its whole names; where the trace tells its number of multiprocessors (SMs, CUs),
that must agree. Any other device: `--device` or `--peak`. This page is written by `scripts/device_peaks.py`.

"""


def page() -> str:
    """The whole page."""
    devices = json.loads(TABLE.read_text(encoding="utf-8"))["devices"]
    rows = [
        "| device | SMs, CUs | " + " | ".join(TYPES) + " | memory |",
        "|---|" + "--:|" * (len(TYPES) + 2),
    ]
    for one in devices:
        rates = [f"{one['flops'][key] / 1e12:g}" if key in one["flops"] else "" for key in TYPES]
        rows.append(
            f"| {one['name']} | {one['multiprocessors'] or ''} | {' | '.join(rates)} | {one['memory'] / 1e12:g} |"
        )
    rows += ["", "| device | names in traces | note |", "|---|---|---|"]
    rows += [
        f"| {one['name']} | {', '.join(f'`{alias}`' for alias in one['aliases'])} | {one.get('note', '')} |"
        for one in devices
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
