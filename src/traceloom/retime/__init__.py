"""Evaluating a graph: new times from durations and delays."""

from traceloom.retime.calibrate import calibrate
from traceloom.retime.classes import class_delays
from traceloom.retime.law import Law, law
from traceloom.retime.plan import ABSENT, Plan

__all__ = ["ABSENT", "Law", "Plan", "calibrate", "class_delays", "law"]
