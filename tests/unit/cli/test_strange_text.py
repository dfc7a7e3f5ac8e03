"""Names that are no text: halves of surrogate pairs in files, and file names that are no UTF-8."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from support.fuzzing.seeds import FORMATS, trace
from support.fuzzing.trying import LOST, VERBS, captured
from traceloom.cli import main
from traceloom.system.text import encode_json, replace_json_surrogates, replace_surrogates

HALF = "\ud83d"
NO_TEXT = os.fsdecode(b"\xff")


def test_lone_surrogates_become_one_sign_each():
    assert replace_surrogates(f"a{HALF}b") == "a\ufffdb"
    assert replace_surrogates("a 名 😀") == "a 名 😀"
    assert replace_json_surrogates({HALF: [HALF, 1, {"x": f"{HALF}y"}]}) == (
        {"\ufffd": ["\ufffd", 1, {"x": "\ufffdy"}]},
        3,
    )
    assert json.loads(encode_json({"big": 2**63, "name": HALF})) == {"big": 2**63, "name": "\ufffd"}


def ended(argv: list[str]) -> int:
    with captured() as (out, err):
        code = main(argv)
    said = (out.getvalue() + err.getvalue()).decode()
    assert "defect" not in said, (argv, said[-2000:])
    assert "fault of Traceloom" not in said, (argv, said[-2000:])
    return code


def commands(kind: str, source: Path, home: Path, good: Path) -> list[list[str]]:
    places = {"{in}": str(source), "{out}": str(home / f"out{NO_TEXT}"), "{good}": str(good)}
    return [
        [re.sub(r"\{\w+\}", lambda match: places[match[0]], word) for word in words]
        for verb, words in VERBS[kind].items()
        if verb != LOST and (kind == "kineto" or not verb.startswith("report"))
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_path_that_is_no_utf8_is_no_reason_to_fail(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "whole").mkdir()
    whole = FORMATS[kind](tmp_path / "whole")
    source = whole.rename(tmp_path / f"in{NO_TEXT}-{whole.name}")
    good = tmp_path / "good.json"
    good.write_text(trace().text())
    for argv in commands(kind, source, tmp_path, good):
        ended(argv)
        for made in tmp_path.glob("out*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def test_halves_of_surrogate_pairs_are_replaced_and_counted(tmp_path):
    text = trace().text().replace('"host0"', '"host\\ud83d"').replace("gemm0", "gemm\\ud83d")
    path = tmp_path / "trace.json"
    path.write_text(text)
    for argv in commands("kineto", path, tmp_path, path):
        ended([*argv, *(["--force"] if "-o" in argv else [])])
    assert (
        ended(["report", str(path), "--json", "--no-cache", "-o", str(tmp_path / "report.json")])
        == 0
    )
    document = json.loads((tmp_path / "report.json").read_bytes())
    told = {notice["slug"]: notice["count"] for notice in document["notices"]}
    assert told["replaced-text"] == 1
    assert told["repaired-events"] >= 1


def test_snapshots_and_captures_with_them_are_read(tmp_path):
    path = FORMATS["snapshot"](tmp_path)
    document = pickle.loads(path.read_bytes())
    document["device_traces"][0][0]["frames"] = [
        {"filename": f"a{HALF}.py", "line": 1, "name": HALF}
    ]
    path.write_bytes(pickle.dumps(document, 4))
    assert ended(["memory", str(path), "--json", "--by", "stack"]) == 0
    folder = FORMATS["capture"](tmp_path)
    capture = json.loads((folder / "capture.json").read_text())
    capture["ranks"][0] |= {"host": HALF, "command": [HALF]}
    (folder / "capture.json").write_text(json.dumps(capture))
    assert ended(["report", str(folder), "--only", "core", "--json", "--no-cache"]) == 0
