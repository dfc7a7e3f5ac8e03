"""Values of other types, too large, or no UTF-8, in every format: read as unknown and told, or refused."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.fuzzing.seeds import FORMATS, trace
from support.fuzzing.trying import LOST, VERBS, captured
from support.workload import collective, node, write_set
from traceloom.cli import main
from traceloom.formats import read_kineto


def tried(kind: str, source: Path, home: Path) -> None:
    """The verbs of the format end well or in a refusal."""
    good = home / "good.json"
    good.write_text(trace().text())
    places = {"{in}": str(source), "{out}": str(home / "out"), "{good}": str(good)}
    for verb, words in VERBS[kind].items():
        if verb == LOST or (
            kind == "kineto" and verb not in {"report --json", "memory", "link", "anonymize"}
        ):
            continue
        argv = [re.sub(r"\{\w+\}", lambda match: places[match[0]], word) for word in words]
        with captured() as (out, err):
            code = main(argv)
        said = (out.getvalue() + err.getvalue()).decode("utf-8", "replace")
        assert code in {0, 3, 5}, (argv, said[-1000:])
        assert "section-failed" not in said, argv
        for made in home.glob("out*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "dims", ['"0x10"', "16", '[["a"], {"x": [1]}]', "[[1e400, 99999999999999999999999, -5]]", "{}"]
)
def test_shapes_of_other_types(tmp_path, dims):
    path = tmp_path / "trace.json"
    path.write_text(trace().text().replace("[[1, 3]]", dims))
    tried("kineto", path, tmp_path)
    shapes = read_kineto(path).tensors["shapes"].to_list()
    assert shapes[1] == "[[2,3]]"
    assert shapes[0] is None or shapes[0].startswith("[")


def test_shapes_that_are_no_list_are_counted(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(trace().text().replace("[[1, 3]]", '"0x10"'))
    assert {notice.slug: notice.count for notice in read_kineto(path).notices}["odd-values"] == 1


def test_lists_in_quotes_stay_lists(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(trace().text().replace("[[1, 3]]", '"[[1,3]]"'))
    assert read_kineto(path).tensors["shapes"].to_list() == ["[[1,3]]", "[[2,3]]"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "broken",
    [
        (b"gemm0", b"gem\xff\xfe"),
        (b'"name"', b'"na\xffme"'),
        (b"host0", b"h\xff"),
        (b'"util"', b'"ut\xffil"'),
    ],
)
def test_bytes_that_are_no_utf8(tmp_path, broken):
    path = tmp_path / "trace.json"
    path.write_bytes(trace().text().encode().replace(*broken))
    tried("kineto", path, tmp_path)


def _all(rows: list[dict[str, Any]], key: str, value: Any) -> None:
    for row in rows:
        row[key] = value


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda entries, _: _all(entries[:1], "action", [1]),
        lambda entries, _: _all(entries[:1], "addr", 2**70),
        lambda entries, _: _all(entries, "size", 2**61),
        lambda entries, _: _all(entries, "time_us", 2**61),
        lambda entries, _: _all(entries, "addr", 2**61),
        lambda entries, _: _all(
            entries, "frames", [{"filename": "a.py", "line": 2**70, "name": {}}]
        ),
        lambda entries, _: _all(entries, "frames", [[1], None]),
        lambda _, segments: _all(segments, "total_size", 2**61),
        lambda _, segments: _all(segments, "device", 2**40),
        lambda _, segments: _all(segments[0]["blocks"], "size", 2**61),
        lambda _, segments: _all(segments[0]["blocks"], "state", []),
        lambda _, segments: _all(segments, "stream", {}),
    ],
)
def test_snapshots_with_odd_entries(tmp_path, change):
    path = FORMATS["snapshot"](tmp_path)
    document = pickle.loads(path.read_bytes())
    change(document["device_traces"][0], document["segments"])
    path.write_bytes(pickle.dumps(document, 4))
    tried("snapshot", path, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [65_535, 65_536, 200_000])
@pytest.mark.parametrize("others", [0, 40])
def test_names_of_64_kilobytes_in_chakra_files(tmp_path, length, others):
    long = [node(0, name="n" * length), collective(1, deps=[0])]
    short = [node(number, name=f"n{number}" * (number % 7 + 1)) for number in range(2, 2 + others)]
    folder = write_set(
        tmp_path / "workload", [*long, *short], [*long, *short], groups={"0": [0, 1]}
    )
    tried("et", folder, tmp_path)
    assert main(["convert", str(folder), str(tmp_path / "again.graph"), "--quiet"]) == 0
    assert main(["convert", str(tmp_path / "again.graph"), str(tmp_path / "again"), "--quiet"]) == 0
    assert all(b"n" * length in path.read_bytes() for path in (tmp_path / "again").glob("*.et"))
    assert len(list((tmp_path / "again").glob("*.et"))) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", ["../../etc/passwd", 2**70])
@pytest.mark.parametrize("key", ["computeMajor", "totalGlobalMem", "numSms", "name", "id"])
def test_properties_of_a_device_of_other_types(tmp_path, key, value):
    document = json.loads(trace().text())
    document["deviceProperties"][0][key] = value
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    with captured() as (out, err):
        code = main(["report", str(path), "--no-cache"])
    said = (out.getvalue() + err.getvalue()).decode("utf-8", "replace")
    assert code == 0
    assert "section-failed" not in said


@pytest.mark.parametrize("place", ['"bytes":512', '"correlation":2', '"ts":1', '"id":1'])
def test_numbers_that_no_double_holds(tmp_path, place):
    text = json.dumps(json.loads(trace().text()), separators=(",", ":"))
    key = place.partition(":")[0]
    assert place in text
    path = tmp_path / "trace.json"
    path.write_text(text.replace(place, f"{key}:-1e999", 1))
    with captured() as (out, err):
        code = main(["report", str(path), "--no-cache"])
    said = (out.getvalue() + err.getvalue()).decode("utf-8", "replace")
    assert (code, "section-failed" in said) == (0, False), said[-500:]


@pytest.mark.parametrize("key", [b'"context"', b'"args"', b'"dur"', b'"name"', b'"traceEvents"'])
def test_keys_that_are_no_utf8_end_no_anonymizing(tmp_path, key):
    path = tmp_path / "trace.json"
    text = trace().text().encode()
    assert key in text
    path.write_bytes(text.replace(key, key[:2] + b"\xa9" + key[2:], 1))
    with captured() as (_, err):
        code = main(["anonymize", str(path), "-o", str(tmp_path / "out")])
    assert code in {0, 3}, err.getvalue()[-800:]
    assert b"a defect of Traceloom" not in err.getvalue()
