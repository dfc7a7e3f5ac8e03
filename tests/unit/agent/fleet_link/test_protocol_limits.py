"""Rows of heartbeats: what fits is kept as it is, whatever stands beside it, at the sender and at the receiver."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from traceloom.agent.fleet_link.protocol import (
    Heartbeat,
    HostProcess,
    decode_heartbeat,
    keep_valid_rows,
)

GOOD = {"key": "1@1", "pid": 1, "uid": 0, "job": "run", "rank": 3}
BAD = (
    {"rank": 10**23},
    {"rank": -1},
    {"job": "j" * 257},
    {"labels": {"a": "b" * 257}},
    {"labels": {str(number): "" for number in range(101)}},
    {"devices": ["d"] * 1025},
    {"pid": None},
    {"polls": "yes"},
    {"steps_per_second": "fast"},
)


@pytest.mark.parametrize("seed", range(5))
def test_what_fits_is_kept_and_the_rest_is_counted(seed: int) -> None:
    dice = random.Random(seed)
    rows = [
        {**GOOD, "pid": number} | (dice.choice(BAD) if dice.random() < 0.4 else {})
        for number in range(200)
    ]
    fit = [
        msgspec.convert(row, HostProcess)
        for row in rows
        if not any(row.items() >= bad.items() for bad in BAD)
    ]
    document = {"sent_ns": 1, "boot_id": "b", "version": "0", "processes": rows}
    heartbeat, refused = decode_heartbeat(msgspec.json.encode(document))
    assert heartbeat.processes == fit
    assert sum(refused.values()) == len(rows) - len(fit)
    assert len(refused) <= len(BAD), "reasons are few, however many rows there are"
    sent: Counter[str] = Counter()
    assert keep_valid_rows("processes", rows, sent) == fit  # type: ignore[comparison-overlap]
    assert sent == refused


def test_a_whole_heartbeat_is_decoded_as_it_is() -> None:
    heartbeat = Heartbeat(sent_ns=1, boot_id="b", version="0", processes=[HostProcess(**GOOD)])  # type: ignore[arg-type]
    assert decode_heartbeat(msgspec.json.encode(heartbeat)) == (heartbeat, Counter())


def test_many_rows_beyond_the_limits_have_one_reason() -> None:
    refused: Counter[str] = Counter()
    rows = [{**GOOD, "pid": number, "job": "j" * 256} for number in range(6000)]
    assert len(keep_valid_rows("processes", rows, refused)) == 4096
    assert list(refused.values()) == [6000 - 4096]
    refused.clear()
    heavy = [{**GOOD, "labels": {str(n): "v" * 256 for n in range(100)}} for _ in range(1000)]
    kept = keep_valid_rows("processes", heavy, refused)
    assert len(msgspec.json.encode(kept)) <= 9 << 20
    assert list(refused.values()) == [1000 - len(kept)]
