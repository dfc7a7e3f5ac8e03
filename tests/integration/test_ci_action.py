"""action.yml and Dockerfile: their steps are run here, with GitHub's side of them made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import traceloom
from traceloom.testing import TraceBuilder

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
UNIX_NS = 1_700_000_000 * 10**9


class Runner:
    """Runs the steps of the action as a runner does, with `pip`, `gh` and the recorder made up."""

    def __init__(self, home: Path) -> None:
        self.home = home
        tools = home / "tools"
        tools.mkdir()
        self.log = home / "log.txt"
        python = f'PYTHONPATH={Path(traceloom.__file__).parents[1]} exec {sys.executable} -m traceloom "$@"'
        record = f'if [ "$1" = record ]; then echo "record $PWD $*" >> {self.log}; exit 0; fi'
        for name, text in {
            "traceloom": f"{record}\n{python}",
            "python": f'echo "python $*" >> {self.log}',
            "gh": f"""echo "gh $*" >> {self.log}; case "$*" in *--paginate*) echo "$GH_COMMENT";; esac
[ -z "$GH_FAILS" ]""",
        }.items():
            (tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (tools / name).chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "RUNNER_TEMP": str(home / "temp"),
            "GITHUB_OUTPUT": str(home / "output"),
            "GITHUB_STEP_SUMMARY": str(home / "summary.md"),
            "GITHUB_REPOSITORY": "me/project",
            "TRACELOOM_CACHE_DIR": str(home / "cache"),
        }

    @property
    def outputs(self) -> dict[str, str]:
        path = self.home / "output"
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(line.split("=", 1) for line in lines)

    def run(self, number: str = "7", **inputs: str) -> int:
        """The exit code of the first step that fails, or 0."""
        values = {name: str(about.get("default", "")) for name, about in ACTION["inputs"].items()}
        values |= {name.replace("_", "-"): value for name, value in inputs.items()}
        for step in ACTION["runs"]["steps"]:
            if "run" not in step:
                assert step["uses"].startswith("actions/")
                continue
            assert "${{" not in step["run"], "what a pull request says would be run"

            def value_of(match: re.Match[str]) -> str:
                kind, _, name = match[1].partition(".")
                known = {
                    "github.token": "",
                    "github.action_path": str(ROOT),
                    "github.event.pull_request.number": number,
                }
                if kind == "inputs":
                    return values[name]
                return self.outputs[name.split(".")[-1]] if kind == "steps" else known[match[1]]

            env = {
                name: re.sub(r"\$\{\{ (\S+) \}\}", value_of, text)
                for name, text in step.get("env", {}).items()
            }
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            code = subprocess.run(
                command, env={**self.env, **env}, cwd=self.home, check=False
            ).returncode
            if code:
                return code
        return 0


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def runs(folder: Path, step_us: int) -> str:
    """Four recorded runs of steps that take so long."""
    for run in range(4):
        (folder / str(run)).mkdir(parents=True)
        made = TraceBuilder(base_ns=UNIX_NS + run * 10**12, process=10)
        for step in range(12):
            long = step_us + (step * 7 + run * 3) % 5
            made.step(step, step * 2 * step_us, long).op(
                "aten::mm", step * 2 * step_us + 10, long - 20
            )
        made.write(folder / str(run) / "rank0.json")
    return str(folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("limit", "code", "verdict"), [("60%", 0, "pass"), ("3%", 5, "fail")])
def test_a_slower_step_fails_the_pull_request_and_is_told(
    limit: str, code: int, verdict: str, runner: Runner, tmp_path: Path
) -> None:
    base, new = runs(tmp_path / "base", 1000), runs(tmp_path / "new", 1300)
    assert runner.run(base=base, new=new, fail_if=f"step_time > {limit}\n") == code
    report = Path(runner.outputs["report"])
    assert json.loads((report / "check.json").read_text())["verdict"] == verdict
    assert (tmp_path / "summary.md").read_text() == (report / "check.md").read_text()
    commands = runner.log.read_text().splitlines()
    assert commands[0] == f"python -m pip install --quiet {ROOT}[remote]"
    asked, written = commands[1:]
    assert asked.startswith("gh api --paginate repos/me/project/issues/7/comments --jq ")
    assert written == f"gh pr comment 7 --repo me/project --body-file {report}/comment.md"
    assert (report / "comment.md").read_text().startswith("<!-- traceloom: traceloom -->\n")


def test_its_own_comment_is_kept_up_to_date_by_its_first_line(
    runner: Runner, tmp_path: Path
) -> None:
    base = runs(tmp_path / "base", 1000)
    runner.env["GH_COMMENT"] = "41"
    assert runner.run(base=base, new=base, fail_if="step_time > 3%", name="fast") == 0
    report = Path(runner.outputs["report"])
    assert runner.log.read_text().splitlines()[-1] == (
        f"gh api --method PATCH repos/me/project/issues/comments/41 -F body=@{report}/comment.md"
    )
    assert (report / "comment.md").read_text().startswith("<!-- traceloom: fast -->\n")


def test_where_commenting_is_not_allowed_the_summary_has_to_do(
    runner: Runner, tmp_path: Path
) -> None:
    base = runs(tmp_path / "base", 1000)
    runner.env["GH_FAILS"] = "yes"
    assert runner.run(base=base, new=base, fail_if="step_time > 3%") == 0
    assert runner.log.read_text().count("gh pr comment") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("number", "comment"), [("", "true"), ("7", "false")])
def test_nothing_is_told_without_a_pull_request_or_where_it_is_not_wanted(
    number: str, comment: str, runner: Runner, tmp_path: Path
) -> None:
    base = runs(tmp_path / "base", 1000)
    assert runner.run(number, base=base, new=base, fail_if="step_time > 3%", comment=comment) == 0
    assert "gh" not in runner.log.read_text()


def test_a_command_is_recorded_in_both_checkouts_in_turns(runner: Runner, tmp_path: Path) -> None:
    for side in ("old", "now"):
        (tmp_path / side).mkdir()
    assert (
        runner.run(base="old", new="now", command="python train.py; echo $HOME", runs="2") == 3
    )  # nothing was recorded
    recorded = [line for line in runner.log.read_text().splitlines() if line.startswith("record")]
    assert [line.split()[1] for line in recorded] == [
        str(tmp_path / side) for side in ("old", "now", "old", "now")
    ]
    out = tmp_path / "temp" / "traceloom" / "runs" / "new" / "2"
    assert recorded[-1].endswith(
        f"record -q --force -o {out} -- bash -c python train.py; echo $HOME"
    )


def test_a_wrong_condition_ends_the_action_with_its_message(runner: Runner, tmp_path: Path) -> None:
    base = runs(tmp_path / "base", 1000)
    assert runner.run(base=base, new=base, fail_if="step_time >> 3%; rm -rf /") == 2


def test_the_workflow_to_copy_uses_inputs_that_the_action_has() -> None:
    workflow = yaml.safe_load(
        (ROOT / "examples" / "ci" / "traceloom.yml").read_text(encoding="utf-8")
    )
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    (uses,) = (step for step in steps if "/traceloom@" in step.get("uses", ""))
    assert set(uses["with"]) <= set(ACTION["inputs"])
    assert {name for name, about in ACTION["inputs"].items() if about.get("required")} <= set(
        uses["with"]
    )


def test_the_image_gets_all_that_the_package_is_built_from_and_runs_the_script() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ['ENTRYPOINT ["traceloom"]', 'CMD ["--help"]']
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[0] == "!"
    }
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = {
        "pyproject.toml",
        *re.findall(r'^"(\w+)/[^"]+" = "traceloom', project, re.MULTILINE),
        "src",
    }
    needed |= set(re.findall(r'^(?:readme = |license-files = \[)"([^"]+)"', project, re.MULTILINE))
    assert needed == kept
