"""Whose memory is it? Every allocation with its scope, op, category and lifetime; who holds what, and what grows."""

from traceloom.analyze.allocations.answers import Allocations, allocations, answers
from traceloom.analyze.allocations.explained import Explained, explain
from traceloom.analyze.allocations.partitions import BY

__all__ = ["BY", "Allocations", "Explained", "allocations", "answers", "explain"]
