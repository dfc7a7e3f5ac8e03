"""Small files that would take for ever, or all memory: each ends within seconds, read or refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fuzzing.trying import captured
from traceloom.cli import main
from traceloom.testing import TraceBuilder

SECONDS = 10  # of processor time, on any machine; the attacks took 27 s to 105 s


@contextlib.contextmanager
def quick(seconds: float = SECONDS) -> Iterator[None]:
    before = time.process_time()
    yield
    assert time.process_time() - before < seconds


def run(*argv: object) -> tuple[int, str]:
    with captured() as (out, err):
        code = main([str(word) for word in argv])
    return code, (out.getvalue() + err.getvalue()).decode("utf-8", "replace")


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def shared(depth: int, leaf: Any, width: int = 2) -> Any:
    for _ in range(depth):
        leaf = [leaf] * width
    return leaf


def snapshot(**entry: Any) -> bytes:
    whole = {"action": "alloc", "addr": 512, "size": 512, "frames": [], "time_us": 1}
    return pickle.dumps({"segments": [], "device_traces": [[{**whole, **entry}]]}, 4)


@pytest.mark.parametrize("key", ["filename", "name", "line"])
def test_a_pickle_of_nested_shared_lists_is_not_spelled_out(tmp_path, key):
    frame = {"filename": "a.py", "line": 1, "name": "f"} | {key: shared(60, "x")}
    path = written(tmp_path / "x.pickle", snapshot(frames=[frame]))
    assert path.stat().st_size < 1000
    with quick(2):
        code, _ = run("memory", path)
    assert code in {0, 3}


@pytest.mark.parametrize("key", ["action", "size", "addr", "time_us", "frames"])
def test_nested_shared_lists_in_place_of_any_value(tmp_path, key):
    path = written(tmp_path / "x.pickle", snapshot(**{key: shared(60, "x")}))
    with quick(3):
        for verb in (["memory"], ["memory", "--json", "--by", "stack"], ["report"]):
            assert run(*verb, path)[0] in {0, 3}


def test_a_pickle_with_a_nested_tuple_as_a_key_is_refused(tmp_path):
    # Written by hand: pickle itself would have to look the key up.
    made = (
        b"\x80\x04})\x85\x94"
        + b"".join(bytes((ord("h"), n, 0x86, 0x94)) for n in range(60))
        + b"Ns."
    )
    path = written(tmp_path / "x.pickle", made)
    with quick(2):
        code, said = run("memory", path)
    assert code == 3
    assert "pickle-damaged" in said


def test_entries_that_are_shared_again_and_again_are_refused(tmp_path):
    entry = {"action": "alloc", "addr": 512, "size": 512, "frames": [], "time_us": 1}
    trace = [entry] * 20_000
    path = written(
        tmp_path / "x.pickle", pickle.dumps({"segments": [], "device_traces": [trace] * 5_000}, 4)
    )
    assert path.stat().st_size < 100_000
    with quick():
        code, said = run("memory", path)
    assert code == 3
    assert "pickle-damaged" in said


def test_stacks_that_are_shared_take_no_time(tmp_path):
    frames = [{"filename": f"{n}.py", "line": n, "name": "f"} for n in range(5_000)]
    entries = [
        {"action": "alloc", "addr": n, "size": 1, "frames": frames, "time_us": n}
        for n in range(5_000)
    ]
    path = written(
        tmp_path / "x.pickle", pickle.dumps({"segments": [], "device_traces": [entries]}, 4)
    )
    with quick():
        assert run("memory", path)[0] == 0


NESTED = (
    (b"", b'{"a":'),
    (b"", b"["),
    (b'{"traceEvents": [', b'{"ph":['),
    (b'{"traceEvents": [', b"["),
    (b'{"schema": "1.1.1", "nodes": [', b'{"id":1,"name":{'),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("start", "unit"),
    [
        pytest.param(
            start,
            unit,
            # Each once, and those that look like events and nodes where such are expected.
            marks=() if (start, unit) in NESTED else pytest.mark.thorough,
        )
        for start in (b"", b'{"traceEvents": [', b'{"schema": "1.1.1", "nodes": [')
        for unit in (b'{"a":', b"[", b'{"ph":[', b'{"id":1,"name":{')
    ],
)
def test_deep_nesting(tmp_path, start, unit):
    path = written(tmp_path / "x.json", start + unit * 40_000)
    with quick():
        for argv in (["report", "--only", "core"], ["link"]):
            assert run(*argv, path, "--no-cache")[0] in {0, 3}
        assert run("anonymize", path, "-o", tmp_path / "out")[0] in {0, 3}


def test_deep_nesting_in_a_capture_and_a_group_file(tmp_path):
    (tmp_path / "capture.json").write_bytes(b'{"a":' * 100_000)
    (tmp_path / "w.0.et").write_bytes(b"\x0a\x0a\x05" + b"0.0.4")
    (tmp_path / "comm_groups.json").write_bytes(b"[" * 100_000)
    with quick():
        assert run("report", tmp_path)[0] == 3
        assert run("validate", tmp_path)[0] in {3, 5}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("message", [b"\0", b"\1\1"])
def test_chakra_files_of_empty_messages_are_refused(tmp_path, message):
    with quick():
        for name, data in (
            ("a.0.et", message * 2_000_000),
            ("a.1.et.gz", gzip.compress(message * 50_000_000, 1)),
        ):
            path = written(tmp_path / name, data)
            for verb in (["validate"], ["show"]):
                code, said = run(*verb, path)
                assert code in {3, 5}, said
                assert "defect" not in said


def test_a_timeline_that_expands_a_thousand_times_is_refused(tmp_path):
    packed = io.BytesIO()
    with gzip.open(packed, "wb", 9) as file:
        for _ in range(200):
            file.write(b"[[1, 2, 3, 4]" + b",[1, 2, 3, 4]" * 80_000)
    path = written(tmp_path / "x.raw.json.gz", packed.getvalue())
    with quick():
        code, said = run("memory", path)
    assert code == 3
    assert "gzip-bomb" in said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["streams", "threads"])
def test_work_is_linear_in_streams_and_threads(tmp_path, kind):
    """Four times as many take at most nine times as long; what is quadratic takes sixteen times."""
    took = []
    for count in (500, 2000):
        made = TraceBuilder().step(0, 0, count * 10 + 10)
        for number in range(count):
            thread, stream = (number + 1, 7) if kind == "threads" else (1, number + 7)
            made.launch("cudaLaunchKernel", number * 10, 1, correlation=number + 1, thread=thread)
            made.kernel("gemm", number * 10 + 2, 3, correlation=number + 1, stream=stream)
            made.launch(
                "cudaStreamSynchronize",
                number * 10 + 3,
                6,
                correlation=count + number + 1,
                thread=thread,
            )
        path = tmp_path / f"{count}.json"
        made.write(path)
        before = time.process_time()
        assert run("link", path, "-o", tmp_path / f"{count}.graph", "--no-cache")[0] == 0
        took.append(time.process_time() - before)
    assert took[1] < 9 * took[0] + 1
    assert took[1] < SECONDS
