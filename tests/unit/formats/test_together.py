"""A file decoded in parts gives what it gives as a whole, wherever the parts begin and whatever goes wrong."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from support import damage
from support.bigfile import write_big
from support.strategies import builders
from traceloom.errors import InputError
from traceloom.formats import ahead, ahead as together, read_kineto
from traceloom.formats.ahead import ForkResult, Helpers
from traceloom.formats.kineto_columns import decode
from traceloom.formats.kineto_document import TextRange
from traceloom.testing import TraceBuilder
from traceloom.trace import mapped_arrays
from traceloom.trace.cache import FileStamp
from traceloom.trace.trace import Trace

needs_forks = pytest.mark.skipif(
    sys.platform != "linux", reason="parts are decoded by forks on Linux alone"
)


class Here:
    """What a fork does, done in this process."""

    def __init__(self, path: Path, part: TextRange) -> None:
        self._path, self._part = path, part

    def result(self) -> ForkResult | None:
        try:
            self._decoded = one = decode(self._path, part=self._part)
        except InputError:
            return None
        return ForkResult(
            one.columns.legend(), one.metadata, one.damage, one.size, one.began, one.left_at
        )

    def pieces(self) -> Iterator[tuple[str, str, together.Array]]:
        yield from self._decoded.columns.pieces()

    def stop(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "Fork", Here)


def in_parts(path: Path, *begins: int) -> tuple[Trace, bool]:
    """The trace, and whether the parts were put together."""
    helping = Helpers(path, list(begins), path.stat().st_size)
    ahead._running[path] = helping, FileStamp.now(path)
    trace = read_kineto(path)
    return trace, bool(helping._results) and helping._results[-1].left_at is None


def assert_equal(one: Trace, other: Trace) -> None:
    one.check()
    for name, frame in other.frames().items():
        assert one.frames()[name].equals(frame), name
    assert one.meta == other.meta
    # Where a file is cut may be told as behind or before the comma.
    assert [(said.slug, said.count) for said in one.notices] == [
        (said.slug, said.count) for said in other.notices
    ]


def made() -> TraceBuilder:
    """Everything that there are columns for, and texts that look like the end of an event."""
    one = TraceBuilder(rank=1, world_size=4)
    one.group("7", [0, 1, 2, 3], description="mesh_dp").thread_name(1, 'main }, {"ph": "X"').step(
        1, 0, 500
    )
    for number in range(6):
        at = number * 80
        one.op('}, {"ph": "X", "name": ', at, 60, shapes=[[number, 3]]).python(
            f"train.py({number}): step", at, 50
        )
        one.launch("cudaLaunchKernel", at + 2, 4, correlation=number + 1)
        one.kernel(f"kernel{number % 3}", at + 9, 20, correlation=number + 1)
        one.copy("Memcpy HtoD (Pageable -> Device)", at + 30, 5, bytes=64, correlation=40 + number)
        one.sync("Stream Wait Event", at + 40, 3)
        one.allocation(at + 5, 64, address=1000 + number).counter(
            "GPU 0 Utilization", at, number
        ).instant("mark", at)
        one.collective("allreduce", at + 50, 8, group="7")
        one.forward_backward(number, at + 1, at + 55)
    return one


WRITTEN: dict[str, Callable[[TraceBuilder], str | bytes]] = {
    "as ever": lambda one: one.text(),
    "a bare list": damage.as_list,
    "metadata behind": damage.metadata_after,
    "lists of objects in events": lambda one: one.text().replace(
        '"args": {"', '"args": {"of": [{"ph": 1}, {"ph": 2}], "'
    ),
    "cut": lambda one: damage.truncated(one.text(), len(one.text()) * 3 // 4),
    "malformed in the middle": lambda one: damage.in_name(one, 20, 'a "quoted" \\w word'),
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("how", WRITTEN)
def test_parts_may_begin_anywhere(how: str, tmp_path: Path, thorough: bool) -> None:
    path = tmp_path / "trace.json"
    content = WRITTEN[how](made())
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    whole, size = read_kineto(path), path.stat().st_size
    joined = 0
    for begin in range(1, size, size // (97 if thorough else 19)):
        trace, together_ = in_parts(path, begin)
        assert_equal(trace, whole)
        joined += together_
    assert joined >= (
        10 if thorough else 2
    )  # elsewhere it begins in metadata or at a false end, or what is before it has a fault
    trace, together_ = in_parts(path, 0, size // 5, size // 3, size // 2)
    assert_equal(trace, whole)
    assert together_


@pytest.mark.usefixtures("here")
@settings(deadline=None)
@given(builder=builders(max_events=40), shares=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_random_traces_in_random_parts(
    builder: TraceBuilder, shares: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = builder.write(tmp_path_factory.mktemp("parts") / "trace.json")
    size = path.stat().st_size
    trace, _ = in_parts(path, *sorted({int(share * size) for share in shares}))
    assert_equal(trace, read_kineto(path))


@needs_forks
def test_forks_decode_compressed_and_exact_times_and_spill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "big.json"
    write_big(path, 6_000_000)
    text = path.read_bytes()
    packed = tmp_path / "big.json.gz"
    packed.write_bytes(gzip.compress(text, 1))
    whole = read_kineto(path)
    for begins in ((2_000_000,), (0, 1_000_000, 4_000_000)):
        for of in (path, packed):
            trace, together_ = in_parts(of, *begins)
            assert together_
            assert all(trace.frames()[name].equals(frame) for name, frame in whole.frames().items())
    monkeypatch.setattr(mapped_arrays, "MIN_SPILL_BYTES", 1_000_000)
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    trace, together_ = in_parts(packed, 2_000_000, 4_000_000)
    assert together_
    assert all(trace.frames()[name].equals(frame) for name, frame in whole.frames().items())
    assert list((tmp_path / "cache" / "spill").iterdir()) == []


@needs_forks
def test_large_files_are_decoded_by_several_and_small_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "big.json"
    write_big(path, 3_000_000)
    whole, started = read_kineto(path), []
    begin = Helpers.__init__

    def begun(self: Helpers, *args: object) -> None:
        started.append(args)
        begin(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Helpers, "__init__", begun)
    monkeypatch.setattr(together, "count_usable_cores", lambda: 4)
    assert_equal(read_kineto(path), whole)
    assert not started
    monkeypatch.setattr(together, "MIN_TEXT_BYTES", 500_000)
    monkeypatch.setattr(together, "_HANDOVER_BYTES", 0)
    reached: list[int] = []
    assert_equal(read_kineto(path, step=lambda read, _: reached.append(read)), whole)
    assert [len(begins) for _, begins, _ in started] == [3]
    assert reached == sorted(reached)
    read_kineto(path, processes=1)
    assert len(started) == 1


@needs_forks
@pytest.mark.parametrize("when", ["before", "between", "never"])
def test_a_fork_that_dies_or_hangs_costs_nothing_but_time(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made().write(tmp_path / "trace.json")
    whole, size = read_kineto(path), path.stat().st_size
    helping = Helpers(path, [size // 4, size // 2], size)
    last = helping._forks[-1]
    if when == "before":
        os.kill(last._process, signal.SIGKILL)
        os.waitpid(last._process, 0)
    elif when == "between":

        def gone() -> Iterator[tuple[str, str, together.Array]]:
            raise EOFError
            yield

        monkeypatch.setattr(last, "pieces", gone)
    else:
        monkeypatch.setattr(together, "_TIMEOUT_S", -1000)
    ahead._running[path] = helping, FileStamp.now(path)
    assert_equal(read_kineto(path), whole)
    for fork in helping._forks:
        with pytest.raises((ChildProcessError, ProcessLookupError)):
            os.waitpid(fork._process, os.WNOHANG)


def test_decoding_needs_no_polars(tmp_path: Path) -> None:
    """A fork has none of its threads, and would wait for them forever."""
    text = (
        made()
        .text()
        .replace('"blocks per SM": ', '"blocks per SM": "many", "-": ')
        .replace(".000", ".0001")
    )
    (tmp_path / "trace.json").write_text(text)
    code = "import sys; sys.modules['polars'] = None; from traceloom.formats.kineto_columns import decode; decode(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "trace.json")], check=True)


@given(
    size=st.integers(0, 2**33), processes=st.integers(1, 9), lead=st.sampled_from([0, 29_000_000])
)
def test_parts_follow_each_other(size: int, processes: int, lead: int) -> None:
    begins = together.compute_part_starts(size, processes, lead)
    assert len(begins) < processes
    assert begins == sorted(begins)
    assert all(0 <= begin <= size for begin in begins)
    assert not begins or lead or begins[0] >= together.MIN_TEXT_BYTES
