"""Prints the modules that somebody opens who follows one thing through Traceloom with a debugger.

    python scripts/walk.py [column|request|question]

Each walk runs the real thing in this process. Stations are functions that the thing passes through;
when one is called, the frames of Traceloom on its stack are noted. A walk is the modules of all
stacks, with the function by which each is entered. More modules than the limit need a reason here.
The walks of a request and a question need the extras `agent` and `fleet`, and Linux.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.walks import run_question, run_report, run_request


@dataclass
class Walk:
    """One thing, the functions that it passes through, and what it needs.

    Attributes:
        title: What is followed.
        run: Runs it in a new directory.
        limit: How many modules it may pass.
        stations: `module:function`, in the order in which the thing reaches them, as one looks them up in the package
            `traceloom`; `station < caller` counts only calls below that caller.
        reasons: Why it passes more modules than the limit.
    """

    title: str
    run: Callable[[Path], object]
    limit: int
    stations: str
    reasons: str = ""

    def take(self, folder: Path) -> dict[str, str]:
        """Run it; module -> the function by which it is entered, in order."""
        stacks: dict[str, list[tuple[str, str]]] = {}
        wanted: dict[CodeType, list[tuple[str, CodeType | None]]] = {}
        for line in filter(None, map(str.strip, self.stations.splitlines())):
            station, _, caller = line.partition(" < ")
            wanted.setdefault(find_code(station), []).append(
                (line, find_code(caller) if caller else None)
            )

        def note(frame: FrameType, event: str, _: object) -> None:
            if event != "call" or frame.f_code not in wanted:
                return
            frames = list(iterate_frames(frame))
            for line, caller in wanted[frame.f_code]:
                if line not in stacks and (
                    caller is None or any(each.f_code is caller for each in frames)
                ):
                    stacks[line] = [
                        place for each in reversed(frames) if (place := describe_frame(each))
                    ]

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            self.run(folder)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # what the documentation says to do
        lines = [line for stations in wanted.values() for line, _ in stations]
        if missed := [line for line in lines if line not in stacks]:
            raise SystemExit(f"{self.title}: never reached {', '.join(missed)}")
        modules: dict[str, str] = {}
        for line in lines:
            for module, function in stacks[line]:
                modules.setdefault(module, function)
        return modules


def find_code(station: str) -> CodeType:
    """The code of `module:function`, below decorators."""
    module, _, path = station.partition(":")
    value: Any = importlib.import_module(f"traceloom.{module}")
    for name in path.split("."):
        value = getattr(value, name)  # a station that does not exist is an error
    function = getattr(value, "fget", None) or getattr(value, "func", value)  # of a property
    code: CodeType = inspect.unwrap(function).__code__
    return code


def iterate_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def describe_frame(frame: FrameType) -> tuple[str, str] | None:
    """Module and function of a frame of ours."""
    module = frame.f_globals.get("__name__", "")
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # qualified since Python 3.11
    return (module.removeprefix("traceloom."), name) if module.startswith("traceloom.") else None


WALKS = {
    "column": Walk(
        "A column from file to page: kernels.mean_ns",
        run_report,
        15,
        """
        cli.report:run
        formats.kineto_document:Document.slices
        formats.kineto_columns:Columns.add
        formats.kineto:read_kineto
        analyze.kernels:kernels
        analyze.kernel_rules:select_gpu_work
        analyze.steps:summarize_durations < analyze.kernels:kernels
        report.sections.kernels:KernelsSection.build
        report.sections.section:add_shares < report.sections.kernels:KernelsSection.build
        report.document:UnknownValues.convert_list < report.sections.kernels:KernelsSection.build
        report.sections.kernels:KernelsSection.tables
        report.views.page_table:render_html_table < report.views.page:build_sections
        """,
        "five of them only hand it on: formats.loading and formats.inputs read any number of files of any format, "
        "cli.outputs and system.files write every file of every verb whole or not at all, and report.views.files "
        "chooses by the ending of its name.",
    ),
    "request": Walk(
        "A trace request from command to file",
        run_request,
        15,
        """
        cli.trace:_run_agent_trace
        server.client:AgentClient.post
        agent.handlers.telemetry:_submit_request
        agent.traces.runner:TraceService.submit
        agent.database:RequestStore.put
        agent.traces.runner:TraceService._record
        agent.profilers.timeline:TimelineProfiler.record
        agent.kineto:ProfilerRegistry.poll
        agent.kineto:decode
        agent.kineto:encode_configuration_reply
        agent.worker:run
        agent.traces.files:verify_and_store
        agent.traces.files:write_document
        server.client:AgentClient.fetch
        """,
    ),
    "question": Walk(
        "A question from table to portal: the kernels that take most GPU time",
        run_question,
        12,
        """
        fleet.portal.app:Portal._shown
        fleet.portal.page_request:PageRequest.question
        fleet.questions.answering:QueryService._answer
        fleet.store.tables:Tables.scan
        fleet.questions.declaration:QuestionFrames.kernels
        fleet.analyses.kernels:list_top_kernels
        fleet.portal.question_pages:build_kernels_content
        fleet.portal.tables:PageTable.render
        fleet.portal.page:render_document
        """,
    ),
}


def main() -> int:
    """Print the walks that are named, or all."""
    parser = argparse.ArgumentParser(description="Print the modules that one thing passes through.")
    parser.add_argument("walks", nargs="*", metavar="|".join(WALKS), help="which (default: all)")
    names = parser.parse_args().walks or list(WALKS)
    if unknown := [name for name in names if name not in WALKS]:
        parser.error(f"there is no walk {', '.join(unknown)}; there are {', '.join(WALKS)}")
    unexplained = False
    for name in names:
        walk = WALKS[name]
        with tempfile.TemporaryDirectory(prefix="tl") as folder:  # names of sockets are short
            modules = walk.take(Path(folder))
        print(f"{walk.title}: {len(modules)} modules")
        for number, (module, function) in enumerate(modules.items(), start=1):
            print(f"{number:4} {module:<32} {function}")
        if len(modules) > walk.limit:
            unexplained = unexplained or not walk.reasons
            print(f"  More than {walk.limit}: {walk.reasons or 'no reason is stated.'}")
    return int(unexplained)


if __name__ == "__main__":
    sys.exit(main())
