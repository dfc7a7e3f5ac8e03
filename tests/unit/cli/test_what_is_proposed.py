"""The command that a verb proposes at its end can be typed as it stands, wherever the files lie, and does its work."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from support.fuzzing.trying import captured
from support.sessions import busy_step
from traceloom.cli import main
from traceloom.testing import TraceBuilder

NETWORK = (
    "topology: [ FullyConnected ]\nnpus_count: [ 2 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n"
)
SYSTEM = {
    f"{kind}-implementation": ["ring"]
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
} | {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "preferred-dataset-splits": 1,
    "local-mem-bw": 1600,
    "collective-optimization": "localBWAware",
    "active-chunks-per-dimension": 1,
}
SET = ["--set", "kernels ~ gemm * 0.5"]
that_answer = pytest.mark.parametrize(
    "arguments",
    [
        ["report", "rank 0.json"],
        ["memory", "rank 0.json"],
        ["whatif", "rank 0.json", *SET],
        ["diff", "rank 0.json", "rank 1.json"],
    ],
    ids=lambda words: words[0],
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose files all have a blank and a quote in their name."""
    home = tmp_path / "it's here"
    home.mkdir()
    for rank in (0, 1):
        made = TraceBuilder(rank=rank, world_size=2)
        for step in range(2):
            busy_step(made, step, 1000 * step).allocation(
                1000 * step + 20, 1 << 20, address=step + 1
            )
        made.write(home / f"rank {rank}.json")
    monkeypatch.chdir(home)
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    return home


def ran(arguments: list[str]) -> str:
    with captured() as (out, err):
        code = main(arguments)
    assert code == 0, err.getvalue().decode()
    return out.getvalue().decode()


def proposed(said: str) -> list[str]:
    """The words of the last command that was proposed."""
    (*_, command) = re.findall(r"(?:[Nn]ext:|look at it:) (traceloom .*)", said)
    program, *words = shlex.split(command)
    assert program == "traceloom"
    return words


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "rank 0.json"],
        ["memory", "rank 0.json", "--by", "op"],
        ["whatif", "rank 0.json", *SET],
        ["whatif", "rank 0.json", *SET, "--set", "syncs remove", "--step", "1"],
        ["simulate", "rank 0.json"],
        [
            "simulate",
            "rank 0.json",
            "--machine",
            "dgx-h100",
            "--sweep",
            "network.0.bandwidth=50,100",
        ],
        ["diff", "rank 0.json", "rank 1.json"],
        ["diff", "rank 0.json", "rank 1.json", "--fail-if", "step_time > 300%"],
        ["link", "rank 0.json", "rank 1.json", "-o", "a job.graph"],
        ["generate", "pipeline", "--ranks", "2", "-o", "a pipeline"],
        ["anonymize", "rank 0.json", "-o", "to share", "--key", "my key.txt"],
    ],
    ids=" ".join,
)
def test_the_next_command_works_in_a_place_with_blanks_in_its_names(
    arguments: list[str], here: Path
) -> None:
    words = proposed(ran(arguments))
    before = {path.name for path in here.iterdir()}
    ran(words)
    if "-o" in words:
        assert {path.name for path in here.iterdir()} - before == {words[words.index("-o") + 1]}


def test_from_a_made_workload_each_verb_leads_to_the_next(here: Path) -> None:
    words = proposed(ran(["generate", "collective", "--ranks", "2", "-o", "a workload"]))
    assert words[0] == "validate"
    words = proposed(ran(words))
    assert words[0] == "show"
    words = proposed(ran(words))
    assert words == ["show", "a workload", "-o", "drawing.html"]
    assert "Wrote drawing.html" in ran(words)
    words = proposed(ran(["convert", "a workload", "a job.graph"]))
    assert words[:2] == ["convert", "a job.graph"]
    assert proposed(ran(words))[0] == "validate"
    assert proposed(ran(["convert", "a job.graph", "for sim", "--target", "astra-sim"])) == [
        "validate",
        "for sim",
        "--target",
        "astra-sim",
    ]


def test_files_that_were_named_one_by_one_are_proposed_all(here: Path) -> None:
    ran(["generate", "collective", "--ranks", "2", "-o", "a workload"])
    files = sorted(str(path) for path in Path("a workload").glob("*.et"))
    assert len(files) == 2
    assert proposed(ran(["show", *files])) == ["show", *files, "-o", "drawing.html"]


def test_a_what_if_of_a_step_proposes_the_page_of_that_step(here: Path) -> None:
    words = proposed(ran(["whatif", "rank 0.json", *SET, "--step", "1"]))
    assert words == ["whatif", "rank 0.json", *SET, "--step", "1", "-o", "whatif.html"]


def test_a_simulation_proposes_the_page_of_the_same_question(here: Path) -> None:
    words = [
        "simulate",
        "rank 0.json",
        "--machine",
        "dgx-h100",
        "--set",
        "network.0.bandwidth=100",
        "--set",
        "nic.bandwidth=5",
        "--device",
        "H100 SXM",
        "--host-factor",
        "0.5",
        "--recorded-device",
        "A100 SXM 80GB",
        "--step",
        "1",
    ]
    again = proposed(ran(words))
    assert sorted(again) == sorted([*words, "-o", "simulation.html"])
    assert "Wrote simulation.html" in ran(again)


def test_the_mode_of_a_simulation_stays(here: Path) -> None:
    ran(["generate", "collective", "--ranks", "2", "-o", "a workload"])
    Path("net work.yml").write_text(NETWORK, encoding="utf-8")
    Path("system.json").write_text(json.dumps(SYSTEM), encoding="utf-8")
    words = [
        "--mode",
        "astra-sim",
        "--network",
        "net work.yml",
        "--system",
        "system.json",
        "--congestion",
        "aware",
    ]
    again = proposed(ran(["simulate", "a workload", *words]))
    assert again == ["simulate", "a workload", *words, "-o", "simulation.json"]
    assert "Wrote simulation.json" in ran(again)


def test_a_baseline_proposes_to_compare_a_new_run_with_it(here: Path) -> None:
    words = proposed(ran(["baseline", "save", "main", "rank 0.json", "--store", "my store"]))
    assert words[:3] == ["baseline", "compare", "main"]
    words[words.index("NEW-RUN")] = "rank 1.json"
    said = ran(words)
    assert "Passed" in said or "nconclusive" in said
    assert ran(proposed(said)).startswith(("Passed", "Inconclusive", " Passed", " Inconclusive"))


@pytest.mark.sampled(2)
@that_answer
def test_nothing_is_proposed_where_files_were_written_or_silence_was_asked_for(
    arguments: list[str], here: Path
) -> None:
    said = ran([*arguments, "-o", "an answer.json"])
    assert said.startswith("Wrote an answer.json (")
    assert "Next:" not in said
    if arguments[0] != "report":  # which takes longest, and ends as the others do
        assert ran([*arguments, "-o", "an answer.json", "--force", "--quiet"]).strip() == ""
        assert "Next:" not in ran([*arguments, "--quiet"])


@pytest.mark.sampled(2)
@that_answer
def test_standard_output_is_json_alone_where_that_was_asked_for(
    arguments: list[str], here: Path
) -> None:
    with captured() as (out, err):
        assert main([*arguments, "--json", "-o", "beside.json"]) == 0
    assert out.getvalue() == Path("beside.json").read_bytes()
    assert json.loads(out.getvalue())["format"].startswith("traceloom-")
    assert b"Wrote beside.json" in err.getvalue()
