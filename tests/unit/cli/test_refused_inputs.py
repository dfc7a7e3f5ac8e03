"""Inputs that are none: every verb refuses them in a sentence that can be looked up, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from support.fuzzing.trying import captured
from support.sessions import busy_step
from traceloom.cli import main
from traceloom.cli.explain import load_explanations
from traceloom.testing import TraceBuilder

VERBS = {
    "report": ["report", "{}"],
    "report to a file": ["report", "{}", "-o", "out.html", "-o", "out.json"],
    "report to tables": ["report", "{}", "-o", "tables/"],
    "whatif": ["whatif", "{}", "--set", "kernels * 0.5", "-o", "out.md"],
    "memory": ["memory", "{}", "-o", "out.csv"],
    "diff": ["diff", "{}", "{}", "-o", "out.md"],
    "check": ["diff", "{}", "{}", "--fail-if", "step_time > 3%", "--json"],
    "baseline": ["baseline", "save", "main", "{}"],
    "link": ["link", "{}", "-o", "out.graph"],
    "convert": ["convert", "{}", "out.graph"],
    "validate": ["validate", "{}"],
    "show": ["show", "{}", "-o", "out.html"],
    "anonymize": ["anonymize", "{}", "-o", "shared"],
}
BAD: dict[str, bytes | None] = {
    "missing.json": None,
    "nothing.json": b"",
    "text.json": b"hello\n",
    "number.json": b"42\n",
    "object.json": b'{"hello": "world"}',
    "cut.json.gz": b"\x1f\x8b\x08",
    "nothing.0.et": b"",
    "no.graph": b"PK\x03\x04 no archive",
    "no.pickle": b"\x80\x04N.",
}
WITHOUT_HINT = (
    "unreadable",
    "kernel-rules-unreadable",
    "no-such-rank",
    "no-such-step",
    "",
)  # the sentence says it
EXPLAINED = {entry.slug for entry in load_explanations()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path.with_name("cache")))
    for name, content in BAD.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    return tmp_path


def checked(said: str, *, hint: bool = False) -> str:
    """The slug of an error that is told as all errors are: a sentence, perhaps a remedy, where to read more."""
    first, *remedies, last = said.splitlines()
    assert re.match(r"traceloom: \S.*(\.\.\.|[^.])$", first), said
    assert len(remedies) <= 1
    assert all(remedy.startswith("hint: ") for remedy in remedies)
    assert remedies or not hint
    slug, address = re.fullmatch(
        r"see traceloom explain (\S+), or https://\S+#(\S+)", last
    ).groups()  # type: ignore[union-attr]
    assert slug == address
    assert slug in EXPLAINED, f"nothing is written about {slug}"
    return slug


@pytest.mark.parametrize("verb", VERBS)
def test_an_input_that_is_none_is_refused_and_nothing_is_written(verb: str, here: Path) -> None:
    before = sorted(here.iterdir())
    for name in (*BAD, "empty"):
        with captured() as (out, err):
            code = main([word.replace("{}", name) for word in VERBS[verb]])
        said = err.getvalue().decode()
        assert code in (2, 3), (name, code, said)
        assert out.getvalue() == b""
        assert checked(said) not in ("internal-error", "wrong-usage"), (name, said)
        assert name.partition(".")[0] in said, "it says which file it is about"
        assert sorted(here.iterdir()) == before, name


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="who may read everything can read this too"
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_may_not_be_read_is_refused_by_its_name(verb: str, here: Path) -> None:
    (here / "object.json").chmod(0)
    with captured() as (_, err):
        assert main([word.replace("{}", "object.json") for word in VERBS[verb]]) == 3
    assert checked(err.getvalue().decode()) == "unreadable"


def good(path: Path, rank: int = 0, world_size: int = 2) -> Path:
    made = TraceBuilder(rank=rank, world_size=world_size)
    for step in range(2):
        busy_step(made, step, 1000 * step).allocation(1000 * step + 20, 4096, address=step + 1)
    return made.write(path)


@pytest.mark.parametrize("bad", ["text.json", "object.json", "cut.json.gz"])
def test_of_several_inputs_the_good_ones_are_reported_and_the_exit_code_says_that_one_was_refused(
    bad: str, here: Path
) -> None:
    good(here / "good.json")
    with captured() as (out, err):
        code = main(["report", "good.json", bad, "--no-cache", "--json", "--only", "core"])
    said = err.getvalue().decode()
    document = json.loads(out.getvalue())
    assert [entry["path"] for entry in document["inputs"]] == ["good.json"]
    if code == 4:
        assert checked(said) == "refused-input"
        assert bad in said
        assert any(
            notice["slug"] == "refused-input" and bad in notice["message"]
            for notice in document["notices"]
        )
    else:
        pytest.fail(f"{code}: {said}")


def test_a_directory_with_a_bad_file_beside_good_ones_is_reported_with_a_notice(here: Path) -> None:
    run = here / "run"
    run.mkdir()
    for rank in (0, 1):
        good(run / f"rank{rank}.json", rank)
    (run / "rank2.json").write_text(
        '{"traceEvents": [{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": "x"'
    )
    with captured() as (out, _):
        code = main(["report", "run", "--no-cache", "--json", "--only", "core"])
    document = json.loads(out.getvalue())
    assert code in (0, 4)
    assert [rank["rank"] for rank in document["ranks"]][:2] == [0, 1]
    assert code == 4 or document["notices"]


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        (["report", "good.json", "--only", "nonsense"], "no-such-section"),
        (["report", "good.json", "--rank", "9"], "no-such-rank"),
        (["report", "good.json", "--steps", "90..95"], "no-such-step"),
        (["report", "good.json", "--peak", "bf16"], "bad-peak"),
        (["report", "good.json", "-o", "nonsense.csv"], "no-such-table"),
        (["report", "good.json", "-o", "a.tar"], "unknown-format"),
        (["report", "good.json", "--rules", "missing.json"], "kernel-rules-unreadable"),
        (["report", "good.json", "--graph-capture", "missing.json"], "unreadable"),
        (["whatif", "good.json", "--set", "frobnicate"], "bad-change"),
        (["whatif", "good.json", "--set", "kernels * 0.5", "--step", "77"], "no-such-step"),
        (["memory", "good.json", "--at", "step 77"], "no-such-step"),
        (["memory", "good.json", "--rank", "5"], "no-such-rank"),
        (["diff", "good.json", "good.json", "--fail-if", "nonsense > 3%"], "bad-condition"),
        (["baseline", "compare", "other", "good.json"], "no-such-baseline"),
        (["baseline", "save", "../other", "good.json"], "bad-baseline-name"),
        (["explain", "nonsense-at-all"], "no-such-name"),
        (["report", "good.json", "-o", "good.json"], ""),
    ],
)
def test_a_choice_that_is_not_there_is_refused_with_what_to_do(
    arguments: list[str], slug: str, here: Path
) -> None:
    good(here / "good.json")
    before = (here / "good.json").read_bytes()
    with captured() as (out, err):
        code = main(
            arguments if arguments[0] in ("explain", "baseline") else [*arguments, "--no-cache"]
        )
    assert code in (2, 3)
    assert out.getvalue() == b""
    told = checked(err.getvalue().decode(), hint=slug not in WITHOUT_HINT)
    assert not slug or told == slug
    assert (here / "good.json").read_bytes() == before


def test_outputs_that_are_taken_are_refused_before_anything_is_read(here: Path) -> None:
    (here / "taken.html").write_text("mine")
    with captured() as (_, err):
        assert main(["report", "text.json", "-o", "taken.html"]) == 3
    assert checked(err.getvalue().decode(), hint=True) == "file-exists"
    assert (here / "taken.html").read_text() == "mine"


def test_of_several_outputs_that_are_good_and_bad_none_is_written(here: Path) -> None:
    good(here / "good.json")
    for bad in ("taken.html", "a.tar", "no/such/folder.html"):
        (here / "taken.html").write_text("mine")
        with captured() as (_, err):
            code = main(["report", "good.json", "--no-cache", "-o", "fine.json", "-o", bad])
        if bad == "no/such/folder.html" and code == 0:  # folders are made where they are missing
            continue
        assert code in (2, 3), err.getvalue()
        assert not (here / "fine.json").exists()
