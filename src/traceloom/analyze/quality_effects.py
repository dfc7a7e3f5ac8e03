"""Which results a finding about the capture weakens, and how."""

from __future__ import annotations

from typing import TypedDict

_LAUNCHES = "delays and queue depths leave such work out"
_DEVICE = "device time of operators is too small by this work"
_NO_OWNER = "rows without operator"

EFFECTS: dict[str, dict[str, str]] = {
    "orphan-work": {
        "ranks[*].idle": "gaps before such work have no launch to explain them",
        "operators": _DEVICE,
        "modules": "device time of modules is too small by this work",
        "kernel_shapes": _NO_OWNER,
        "kinds": "where a name alone is ambiguous the kind is a guess: optimizer work counts as elementwise",
        "roofline": "such work has no model",
        "launches": _LAUNCHES,
        "per_step": "such work belongs to no step",
        "critical_path": "nothing on the host leads to such work",
    },
    "gpu-work-missing": {
        "ranks[*].devices": "GPU time is unknown, not zero",
        "kernels": "there is none to show",
        "operators": "device time is unknown",
        "answer": "it can only speak of the host",
    },
    "busy-before-window": {
        "ranks[*].idle": "what the GPU did there is unknown, not idle",
        "answer": "the GPU was busier than it says",
        "findings": "no fix saves that time",
        "critical_path": "that time is taken as given",
    },
    "launches-without-work": {
        "ranks[*].devices": "busy time is too small, idle time too large",
        "ranks[*].idle": "gaps may hold work that was not recorded",
        "kernels": "counts and sums are too small",
        "kinds": "sums are too small",
        "operators": _DEVICE,
        "launches": "queues seem to empty too late: such work never starts",
    },
    "gpu-work-before-launch": {
        "ranks[*].idle": "causes compare the clocks of host and GPU: off by as much",
        "launches": "delays are off by as much; negative ones count as 0",
        "critical_path": "edges between host and GPU are off by as much",
    },
    "overlapping-gpu-work": {
        "kernels": "sums exceed the time that passed",
        "kinds": "sums exceed exclusive times, which are right",
        "operators": "device times exceed the time that passed",
        "roofline": "kernels that share the GPU seem slower than they are",
    },
    "instant-gpu-work": {
        "kernels": "counts hold such work, sums do not",
        "copies": "such copies are in no bandwidth",
        "roofline": "such work seems free",
    },
    "unpaired-counters": {"counters": "operators of the counters are unknown"},
    "waits-without-record": {
        "critical_path": "dependencies between streams are guessed from order",
        "ranks[*].idle": "waits for another stream may have another cause",
    },
    "syncs-while-running": {"critical_path": "what the host waited for there is uncertain"},
    "waits-for-unknown-record": {
        "critical_path": "dependencies between streams are incomplete",
        "ranks[*].idle": "waits for another stream may have another cause",
    },
    "no-operators": {
        "operators": "there are none",
        "modules": "there are none",
        "kernel_shapes": _NO_OWNER,
        "kinds": "names alone decide",
        "roofline": "nothing has a model",
        "ranks[*].host": "phases and activities are unknown",
    },
    "missing-shapes": {
        "kernel_shapes": "all shapes of an operator share a row",
        "kinds": "bounds are unknown",
        "roofline": "nothing has a model",
        "operators": "not distinguished by size",
    },
    "operators-left-out": {
        "operators": "most are missing",
        "ranks[*].host": "time between operators may be that of operators that are not in the file",
        "ranks[*].idle": "idle time may be that of work that is not in the file",
    },
    "missing-stacks": {
        "modules": "only annotations name modules",
        "ranks[*].host": "time between operators is unobserved",
        "ranks[*].idle": "gaps that Python causes show as unobserved",
    },
    "crossing-spans": {
        "operators": "host times of cut events are too small",
        "ranks[*].host": "the cut time counts for whoever follows",
    },
    "negative-duration": {"kernels": "such events count as 0", "operators": "such events count as 0"},
    "absurd-duration": {
        "answer": "the window is wrong, and so is every share of it",
        "ranks[*].devices": "the window is wrong, and so is every share of it",
        "kernels": "totals are wrong",
        "operators": "totals are wrong",
    },
    "unknown-category": {"answer": "such events are counted nowhere"},
    "profiler-overhead": {
        "ranks[*].host": "this time is the profiler's",
        "ranks[*].idle": "some idle time is the profiler's",
        "ranks[*].step_times": "steps in which it falls are too long",
    },
    "collectives-without-details": {"communication": "bytes, groups and bandwidths are unknown"},
    "ambiguous-backward": {"modules": "the backward time of such operators may stand with another module"},
    "no-steps": {
        "ranks[*].steps": "there are none",
        "per_step": "there is no usual step",
        "kinds": "no spread over steps",
        "critical_path": "the whole recording is one step",
    },
    "warm-up-step": {
        "ranks[*].step_times": "means are too large; medians are right",
        "per_step": "means and maxima are too large",
    },
    "uneven-steps": {"per_step": "the mean step stands for none", "ranks[*].step_times": "the spread is wide"},
    "cut-steps": {"ranks[*].step_times": "cut steps are left out", "per_step": "cut steps are left out"},
    "rank-unknown": {"communication": "ranks cannot be compared", "critical_path": "other ranks are unseen"},
    "rank-outside-world": {"communication": "ranks cannot be matched", "critical_path": "ranks cannot be matched"},
    "recording-cost": {
        "ranks[*].step_times": "steps are too long by that",
        "ranks[*].idle": "some idle time is the recording's",
        "ranks[*].host": "times are too long by that",
    },
    "coarse-clock": {
        "kernels": "times of short kernels are rounded",
        "operators": "times of short operators are rounded",
        "copies": "bandwidths of short copies are rounded, or missing where the duration is 0",
        "ranks[*].idle": "short gaps are rounded",
    },
    "cut-file": {
        "ranks[*].devices": "the end of the recording is missing",
        "ranks[*].steps": "the last steps may be missing",
    },
    "cut-gzip": {
        "ranks[*].devices": "the end of the recording is missing",
        "ranks[*].steps": "the last steps may be missing",
    },
    "corrupt-gzip": {"ranks[*].devices": "what follows the damage is missing"},
    "lost-events": {"kernels": "counts and sums may be too small", "operators": "counts and sums may be too small"},
    "missing-ranks": {
        "communication": "what the missing ranks did is unseen",
        "critical_path": "other ranks are unseen",
    },
    "duplicate-rank": {"communication": "ranks cannot be matched"},
}
"""Slug of a notice -> part of the report -> what is weaker there."""


class Effect(TypedDict):
    """What a notice weakens: a part of the document, and how."""

    part: str
    how: str


def affected(slug: str) -> list[Effect]:
    """What a notice weakens, as it stands in report JSON: `part` of the document and `how`; empty for nothing."""
    return [{"part": part, "how": how} for part, how in EFFECTS.get(slug, {}).items()]
