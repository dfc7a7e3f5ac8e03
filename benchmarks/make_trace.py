"""Make a big trace file: `python benchmarks/make_trace.py 1GB benchmarks/out/1gb.json
[source.json.gz]`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.bigfile import write_big

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
REAL = Path(__file__).resolve().parents[2] / "shared/data/kineto/h100_owlv2.json.gz"


def size_of(text: str) -> int:
    """`1GB` -> 10**9."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return round(float(text.removesuffix(unit)) * factor)
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", type=size_of, help="as 1GB, 500MB")
    parser.add_argument("path", type=Path)
    parser.add_argument("source", type=Path, nargs="?", default=REAL if REAL.exists() else None)
    args = parser.parse_args()
    started = time.perf_counter()
    args.path.parent.mkdir(parents=True, exist_ok=True)
    entries = write_big(args.path, args.size, args.source)
    took = time.perf_counter() - started
    print(
        f"Wrote {args.path}: {args.path.stat().st_size / 1e9:.2f} GB, {entries:,} entries, {took:.0f} s"
    )


if __name__ == "__main__":
    main()
