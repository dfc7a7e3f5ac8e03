"""Every report of every public trace, byte for byte: what a change that should change nothing leaves as it is.

After a wanted change write the digests anew, and say in the commit which outputs changed and why:
`UPDATE_GOLDEN=1 python -m pytest --thorough tests/golden/test_bytes.py`
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import traceloom
from support.public_traces import DATA
from traceloom.report import ReportOptions, build
from traceloom.report.views.files import FORMATS, Report
from traceloom.report.views.terminal import render
from traceloom.system.text import encode_utf8

DIGESTS = Path(__file__).parent / "bytes.json"
EXPECTED: dict[str, dict[str, str]] = json.loads(DIGESTS.read_text(encoding="utf-8"))
EACH_TIME = (
    "pairs/linear.kineto.json.gz",
    "critical_path/event_sync.json.gz",
    "kineto/mi300_bert_small.json.gz",
)
WIDTH = 100
VARIES = re.compile(rb'Traceloom \d[\w.]*|"traceloom":"[^"]*"|page made in [\d.]+ s')


def outputs(pattern: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each format of the report of the files that match."""
    session = traceloom.load(
        *(file.relative_to(DATA) for file in sorted(DATA.glob(pattern))), cache=False
    )
    options = ReportOptions(full=True)
    document = build(session, options)
    yield (
        "terminal",
        encode_utf8("\n".join(line.plain for line in render(document, options, WIDTH))),
    )
    for form in FORMATS:
        if not form.endings[0].endswith(".gz"):
            stream = io.BytesIO()
            form.writer(Path(f"flame{form.endings[0]}"))(
                Report(document, lambda: session, options), stream
            )
            yield form.endings[0], stream.getvalue()


@pytest.mark.parametrize(
    "pattern",
    [
        name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.thorough)
        for name in EXPECTED
    ],
)
def test_reports_are_as_they_were(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not DATA.is_dir():
        pytest.skip("needs the public traces")
    monkeypatch.chdir(DATA)  # so that no path of this machine stands in the reports
    digests = {
        name: hashlib.sha256(VARIES.sub(b"", content)).hexdigest()[:16]
        for name, content in outputs(pattern)
    }
    if os.environ.get("UPDATE_GOLDEN"):
        every = json.loads(DIGESTS.read_text(encoding="utf-8")) | {pattern: digests}
        DIGESTS.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    else:
        assert digests == EXPECTED[pattern]
