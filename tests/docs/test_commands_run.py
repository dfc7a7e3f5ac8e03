"""The commands of README and of the tutorials run, word by word and in their order, on the example that is recorded."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import traceloom
from support.once import alone, shared_folder
from traceloom.cli import main

ROOT = Path(__file__).resolve().parents[2]
# The tutorial about pages takes a service, an agent and a job at once: test_portal_tutorial.py follows it.
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
        if page.name != "portal.md"
    ),
]
# They run the verbs of all pages; options of the others are looked at in test_named_commands.py.
USUAL = {"README"}
FAILED_CHECK = 5  # what a check says of two runs of a small program is up to chance
# The program of all pages: the example, small, with whatever options a page gives it.
TRAIN = f"""
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:], "--layers", "1", "--width", "32", "--heads", "2", "--context", "32"]
runpy.run_path({str(ROOT / "examples" / "train_gpt.py")!r}, run_name="__main__")
"""


def commands(page: Path, folder: Path) -> Iterator[list[str]]:
    """The words of every `traceloom ...` that a page has, as the shell splits them; loops are run by the shell."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    log = folder / "log"
    script = f'traceloom() {{ printf "%q " "$@" >> {log}; echo >> {log}; }}\nmake() {{ :; }}\npip() {{ :; }}\n'
    subprocess.run(["bash", "-euc", script + "".join(blocks)], cwd=folder, check=True)
    for line in log.read_text().splitlines():
        words = shlex.split(line)
        if words[0] == "replay" and not {"--plan-only", "--dry-run"} & set(words):
            words += [
                "--max-time",
                "1",
            ]  # the last one counts: how well the times are known is of no interest here
        yield words


class Recordings:
    """Runs of the example: each choice of the recorder's options is recorded once in a test run, and copied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, words: list[str], folder: Path) -> None:
        """What `traceloom record ...` would leave in `folder`."""
        program = words.index("--")
        at = words.index("-o")
        options = [*words[1:at], *words[at + 2 : program]]
        kept = self._folder / re.sub(
            r"\W+", "-", " ".join([*options, *words[program : words.index("train.py")]])
        )
        with alone(kept):
            self._record(kept, words, options, program, folder)
        shutil.copytree(kept, folder / words[at + 1])

    def _record(
        self, kept: Path, words: list[str], options: list[str], program: int, folder: Path
    ) -> None:
        if not kept.exists():
            python = Path(sys.executable).parent
            env = os.environ | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(traceloom.__file__).parents[1]),
            }
            env["PATH"] = f"{python}:{env['PATH']}"
            command = [
                sys.executable,
                "-m",
                "traceloom",
                "record",
                *options,
                "-o",
                str(kept),
                *words[program:],
            ]
            done = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """Of all pages."""
    return Recordings(shared_folder(tmp_path_factory) / "recordings")


@pytest.mark.torch
@pytest.mark.parametrize(
    "page",
    [
        page if page.stem in USUAL else pytest.param(page, marks=pytest.mark.thorough)
        for page in PAGES
    ],
    ids=lambda page: page.stem,
)
def test_every_command_of_a_page_runs(
    page: Path,
    recordings: Recordings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    count = 0
    for words in commands(page, tmp_path):
        if words[0] == "record":
            recordings.put(words, tmp_path)
            window = next(tmp_path.rglob("rank0.kineto.json.gz"))
            shutil.copy(window, tmp_path / "trace.json.gz")  # "any trace of torch.profiler"
        else:
            code = main(words)
            errors = capsys.readouterr().err
            assert code in {0, FAILED_CHECK}, f"traceloom {shlex.join(words)}\n{errors}"
            assert code == 0 or "--fail-if" in words
        count += 1
    assert count >= 3


def test_the_three_questions_take_at_most_three_commands_each() -> None:
    text = (ROOT / "docs" / "tutorials" / "three-questions.md").read_text(encoding="utf-8")
    parts = text.split("\n## ")[1:]
    assert [part.partition("\n")[0] for part in parts] == [
        "Why is this step slow?",
        "Did my change help?",
        "Whose memory is it?",
    ]
    assert all(0 < len(re.findall(r"^traceloom ", part, re.MULTILINE)) <= 3 for part in parts)


def test_the_first_tutorial_says_how_to_install() -> None:
    text = (ROOT / "docs" / "tutorials" / "first-report.md").read_text(encoding="utf-8")
    assert text.index("pip install traceloom") < text.index("traceloom record")
