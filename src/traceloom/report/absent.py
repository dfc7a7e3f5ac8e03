"""What a report does not know, and why: every null in the document is explained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import polars as pl

from traceloom.model.columns import column
from traceloom.model.frames import rows

if TYPE_CHECKING:
    from traceloom.report.documents.report import AbsentRow

_TIMES = ("start_ns", "time_ns", "peak_time_ns", "first_ns", "last_ns")

# Path in the document -> why a value there can be unknown, where its column does not say. `[*]` stands for any row.
REASONS = {
    "ranks[*].devices": "no GPU work was recorded",
    "ranks[*].gpu_account": "no GPU work was recorded",
    "answer.step_ns": "no trace marks steps that last",
    "ranks[*].steps": "the trace marks no steps",
    "ranks[*].steps[*].lag_ns": "the step launched no GPU work",
    "ranks[*].host.threads": "no host events were recorded",
    "ranks[*].step_times": "the trace marks no steps",
    "ranks[*].step_times.spread_fraction": "the median step has no length",
    "kernels": "no GPU work was recorded",
    "operators": "no framework operators were recorded",
    "operators[*].shapes": "not counted apart by shape (ask with --by-shape), or shapes were not recorded",
    "operators[*].device_ns": "no GPU work was recorded",
    "operators[*].self_device_ns": "no GPU work was recorded",
    "operators[*].kernel_count": "no GPU work was recorded",
    "modules": "neither Python stacks nor module annotations were recorded",
    "communication.collectives": "no collective communication was recorded",
    "communication.collectives[*].group_description": "the group has no description",
    "communication.collectives[*].exposed_ns": "only communication on a device can overlap its compute",
    "memory.devices": "allocations were not recorded (record with --memory, or profile_memory=True)",
    "memory.devices[*].end_bytes": "the allocator's own total was not recorded",
    "memory.devices[*].peak_bytes": "the allocator's own total was not recorded",
    "memory.curve[*].reserved_bytes[*]": "the allocator does not say what it has reserved",
    "data_loading": "no data loader was recorded",
    "data_loading.waits[*].maker": "neither the name of the call nor the Python frames say who makes the batch",
    "data_loading.waits[*].gpu_idle_ns": "no GPU work was recorded",
    "data_loading.steps[*].gpu_idle_ns": "no GPU work was recorded, or no loader in this step",
    "data_loading.steps[*].bottleneck": "no loader was recorded in this step",
    "data_loading.steps[*].wait_ns": "no loader was recorded in this step",
    "notices[*].rank": "the notice is about the whole run, or the file does not say its rank",
    "capture": "the run was not recorded by `traceloom record`",
    "findings": "no rule found anything that is worth half a per cent of the step",
    "findings[*].saving_low_ns": "it is about memory, or only one step was looked at",
    "findings[*].saving_high_ns": "it is about memory, or only one step was looked at",
    "findings[*].frames": "it is not about what the host does, or no frame holds 5 % of that",
    "findings[*].frames[*].file": "a built-in function is in no file",
    "findings[*].frames[*].line": "a built-in function is in no file",
    "findings[*].frames[*].inside": "nothing that it calls takes half of its time",
    "findings[*].frames[*].inside_ns": "nothing that it calls takes half of its time",
    "findings_ground.limit": "savings were evaluated over several steps, or there are no steps",
    "findings_ground.step": "the trace marks no steps: the whole window is looked at",
    "findings_ground.host_ratio": "the cost of recording was not measured",
    "runs[*].world_size": "the files do not say how many ranks the job has",
}


class Absent:
    """Collects the reasons while a document is built; a path is explained once."""

    def __init__(self, epoch_ns: int, more: Mapping[str, str] | None = None) -> None:
        self.epoch_ns = epoch_ns
        self._known = {**REASONS, **(more or {})}
        self._reasons: dict[str, str] = {}

    def say(self, path: str, reason: str | None = None) -> None:
        """Explain the unknown or empty value at `path`: by `reason`, else as the path or its column is declared."""
        if reason is None and (reason := self._known.get(path)) is None:
            above, _, name = path.replace("[*]", "").rpartition(".")
            with suppress(KeyError):
                reason = column(name, above).unknown
        self._reasons.setdefault(path, reason or "the trace does not say")

    def rows(self, frame: pl.DataFrame, path: str) -> list[Any]:
        """The rows of a frame as they stand at `path` of the document: times relative, each null column explained."""
        times = [name for name in frame.columns if name in _TIMES]
        frame = frame.with_columns(pl.col(times) - self.epoch_ns) if times else frame
        for name in frame.columns:
            if frame[name].null_count():
                self.say(f"{path}[*].{name}")
        return rows(frame)

    def listed(self, frame: pl.DataFrame, path: str) -> list[Any]:
        """`rows` of a list that is itself explained where it is empty."""
        if not frame.height:
            self.say(path)
        return self.rows(frame, path)

    def value(self, value: Any, path: str) -> Any:
        """A single value; explained where it is null."""
        if value is None:
            self.say(path)
        return value

    def to_list(self) -> list[AbsentRow]:
        """`absent` of the document."""
        return [{"path": path, "reason": reason} for path, reason in sorted(self._reasons.items())]
