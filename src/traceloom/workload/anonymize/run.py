"""Anonymizing all files of a run in one pass, with staged output."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import traceloom
from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.system import files
from traceloom.system.text import encode_utf8
from traceloom.workload.anonymize import inputs as sources
from traceloom.workload.anonymize.chakra import ChakraRewriter, find_first_start, write_groups
from traceloom.workload.anonymize.collapse import merge_host_work
from traceloom.workload.anonymize.host_trace import HostRewriter
from traceloom.workload.anonymize.inputs import ENDINGS, InputFile, InputFiles, Staging
from traceloom.workload.anonymize.kineto import Rules, TraceFacts, write_kineto
from traceloom.workload.anonymize.leak_report import InputShapes, build_leak_report
from traceloom.workload.anonymize.metadata import CaptureRewriter
from traceloom.workload.anonymize.names import KernelNames, Pseudonyms
from traceloom.workload.anonymize.policy import (
    CALLS,
    COLLAPSE,
    FIT,
    ZERO,
    Key,
    Policy,
    RewriteStats,
)
from traceloom.workload.anonymize.sizes import Shapes
from traceloom.workload.anonymize.utility_report import (
    Measure,
    build_dry_run_report,
    choose_kept_factors,
    compare,
    measure,
    measure_chakra,
    measure_job,
)

StatusCallback = Callable[[str], None]
_MAX_LINKED_BYTES = 1 << 29  # larger runs are not linked for the comparison
_GRAIN_NS = 1_000_000  # times start at a whole millisecond


@dataclass(slots=True)
class Anonymized:
    """The result of anonymizing.

    Attributes:
        output: The written file or directory.
        report: The reports as one JSON object: `files`, `omitted`, `dropped`, `utility`, `leaks`,
            `policy`.
        report_path: File of the reports, readable by the owner only.
        refused: Why inputs were rejected, one sentence each.
    """

    output: Path
    report: dict[str, Any]
    report_path: Path
    refused: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _FirstPass:
    facts: TraceFacts
    first_ns: int
    unix: bool
    measure: Measure
    notices: set[str]


class _AnonymizeRun:
    """Anonymizes the files of one run.

    Args:
        inputs: The files.
        policy: The policy.
        key: Makes the pseudonyms.
        on_status: Called with a status message.
    """

    def __init__(
        self, inputs: InputFiles, policy: Policy, key: Key, on_status: StatusCallback
    ) -> None:
        self._inputs = inputs
        self._say = on_status
        names = Pseudonyms(key, policy)
        self.rules = Rules(policy, names, Shapes(policy), KernelNames(names, policy))
        self.account = RewriteStats()
        self.hidden = InputShapes()
        self.files: list[dict[str, Any]] = []
        self.utility: list[dict[str, Any]] = []
        self.refused: list[InputError] = []
        self.replay: dict[str, Any] | None = None
        self._seen: dict[Path, _FirstPass] = {}
        self._origin_us: int | None = None
        self._collapsed = policy.structure == COLLAPSE

    def write(self, stage: Staging) -> None:
        """Rewrites every file into the staging directory.

        Raises:
            InputError: None of the files can be used.
        """
        # First pass: starts of traces, lanes of host threads, results of analyses.
        usable = []
        for number, source in enumerate(self._inputs.files, start=1):
            if source.kind == sources.KINETO:
                self._say(f"measuring file {number} of {len(self._inputs.files)}")
            try:
                if source.kind == sources.KINETO:
                    self._seen[source.path] = self.measured(source)
                elif source.kind == sources.CHAKRA and self.rules.policy.times == ZERO:
                    first = find_first_start(source.path)
                    if first is not None:
                        self._origin_us = (
                            first if self._origin_us is None else min(first, self._origin_us)
                        )
            except InputError as error:
                self.refused.append(error)
            else:
                usable.append(source)
        self._inputs.files[:] = usable
        unsettled = ""
        if self.rules.policy.shapes == FIT:
            self._say("rounding sizes so that they fit each other")
            unsettled = choose_kept_factors(
                [source for source in usable if source.kind == sources.HOST], self.rules
            )
        for number, source in enumerate(usable, start=1):
            self._say(f"rewriting file {number} of {len(usable)}")
            try:
                self.rewrite(source, stage.path(source.name))
            except InputError as error:
                self.refused.append(error)
        if not self.files:
            raise self.refused[0]
        rules, origin_ns = self.rules, self.origin_ns(unix=True)
        for directory, (document, name) in self._inputs.captures.items():
            target = stage.path(f"{name}capture.json")
            renamed = {
                source.path.name: Path(source.name).name
                for source in usable
                if source.path.parent == directory
            }
            captures = CaptureRewriter(
                rules.names, rules.shapes, rules.policy, self.account, origin_ns, renamed
            )
            target.write_bytes(captures.rewrite(document))
            self.files.append(
                {
                    "input": str(directory / "capture.json"),
                    "output": target.name,
                    "kind": sources.CAPTURE,
                }
            )
        if rules.policy.scalars == CALLS:
            self._say("running all operators dry")
            self.replay = build_dry_run_report(
                self.written(stage, [source for source in usable if not source.graph]), unsettled
            )
        # Link all ranks, before and after, if there is more than one file to link. Collapsed host
        # traces do not fit device traces any more, by design.
        kinds = (sources.KINETO,) if self._collapsed else (sources.KINETO, sources.HOST)
        linked = [source for source in self._inputs.files if source.kind in kinds]
        size = sum(source.path.stat().st_size for source in linked)
        if len(linked) < 2 or not self._seen or size > _MAX_LINKED_BYTES:
            return
        self._say("linking all ranks, before and after")
        folders = [] if self._collapsed else list(self._inputs.captures)
        loose = [
            source for source in linked if source.path.parent not in folders and not source.graph
        ]
        before = measure_job([*folders, *(source.path for source in loose)])
        after = measure_job(self.written(stage, linked))
        if not isinstance(before, str):
            self.compare(None, None, before, {} if isinstance(after, str) else after, [])

    def written(self, stage: Staging, selected: list[InputFile]) -> list[Path]:
        """Returns the rewritten captures, and those of the other files that are in `selected`."""
        folders = {} if self._collapsed else self._inputs.captures
        loose = [
            source for source in selected if source.path.parent not in folders and not source.graph
        ]
        return [stage.folder / name for _, name in folders.values()] + [
            stage.folder / source_file.name for source_file in loose
        ]

    def measured(self, source: InputFile) -> _FirstPass:
        trace = read_kineto(source.path, capture=source.entry)
        if trace.siblings:
            raise InputError(
                "several ranks were merged in this file; they can only be anonymized one by one",
                slug="merged-ranks",
                where=str(source.path),
                hint="give the files that it was merged from",
            )
        self.hidden.add_trace(trace)
        hosts = trace.lanes.filter(trace.lanes["kind"].is_in(["host", "other"]))
        facts = TraceFacts(
            source.path,
            0,
            frozenset(zip(hosts["process"].to_list(), hosts["thread"].to_list(), strict=True)),
            trace.meta.base_ns,
        )
        if self._collapsed:
            names = frozenset(trace.steps["name"].to_list())
            steps = trace.events.filter(trace.events["name"].is_in(list(names))).select(
                "start_ns", "nested_end_ns"
            )
            facts = replace(
                facts,
                threads=tuple(merge_host_work(trace)),
                steps=names,
                step_ns={start: end - start for start, end in steps.iter_rows()},
                window_ns=(trace.start_ns, trace.end_ns) if trace.events.height else None,
            )
        columns = [
            trace.events["start_ns"],
            *(f["time_ns"] for f in (trace.allocations, trace.marks, trace.counters)),
        ]
        firsts: list[Any] = [column.min() for column in columns]
        first_ns = min((int(first) for first in firsts if first is not None), default=0)
        notices = {notice.slug for notice in trace.notices}
        return _FirstPass(facts, first_ns, trace.meta.clock == "unix", measure(trace), notices)

    def origin_ns(self, *, unix: bool) -> int:
        if self.rules.policy.times != ZERO:
            return 0
        firsts = [
            first_pass.first_ns for first_pass in self._seen.values() if first_pass.unix == unix
        ]
        return min(firsts) // _GRAIN_NS * _GRAIN_NS if firsts else 0

    def rewrite(self, source: InputFile, target: Path) -> None:
        """Rewrites one file and compares the analyses before and after."""
        account = RewriteStats()
        if source.kind == sources.KINETO:
            first_pass = self._seen[source.path]
            # With `times = "keep"` the file keeps its base time, so `ts` is written relative to it.
            zeroed = self.rules.policy.times == ZERO
            origin_ns = self.origin_ns(unix=first_pass.unix) if zeroed else first_pass.facts.base_ns
            write_kineto(
                replace(first_pass.facts, origin_ns=origin_ns),
                self.rules,
                account,
                target,
                unix=first_pass.unix,
            )
            after = read_kineto(target, capture=source.entry)
            fresh = sorted({notice.slug for notice in after.notices} - first_pass.notices)
            self.compare(source.name, after.rank, first_pass.measure, measure(after), fresh)
            first_pass.measure = {}
            first_pass.facts = replace(first_pass.facts, threads=())
        elif source.kind == sources.HOST:
            HostRewriter(source.path, self.rules, account, self.hidden).write(target)
        elif source.kind == sources.GROUPS:
            write_groups(source.path, self.rules, account, target)
        else:
            ChakraRewriter(
                source.path, self.rules, account, self.hidden, self._origin_us or 0
            ).write(target)
            self.compare(
                source.name, source.rank, measure_chakra(source.path), measure_chakra(target), []
            )
        self.account.add(account)
        self.files.append(
            {
                "input": str(source.path),
                "output": source.name,
                "kind": source.kind,
                "rank": source.rank,
            }
            | {"bytes": target.stat().st_size}
            | account.to_dict()
        )

    def compare(
        self,
        file: str | None,
        rank: int | None,
        before: Measure,
        after: Measure,
        new_notices: list[str],
    ) -> None:
        """Adds to the utility report; without a file the entry is about the job."""
        rounded = self.rules.shapes.rounds
        parts = [
            part.to_dict(collapsed=self._collapsed, rounded=rounded)
            for part in compare(before, after)
        ]
        if file is None:
            parts = [part | {"part": f"{part['part']} of the job"} for part in parts]
        self.utility.append(
            {"file": file, "rank": rank, "parts": parts, "new_notices": new_notices}
        )

    def report(self) -> dict[str, Any]:
        rules = self.rules
        return {
            "format": "traceloom-anonymize-report",
            "version": 1,
            "traceloom": traceloom.__version__,
            "policy": rules.policy.to_dict(),
            "files": self.files,
            "omitted": self._inputs.left,
            "refused": [str(error) for error in self.refused],
            **{
                key: value
                for key, value in self.account.to_dict().items()
                if key.startswith("dropped")
            },
            "utility": self.utility,
            **({} if self.replay is None else {"replay": self.replay}),
            "leaks": build_leak_report(
                self.account, rules.names, rules.shapes, self.hidden, rules.policy
            ),
        }

    def map(self) -> dict[str, Any]:
        """Returns the originals of the pseudonyms, for the owner."""
        names = self.rules.names
        return {
            "format": "traceloom-anonymize-map",
            "version": 1,
            "names": names.originals,
            "processes": {str(pseudonym): number for pseudonym, number in names.numbers.items()},
            "files": {entry["output"]: entry["input"] for entry in self.files},
            "origin_ns": {
                "unix": str(self.origin_ns(unix=True)),
                "other": str(self.origin_ns(unix=False)),
            },
        }


def anonymize(
    inputs: list[Path],
    output: Path,
    policy: Policy,
    key: Key,
    mapping: Path | None = None,
    *,
    force: bool = False,
    on_status: StatusCallback = lambda _: None,
) -> Anonymized:
    """Rewrite traces so that they can be shared; the output has the same kinds of files.

    Args:
        inputs: Files, directories, captures.
        output: A file for one file, else a directory.
        policy: The policy.
        key: Makes the pseudonyms.
        mapping: File for the owner's map; None for no map.
        force: Replace earlier output.
        on_status: Called with a status message.

    Raises:
        UsageError: slug `wrong-usage`: the output is among the inputs.
        InputError: Nothing can be used.
        OutputError: Something cannot be written; then nothing is written.
    """
    with files.protect_inputs(inputs):
        all_sources = sources.find(inputs)
        for source in all_sources.files:
            files.remember_input(source.path)
        single = (
            len(all_sources.files) == 1
            and not all_sources.captures
            and output.name.lower().endswith(ENDINGS)
        )
        if single:
            # The suffix of the staged name decides on compression, so it must match the output's.
            source = all_sources.files[0]
            source.name = source.name.removesuffix(".gz") + (
                ".gz" if output.name.lower().endswith(".gz") else ""
            )
        run = _AnonymizeRun(all_sources, policy, key, on_status)
        report_path = output.with_name(f"{output.name}.anonymize.json")
        staging = Staging(output, single=single, force=force)
        for path in (report_path, mapping):
            if path is not None:
                files.refuse_existing(path, force=force)
        with staging as stage:
            run.write(stage)
            report = run.report()
            if mapping is not None:
                _write_private(mapping, run.map(), force=force)
            _write_private(report_path, report, force=force)
            stage.commit(all_sources.files[0].name if single else None)
        return Anonymized(output, report, report_path, [str(error) for error in run.refused])


def _write_private(path: Path, document: dict[str, Any], *, force: bool) -> None:
    text = encode_utf8(json.dumps(document, indent=1, ensure_ascii=False)) + b"\n"
    files.write(path, lambda handle: handle.write(text), force=force, private=True)
