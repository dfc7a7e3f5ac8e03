"""Evaluating a graph: new times from durations and delays."""

from traceloom.retime.calibrate import calibrate, class_delays
from traceloom.retime.law import Law, law
from traceloom.retime.plan import Plan

__all__ = ["Law", "Plan", "calibrate", "class_delays", "law"]
