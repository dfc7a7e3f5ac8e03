"""Analyses: pure functions from a trace (or session) to a frozen result. One module per question."""

from traceloom.analyze.breakdown import GpuTime, gpu_time
from traceloom.analyze.classify import Rule, read_rules
from traceloom.analyze.communication import Communication, communication
from traceloom.analyze.idle import Idle, idle
from traceloom.analyze.kernels import Kernels, kernels
from traceloom.analyze.steps import StepTimes, step_times

__all__ = [
    "Communication",
    "GpuTime",
    "Idle",
    "Kernels",
    "Rule",
    "StepTimes",
    "communication",
    "gpu_time",
    "idle",
    "kernels",
    "read_rules",
    "step_times",
]
