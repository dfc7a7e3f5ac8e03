"""Verbs that make, link, turn and hide workloads: what one writes, the next one reads, and the numbers stay the same."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.fuzzing.trying import captured
from support.sessions import EVIL, busy_step
from support.workload import collective, node, receive, send, write_set
from traceloom import cli
from traceloom.cli import VERBS, main
from traceloom.graph.graph import load
from traceloom.report import graph as graph_document
from traceloom.report.sections import SECTION_NAMES
from traceloom.testing import TraceBuilder

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "here"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    return home


def ran(*arguments: object, code: int = 0) -> tuple[str, str]:
    with captured() as (out, err):
        ended = main([str(argument) for argument in arguments])
    said = out.getvalue().decode(), err.getvalue().decode()
    assert ended == code, said
    return said


def answered(*arguments: object, code: int = 0) -> Json:
    return dict(json.loads(ran(*arguments, "--json", code=code)[0]))


def trace(rank: int = 0, name: str = "", world_size: int = 2) -> TraceBuilder:
    made = TraceBuilder(rank=rank, world_size=world_size, host=f"{name}host{rank}")
    for step in range(2):
        busy_step(made, step, 1000 * step, name=name)
        made.kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            1000 * step + 700,
            50 + rank,
            stream=9,
            correlation=700 + step,
            **TraceBuilder.collective_args("allreduce", "0", 2, 1024, "Float"),
        )
        made.launch("cudaLaunchKernel", 1000 * step + 690, 5, correlation=700 + step)
    return made


# -- generate -----------------------------------------------------------------------------------------------------

KINDS = {
    "collective": ["--ranks", "3", "--size", "64kB"],
    "pipeline": ["--ranks", "3", "--micro-batches", "4"],
    "transformer": ["--layers", "2", "--micro-batches", "2"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_made_workload_is_fit_and_is_what_was_said_of_it(kind: str) -> None:
    said, _ = ran("generate", kind, *KINDS[kind], "-o", "made")
    files, nodes = map(
        int,
        re.findall(
            r"\((\d+) files, ([\d,]+) nodes\)", said.replace(",", ",").replace("\u202f", "")
        )[0],
    )
    assert len(list(Path("made").iterdir())) == files
    verdict = answered("validate", "made")
    assert (verdict["errors"], verdict["problems"]) == (0, [])
    shown = answered("show", "made")
    assert shown["nodes"] == nodes == sum(row["nodes"] for row in shown["ranks"])
    assert shown["dangling"] == 0
    assert "for astra-sim: nothing is wrong" in ran("validate", "made", "--target", "astra-sim")[0]


def test_the_collective_is_made_on_every_rank() -> None:
    ran(
        "generate",
        "collective",
        "--ranks",
        4,
        "--size",
        "1MiB",
        "--collective",
        "all_gather",
        "-o",
        "made",
    )
    (row,) = answered("show", "made")["communication"]
    assert (row["what"], row["count"], row["ranks"]) == ("all_gather", 4, 4)
    assert row["bytes"] == 4 * 1_048_576


def test_two_makings_are_equal_bytes() -> None:
    for place in ("one", "two"):
        ran("generate", "transformer", "--layers", 2, "-o", place)
    assert {path.name: path.read_bytes() for path in Path("one").iterdir()} == {
        path.name: path.read_bytes() for path in Path("two").iterdir()
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["collective", "--layers", "3"], "--layers does not go with collective"),
        (["pipeline", "--collective", "all_reduce"], "--collective does not go with pipeline"),
        (["collective", "--ranks", "1"], "a single rank has no peer"),
        (["collective", "--collective", "all_redcue"], "`all_redcue` is no collective"),
        (["pipeline", "--schedule", "1f2b"], "`1f2b` is no schedule"),
        (["collective", "--compute-us", "-5"], "`-5` is not a whole number from 0 on"),
        (["collective", "--compute-us", "x"], "`x` is not a whole number from 0 on"),
        (["collective", "--size", "big"], "`big` is not a size"),
        (["transformer", "--tflops", "0"], "`0` is not a number above 0"),
        (["nonsense"], "argument KIND"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(
    arguments: list[str], said: str, here: Path
) -> None:
    out, err = ran("generate", *arguments, "-o", "made", code=2)
    assert said in err
    assert out == ""
    assert list(here.iterdir()) == []


# -- link ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(here: Path) -> list[str]:
    return [str(trace(rank).write(here / f"rank{rank}.json")) for rank in (0, 1)]


def test_the_summary_is_that_of_the_graph_that_is_written(two: list[str]) -> None:
    document = answered("link", *two, "-o", "job.graph", "--no-law")
    graph = load(Path("job.graph"))
    known = json.loads(json.dumps(graph_document.build(graph)))
    assert {key: document[key] for key in ("nodes", "edges", "world_size", "window_ns")} == {
        key: known[key] for key in ("nodes", "edges", "world_size", "window_ns")
    }
    assert document["law"] is None
    assert answered("link", *two)["law"]["holds"] in (True, False)


@pytest.mark.parametrize(
    ("output", "files"), [("out", {"comm_groups.json", "workload.0.et", "workload.1.et"})]
)
def test_a_graph_is_written_as_files_of_ranks_that_are_fit(
    two: list[str], output: str, files: set[str]
) -> None:
    ran("link", *two, "-o", output, "--no-law", "-q")
    assert {path.name for path in Path(output).iterdir()} == files
    assert answered("validate", output)["errors"] == 0
    assert answered("show", output)["nodes"] > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["rank0.et", "rank0.et.gz", "RANK0.ET"])
def test_one_rank_is_written_as_one_file(two: list[str], name: str) -> None:
    ran("link", two[0], "-o", name, "--no-law", "-q")
    raw = Path(name).read_bytes()
    assert raw[:2] == b"\x1f\x8b" if name.endswith(".gz") else raw[:2] != b"\x1f\x8b"
    assert answered("validate", name)["errors"] == 0


def test_two_ranks_do_not_go_into_one_file_of_a_rank(two: list[str], here: Path) -> None:
    _, err = ran("link", *two, "-o", "both.et", "--no-law", "-q", code=2)
    assert "traceloom: " in err
    assert not (here / "both.et").exists()


def test_linking_twice_gives_equal_bytes(two: list[str]) -> None:
    for name in ("one.graph", "two.graph"):
        ran("link", *two, "-o", name, "--no-law", "-q")
    assert Path("one.graph").read_bytes() == Path("two.graph").read_bytes()


def test_the_order_of_the_files_is_no_part_of_the_graph(two: list[str]) -> None:
    there, back = (answered("link", *files, "--no-law") for files in (two, two[::-1]))
    assert there["nodes"] == back["nodes"]
    assert there["edges"] == back["edges"]


def test_a_quiet_link_says_nothing(two: list[str]) -> None:
    assert ran("link", two[0], "-o", "quiet.graph", "-q") == ("", "")


# -- convert ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["et", "et.gz", "json", "json.gz", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("again", ["et", "jsonl.gz"])
def test_files_of_any_form_are_the_same_nodes(ending: str, again: str) -> None:
    ran("generate", "pipeline", "--ranks", 2, "--micro-batches", 2, "-o", "made", "-q")
    source = next(Path("made").glob("*.0.et"))
    ran("convert", source, f"there.{ending}", "-q")
    ran("convert", f"there.{ending}", f"again.{again}", "-q")
    ran("convert", f"again.{again}", "back.et", "-q")
    assert Path("back.et").read_bytes() == source.read_bytes()


def test_what_was_written_is_told_as_json() -> None:
    ran("generate", "collective", "--ranks", 2, "-o", "made", "-q")
    told = answered("convert", "made", "job.graph")
    assert told["nodes"] == load(Path("job.graph")).nodes.height
    told = answered("convert", "job.graph", "back")
    assert sorted(Path(file).name for file in told["files"]) == sorted(
        path.name for path in Path("back").iterdir()
    )


@pytest.mark.parametrize("side", ["communication", "compute"])
def test_one_side_keeps_its_kind_and_the_order(side: str) -> None:
    ran("generate", "transformer", "--layers", 2, "--micro-batches", 2, "-o", "made", "-q")
    ran("convert", "made", "part", "--only", side, "-q")
    whole, part = (
        {row["kind"]: row["count"] for row in answered("show", place)["kinds"]}
        for place in ("made", "part")
    )
    communication = {"collective", "send", "receive"}
    kept = {kind for kind in whole if (kind in communication) == (side == "communication")}
    assert {kind: part[kind] for kind in kept} == {kind: whole[kind] for kind in kept}
    assert not set(part) - kept
    assert answered("validate", "part")["errors"] == 0


# -- validate -----------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(here: Path) -> Path:
    """A cycle on rank 0, a message that nobody takes, a dependency on nothing on rank 1."""
    first = [node(1, deps=[2]), node(2, deps=[1]), send(3, 1)]
    return write_set(
        here / "broken",
        first,
        [node(1, deps=[77]), collective(2, pg_name="g")],
        groups={"g": [0, 1]},
    )


def test_everything_that_is_wrong_is_told_with_its_rule_and_remedy(broken: Path) -> None:
    out, err = ran("validate", broken, code=5)
    verdict = answered("validate", broken, code=5)
    rules = {problem["rule"] for problem in verdict["problems"]}
    assert {"dependency-cycle"} <= rules
    for rule in rules:
        assert rule in out
        assert ran("explain", rule, "-q")[0].startswith(rule)
    assert out.count("→") == len(
        {(problem["rule"], problem["severity"]) for problem in verdict["problems"]}
    )
    assert f"{verdict['errors']} error" in err
    assert "invalid-workload" in err


def test_warnings_fail_only_where_that_is_asked_for(here: Path) -> None:
    home = write_set(
        here / "w", [collective(1, "ALL_TO_ALL", 8)], [collective(1, "ALL_TO_ALL", 16)]
    )
    verdict = answered("validate", home)
    assert verdict["errors"] == 0
    assert verdict["warnings"] > 0
    assert not answered("validate", home, "--strict", code=5)["errors"]


def test_nothing_is_said_of_what_is_right_where_silence_is_asked_for(here: Path) -> None:
    home = write_set(here / "w", [node(1), node(2, deps=[1])])
    assert ran("validate", home, "-q") == ("", "")
    assert "1 file, 2 nodes, for chakra: nothing is wrong" in ran("validate", home)[0]


def test_problems_are_told_in_letters_that_the_terminal_has(broken: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "traceloom", "validate", str(broken)],
        capture_output=True,
        check=False,
        env={
            "PYTHONIOENCODING": "ascii",
            "PATH": "",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        },
    )
    assert done.returncode == 5
    said = done.stdout.decode("ascii")
    assert "dependency-cycle" in said
    assert "\\u" not in said


# -- anonymize ----------------------------------------------------------------------------------------------------

SECRET = "Chimera"


def hidden(*arguments: object, source: str = "secret.json") -> str:
    """The text of what is written; the source names what must not stand in it."""
    trace(0, f"{SECRET}.").write(Path(source))
    ran("anonymize", source, "-o", "shared.json", *arguments)
    raw = Path("shared.json").read_bytes()
    return gzip.decompress(raw).decode() if raw[:2] == b"\x1f\x8b" else raw.decode()


def test_names_are_gone_and_what_the_report_measures_is_the_same() -> None:
    assert SECRET not in hidden()
    reports = [
        answered("report", name, "--no-cache", "--only", "core")
        for name in ("secret.json", "shared.json")
    ]
    assert reports[0]["answer"]["parts"] == reports[1]["answer"]["parts"]
    for key in ("rank", "world_size", "devices", "steps"):
        assert [rank[key] for rank in reports[0]["ranks"]] == [
            rank[key] for rank in reports[1]["ranks"]
        ]
    times = [
        sorted((row["total_ns"], row["count"]) for row in report["kernels"]) for report in reports
    ]
    assert times[0] == times[1]


def test_one_key_gives_the_same_pseudonyms_and_another_key_others() -> None:
    first = hidden("--key", "a.key")
    again = hidden("--key", "a.key", "--force")
    other = hidden("--key", "b.key", "--force")
    assert first == again
    assert other != first
    assert SECRET not in first + other


def test_the_map_undoes_the_pseudonyms() -> None:
    text = hidden("--map", "map.json")
    names = json.loads(Path("map.json").read_bytes())["names"]
    assert {f"{SECRET}.aten::mm", f"{SECRET}.gemm", f"{SECRET}.aten::copy_"} <= set(names.values())
    for pseudonym, name in names.items():
        assert pseudonym in text
        text = text.replace(pseudonym, name)
    assert text.count(f'"{SECRET}.gemm"') == 2


def test_the_report_says_what_was_hidden_as_json_too(here: Path) -> None:
    trace(0, f"{SECRET}.").write(here / "secret.json")
    told = answered("anonymize", "secret.json", "-o", "shared.json")
    (file,) = told["files"]
    assert (file["input"], file["kind"], file["entries_in"]) == (
        "secret.json",
        "kineto",
        file["entries_out"],
    )
    assert told == json.loads(Path("shared.json.anonymize.json").read_bytes())


# -- completion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_long_option_and_section_is_completed(shell: str) -> None:
    script, err = ran("completion", shell)
    assert err == ""
    for verb in VERBS:
        assert verb in script
        for action in cli.list_actions(cli.build_parser([verb])):
            for option in action.option_strings:
                assert (option.lstrip("-") if shell == "fish" else option) in script, (verb, option)
    assert all(name in script for name in SECTION_NAMES)


@pytest.mark.parametrize("shell", ["", "tcsh", "BASH"])
def test_a_shell_that_is_none_is_refused(shell: str) -> None:
    _, err = ran("completion", shell, code=2)
    assert "bash" in err


# -- hostile names everywhere -------------------------------------------------------------------------------------

SEEN: tuple[tuple[str, Callable[[str], list[str]]], ...] = (
    ("show", lambda path: ["show", path]),
    ("show a node", lambda path: ["show", path, "--node", "1", "--rank", "0"]),
    ("validate", lambda path: ["validate", path]),
    ("validate for astra-sim", lambda path: ["validate", path, "--target", "astra-sim"]),
)


@pytest.mark.parametrize(("what", "words"), SEEN, ids=[what for what, _ in SEEN])
def test_names_in_files_of_strangers_steer_no_terminal(
    what: str, words: Callable[[str], list[str]], here: Path
) -> None:
    nodes = [
        node(1, name=EVIL, attribute=EVIL, deps=[99]),
        collective(2, deps=[1], pg_name=EVIL, name=EVIL),
    ]
    home = write_set(here / "w", nodes, [receive(1, 0, name=EVIL)], groups={EVIL: [0, 1]})
    with captured() as (out, err):
        assert main(words(str(home))) in (0, 5)
    for text in (out.getvalue().decode(), err.getvalue().decode()):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028]", text)


def test_standard_input_is_a_trace_like_any_other(
    two: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = Path(two[0]).read_bytes()
    for piped in (raw, gzip.compress(raw)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        told = answered("report", "-", "--only", "core", "--no-cache")
        known = answered("report", two[0], "--only", "core", "--no-cache")
        assert told["answer"] == known["answer"]
        assert told["kernels"] == known["kernels"]
