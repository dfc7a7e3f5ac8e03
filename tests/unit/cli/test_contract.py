"""What holds of every verb that reads recordings: where its answer goes, what it writes, and what its exit code says."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import pytest

from support.fuzzing.trying import captured
from traceloom.cli import VERBS, main
from traceloom.cli.explain import load_explanations
from traceloom.testing import TraceBuilder

UNIX_NS = 1_700_000_000 * 10**9
EXPLAINED = {entry.slug for entry in load_explanations()}
HALF = ["--set", "kernels * 0.5"]
# Verb -> words that give an answer of the run, and names of files that it may be written to.
ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    "report": (["report", "run"], ["out.html", "out.json", "out.md", "out.perfetto.json.gz"]),
    "whatif": (
        ["whatif", "run", *HALF],
        ["out.json", "out.html", "out.md", "out.perfetto.json.gz"],
    ),
    "simulate": (["simulate", "run"], ["out.json", "out.html", "out.perfetto.json.gz"]),
    "sweep": (["simulate", "run", "--sweep", "host_factor=1,2"], ["out.csv"]),
    "calibrate": (["calibrate", "run"], ["out.toml"]),
    "memory": (["memory", "run"], ["out.json", "out.html", "out.csv"]),
    "diff": (["diff", "run", "slower"], ["out.json", "out.html", "out.md"]),
    "check": (
        ["diff", "run", "run", "--fail-if", "step_time > 3%"],
        ["out.json", "out.html", "out.md"],
    ),
    "compare": (["baseline", "compare", "main", "run"], ["out.json", "out.html", "out.md"]),
    "link": (["link", "run"], ["out.graph"]),
    "show": (["show", "job.graph"], ["out.html"]),
    "convert": (["convert", "job.graph"], ["out.perfetto.json.gz", "et/"]),
    "validate": (["validate", "workload"], []),
    "anonymize": (["anonymize", "run"], ["shared"]),
    "baselines": (["baseline", "list"], []),
}
NO_ANSWER_WITHOUT_FILE = {"convert", "anonymize"}
SLOW = {"sweep"}  # it starts processes
PAIRS = [(name, file) for name, (_, files) in ANSWERS.items() for file in files]


class Done(NamedTuple):
    """How a command ended, and what it said where."""

    code: int
    out: str
    err: str


def ran(*words: str) -> Done:
    with captured() as (out, err):
        code = main([*words])
    return Done(code, out.getvalue().decode(), err.getvalue().decode())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two runs of two ranks, what was linked and made of them, and a baseline."""
    folder = tmp_path_factory.mktemp("made")
    for name, kernel_us in (("run", 40), ("slower", 60)):
        (folder / name).mkdir()
        for rank in range(2):
            trace = TraceBuilder(rank=rank, world_size=2, base_ns=UNIX_NS, process=10 + rank)
            for step in range(4):
                at = step * 200
                trace.step(step, at, 190).op("aten::mm", at + 10, 50)
                trace.launch("cudaLaunchKernel", at + 20, 5, correlation=2 * step + 1)
                trace.kernel("gemm", at + 30, kernel_us, correlation=2 * step + 1)
                trace.collective("allreduce", at + 65, 20)
                trace.launch("cudaLaunchKernel", at + 70, 5, correlation=2 * step + 2)
                about = trace.collective_args("allreduce", "0", 2, 1024, "Float")
                trace.kernel(
                    "ncclDevKernel_AllReduce",
                    at + 100,
                    50,
                    correlation=2 * step + 2,
                    stream=20,
                    **about,
                )
                trace.allocation(at + 12, 1 << 20, address=4096)
                trace.allocation(at + 150, -(1 << 20), address=4096)
            trace.write(folder / name / f"rank{rank}.json")
    os.chdir(folder)
    assert main(["link", "run", "-o", "job.graph", "--quiet"]) == 0
    assert main(["generate", "pipeline", "--ranks", "2", "-o", "workload", "--quiet"]) == 0
    assert main(["baseline", "save", "main", "run", "slower", "--quiet"]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new directory with links to what was made: everything else in it was written by the test."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(made.with_name("cache")))
    return tmp_path


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.is_symlink()}


def refused(done: Done, code: int, *slugs: str) -> None:
    """One sentence, a remedy perhaps, and where more stands; nothing on standard output."""
    assert done.code == code, done.err
    assert done.out == ""
    first, *_, last = done.err.splitlines()
    assert first.startswith("traceloom: ")
    slug = re.fullmatch(r"see traceloom explain (\S+), or https://\S+", last)
    assert slug is not None, done.err
    assert slug[1] in EXPLAINED
    assert slug[1] in slugs, done.err


def to_file(name: str, file: str) -> list[str]:
    """The words that write an answer to a file."""
    return [*ANSWERS[name][0], *([file] if name == "convert" else ["-o", file])]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", [name for name in ANSWERS if name not in NO_ANSWER_WITHOUT_FILE | SLOW]
)
def test_json_is_all_that_standard_output_has(name: str, here: Path) -> None:
    before = written(here)
    done = ran(*ANSWERS[name][0], "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document, "an answer"
    assert "NaN" not in done.out
    assert "Infinity" not in done.out
    assert written(here) == before
    assert json.loads(ran(*ANSWERS[name][0], "--json", "--quiet").out).keys() == document.keys()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "file"), PAIRS)
def test_a_file_is_written_once_whole_and_named_in_the_last_lines(
    name: str, file: str, here: Path
) -> None:
    words = to_file(name, file)
    before = written(here)
    done = ran(*words)
    assert done.code == 0, done.err
    path = here / file
    report = {"shared.anonymize.json"} if name == "anonymize" else set()
    assert written(here) - before == {path.name} | report, "nothing is left beside it"
    assert path.name in done.out
    assert (path.is_dir() and any(path.iterdir())) or path.stat().st_size > 50
    assert not stat.S_IMODE(path.stat().st_mode) & stat.S_IWOTH
    if file.endswith(".json"):
        assert json.loads(path.read_text())
    content = path.read_bytes() if path.is_file() else None
    refused(ran(*words), 3, "file-exists")
    if content is not None:
        assert path.read_bytes() == content
    if file == ANSWERS[name][1][0]:
        done = ran(*words, "--force", "--quiet")
        assert (done.code, done.out) == (0, ""), done.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "file"), {name: (name, file) for name, file in PAIRS}.values())
def test_a_directory_that_is_not_there_is_made_and_a_file_is_none(
    name: str, file: str, here: Path
) -> None:
    (here / "text").write_text("a file, where a directory should be")
    before = written(here)
    refused(ran(*to_file(name, f"text/{file}")), 3, "cannot-write")
    assert written(here) == before
    assert (here / "text").read_text() == "a file, where a directory should be"
    done = ran(*to_file(name, f"new/folder/{file}"))
    assert done.code == 0, done.err
    assert (here / "new" / "folder" / file).exists()


@pytest.mark.parametrize(
    "name", [name for name, (_, files) in ANSWERS.items() if files and name != "anonymize"]
)
def test_an_ending_that_is_none_is_refused_before_anything_is_read(name: str, here: Path) -> None:
    done = ran(*[word.replace("run", "no-such-run") for word in to_file(name, "out.odd")])
    refused(done, 2, "unknown-format")
    assert ".odd" in done.err


@pytest.mark.parametrize(
    "name", [name for name in ANSWERS if name not in {"baselines", "compare"} | SLOW]
)
def test_an_input_that_is_not_there_or_none_is_refused_with_3(name: str, here: Path) -> None:
    (here / "empty").mkdir()
    (here / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    words, _ = ANSWERS[name]
    for source in ("no-such-run", "empty", "picture.png"):
        renamed = [
            source if word in {"run", "slower", "job.graph", "workload"} else word for word in words
        ]
        output = (
            []
            if name not in NO_ANSWER_WITHOUT_FILE
            else (["-o", "new"] if name == "anonymize" else ["et/"])
        )
        done = ran(*renamed, *output)
        assert done.code in {2, 3}, (source, done.err)
        assert done.out == ""
        assert source in done.err
        assert written(here) == {"empty", "picture.png"}


@pytest.mark.parametrize(
    ("words", "code", "slug"),
    [
        (["baseline", "compare", "other", "run"], 2, "no-such-baseline"),
        (["baseline", "compare", "main"], 2, "wrong-usage"),
        (["baseline", "save", "../main", "run"], 2, "bad-baseline-name"),
        (["baseline", "save", "main", "run"], 3, "file-exists"),
        (["baseline", "list", "main"], 2, "wrong-usage"),
        (["diff", "run", "slower", "--fail-if", "step_time"], 2, "bad-condition"),
        (["diff", "run", "slower", "--fail-if", "no_such_number > 3%"], 2, "bad-condition"),
        (["report", "run", "--rank", "7"], 2, "no-such-rank"),
        (["report", "run", "--steps", "70..71"], 2, "no-such-step"),
        (["report", "run", "--only", "kernel"], 2, "no-such-section"),
        (["whatif", "run", "--set", "kernels"], 2, "bad-change"),
        (["simulate", "run", "--machine", "no-such-machine"], 2, "no-such-machine"),
        (
            ["simulate", "run", "--machine", "dgx-h100", "--set", "network.9.bandwidth=1"],
            2,
            "bad-override",
        ),
        (["simulate", "run", "--step", "70"], 2, "no-such-step"),
        (["show", "job.graph", "--node", "999999"], 3, "no-such-node"),
        (["convert", "job.graph", "out.xyz"], 2, "unknown-format"),
        (["validate", "workload", "--target", "astra"], 2, "wrong-usage"),
        (["generate", "pipeline", "--ranks", "1", "-o", "new"], 2, "wrong-usage"),
        (["explain", "no-such-thing-at-all"], 2, "no-such-name"),
        (["completion", "tcsh"], 2, "wrong-usage"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_question_that_cannot_be_answered_is_refused(
    words: list[str], code: int, slug: str, here: Path
) -> None:
    before = written(here)
    refused(ran(*words), code, slug)
    assert written(here) == before


def test_a_check_that_fails_ends_with_5_and_still_answers(here: Path) -> None:
    for name, kernel_us in (("base", 40), ("new", 90)):
        (here / name).mkdir()
        for number in range(5):
            made = TraceBuilder(base_ns=UNIX_NS)
            for step in range(6):
                made.step(step, step * 200, 190).op("aten::mm", step * 200 + 10, 50)
                made.launch("cudaLaunchKernel", step * 200 + 20, 5, correlation=step + 1)
                made.kernel("gemm", step * 200 + 30, kernel_us + number / 10, correlation=step + 1)
            made.write(here / name / f"run{number}.json")
    words = ["diff", "base/run0.json", "new/run0.json"]
    for number in range(1, 5):
        words += ["--base", f"base/run{number}.json", "--new", f"new/run{number}.json"]
    done = ran(*words, "--fail-if", "gpu_time > 3%", "-o", "check.md")
    assert done.code == 5, done.err
    assert "check-failed" in done.err
    assert "check.md" in done.out
    assert "gpu_time" in (here / "check.md").read_text()
    assert ran(*words, "--fail-if", "gpu_time > 200%").code == 0


def test_one_of_several_inputs_that_is_refused_ends_with_4(here: Path) -> None:
    (here / "odd.json").write_text("no trace")
    done = ran("report", "run/rank0.json", "run/rank1.json", "odd.json", "-o", "out.json")
    assert done.code == 4, done.err
    assert "odd.json" in done.err
    report = json.loads((here / "out.json").read_text())
    assert {rank["rank"] for rank in report["ranks"]} == {0, 1}


def test_every_verb_that_reads_recordings_is_here() -> None:
    elsewhere = {
        "record",
        "replay",
        "trace",
        "agent",
        "serve",
        "upload",
        "fleet",
        "explain",
        "completion",
    }
    assert {words[0] for words, _ in ANSWERS.values()} | elsewhere | {"generate"} == set(VERBS)
