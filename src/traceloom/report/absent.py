"""What a report does not know, and why: every null in the document is explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

_TIMES = ("start_ns", "time_ns", "peak_time_ns")

# Path in the document -> why a value there can be unknown. `[*]` stands for any row.
REASONS = {
    "inputs[*].rank": "the file does not say its rank",
    "inputs[*].world_size": "the file does not say how many ranks the job has",
    "inputs[*].host": "the file does not name its host",
    "ranks[*].rank": "the file does not say its rank",
    "ranks[*].world_size": "the file does not say how many ranks the job has",
    "ranks[*].host_name": "the file does not name its host",
    "ranks[*].devices": "no GPU work was recorded",
    "ranks[*].gpu_account": "no GPU work was recorded",
    "ranks[*].gpu_account.devices[*].name": "the file does not name the device",
    "answer.step_ns": "no trace marks steps that last",
    "ranks[*].devices[*].name": "the file does not name the device",
    "ranks[*].steps": "the trace marks no steps",
    "ranks[*].steps[*].devices[*].name": "the file does not name the device",
    "ranks[*].steps[*].lag_ns": "the step launched no GPU work",
    "ranks[*].host.threads": "no host events were recorded",
    "ranks[*].host.threads[*].process": "the file does not number this process",
    "ranks[*].host.threads[*].thread": "the file does not number this thread",
    "ranks[*].host.account[*].step": "null is the time outside all steps",
    "ranks[*].step_times": "the trace marks no steps",
    "ranks[*].step_times.spread_fraction": "the median step has no length",
    "kernels": "no GPU work was recorded",
    "kernels[*].rule": "no rule is needed to tell what it is",
    "operators": "no framework operators were recorded",
    "operators[*].shapes": "not counted apart by shape (ask with --by-shape), or shapes were not recorded",
    "operators[*].device_ns": "no GPU work was recorded",
    "operators[*].self_device_ns": "no GPU work was recorded",
    "operators[*].kernel_count": "no GPU work was recorded",
    "modules": "neither Python stacks nor module annotations were recorded",
    **{
        f"modules[*].{part}_{name}": "no backward pass was recorded, or its operators are not linked to their forward"
        for part in ("backward", "recompute")
        for name in ("count", "host_ns", "self_host_ns", "device_ns", "self_device_ns", "kernel_count")
    },
    **{
        f"modules[*].{how}_all_{what}_ns": "the trace holds no whole step, or the region is in none"
        for how in ("mean", "min", "max")
        for what in ("host", "device")
    },
    "modules[*].step_count": "the trace holds no whole step, or the region is in none",
    "modules[*].parent": "null is the root",
    "modules[*].rank": "the file does not say its rank",
    "communication.collectives": "no collective communication was recorded",
    "communication.collectives[*].kind": "neither the arguments nor the name of the kernel say what it does",
    "communication.collectives[*].group": "the recording does not say which group communicates",
    "communication.collectives[*].group_description": "the group has no description",
    "communication.collectives[*].group_size": "the recording does not say how many ranks communicate",
    "communication.collectives[*].element_type": "the recording does not say the element type",
    "communication.collectives[*].bytes": "the recording does not say how much is sent",
    "communication.collectives[*].exposed_ns": "only communication on a device can overlap its compute",
    "communication.ranks[*].rank": "the file does not say its rank",
    "memory.devices": "allocations were not recorded (record with --memory, or profile_memory=True)",
    "memory.devices[*].start_bytes": "the allocator's own total was not recorded",
    "memory.devices[*].end_bytes": "the allocator's own total was not recorded",
    "memory.devices[*].peak_bytes": "the allocator's own total was not recorded",
    "memory.devices[*].rank": "the file does not say its rank",
    "memory.curve[*].rank": "the file does not say its rank",
    "memory.curve[*].reserved_bytes[*]": "the allocator does not say what it has reserved",
    "data_loading": "no data loader was recorded",
    "data_loading.waits[*].rank": "the file does not say its rank",
    "data_loading.waits[*].thread": "the file does not number this thread",
    "data_loading.waits[*].maker": "neither the name of the call nor the Python frames say who makes the batch",
    "data_loading.waits[*].gpu_idle_ns": "no GPU work was recorded",
    "data_loading.steps[*].gpu_idle_ns": "no GPU work was recorded, or no loader in this step",
    "data_loading.steps[*].bottleneck": "no loader was recorded in this step",
    "data_loading.spent[*].rank": "the file does not say its rank",
    "data_loading.spent[*].step": "null is the time outside all steps",
    "data_loading.steps[*].wait_ns": "no loader was recorded in this step",
    "data_loading.steps[*].fraction": "no loader was recorded in this step",
    "data_loading.waits[*].step": "null is the time outside all steps",
    "data_loading.steps[*].rank": "the file does not say its rank",
    "data_loading.steps[*].step": "null is the time outside all steps",
    "notices[*].rank": "the notice is about the whole run, or the file does not say its rank",
    "capture": "the run was not recorded by `traceloom record`",
    "findings": "no rule found anything that is worth half a per cent of the step",
    "findings[*].saving_ns": "it is about memory, not time",
    "findings[*].saving_fraction": "it is about memory, not time",
    "findings[*].alone_ns": "it is about memory, not time",
    "findings[*].saving_low_ns": "it is about memory, or only one step was looked at",
    "findings[*].saving_high_ns": "it is about memory, or only one step was looked at",
    "findings[*].saving_bytes": "it is about time, or only a risk",
    "findings[*].risk": "nothing fails because of it",
    "findings[*].evidence[*].rank": "the file does not say its rank",
    "findings[*].evidence[*].start_ns": "it is no single moment",
    "findings[*].evidence[*].duration_ns": "it is no single moment",
    "findings[*].evidence[*].lane": "it is on no lane of its own",
    "findings[*].evidence[*].total_ns": "it is a single thing",
    "findings[*].host_ns": "it is not about what the host does",
    "findings[*].frames": "it is not about what the host does, or no frame holds 5 % of that",
    "findings[*].frames[*].file": "a built-in function is in no file",
    "findings[*].frames[*].line": "a built-in function is in no file",
    "findings[*].frames[*].inside": "nothing that it calls takes half of its time",
    "findings[*].frames[*].inside_ns": "nothing that it calls takes half of its time",
    "findings[*].frames[*].rank": "only one rank was recorded",
    "findings_ground.limit": "savings were evaluated over several steps, or there are no steps",
    "findings_ground.step": "the trace marks no steps: the whole window is looked at",
    "findings_ground.host_ratio": "the cost of recording was not measured",
    "runs[*].world_size": "the files do not say how many ranks the job has",
    "runs[*].window_ns": "the run has no events",
}


class Absent:
    """Collects the reasons while a document is built; a path is explained once."""

    def __init__(self, epoch_ns: int, more: Mapping[str, str] | None = None) -> None:
        self.epoch_ns = epoch_ns
        self._known = {**REASONS, **(more or {})}
        self._reasons: dict[str, str] = {}

    def say(self, path: str, reason: str | None = None) -> None:
        """Explain the unknown or empty value at `path`: by `reason`, else by what is known of the path."""
        self._reasons.setdefault(path, reason or self._known.get(path, "the trace does not say"))

    def rows(self, frame: pl.DataFrame, path: str) -> list[dict[str, Any]]:
        """The rows of a frame as they stand at `path` of the document: times relative, each null column explained."""
        times = [name for name in frame.columns if name in _TIMES]
        frame = frame.with_columns(pl.col(times) - self.epoch_ns) if times else frame
        for name in frame.columns:
            if frame[name].null_count():
                self.say(f"{path}[*].{name}")
        return frame.to_dicts()

    def listed(self, frame: pl.DataFrame, path: str) -> list[dict[str, Any]]:
        """`rows` of a list that is itself explained where it is empty."""
        if not frame.height:
            self.say(path)
        return self.rows(frame, path)

    def value(self, value: Any, path: str) -> Any:
        """A single value; explained where it is null."""
        if value is None:
            self.say(path)
        return value

    def to_list(self) -> list[dict[str, str]]:
        """`absent` of the document."""
        return [{"path": path, "reason": reason} for path, reason in sorted(self._reasons.items())]
