"""One question, one function: from a trace (or a session) to a frozen result whose frames add up."""

from traceloom.analyze.across.across_ranks import across_ranks
from traceloom.analyze.across.imbalance import imbalance
from traceloom.analyze.across.rank_part import rank_part
from traceloom.analyze.across.slow_steps import slow_steps
from traceloom.analyze.answer import answer
from traceloom.analyze.anti_patterns import anti_patterns
from traceloom.analyze.blocking_calls import blocking_calls
from traceloom.analyze.breakdown import gpu_time
from traceloom.analyze.classify import Rule, read_rules
from traceloom.analyze.collective.collectives import collectives, collectives_of
from traceloom.analyze.collective.groups import declared_groups, groups
from traceloom.analyze.collective.matrix import exchanges, matrix
from traceloom.analyze.communication import communication
from traceloom.analyze.compare import Comparison, compare
from traceloom.analyze.compiled import compiled
from traceloom.analyze.copies import copies
from traceloom.analyze.counters import counters
from traceloom.analyze.critical_path import CriticalPath, critical_path
from traceloom.analyze.data_loading import data_loading
from traceloom.analyze.flame import flame
from traceloom.analyze.graph_launches import graph_launches
from traceloom.analyze.host import host
from traceloom.analyze.idle import idle
from traceloom.analyze.inference import inference
from traceloom.analyze.kernel_bound import kernel_bounds
from traceloom.analyze.kernel_efficiency import kernel_efficiency
from traceloom.analyze.kernel_kinds import kernel_kinds
from traceloom.analyze.kernel_shapes import kernel_shapes
from traceloom.analyze.kernels import kernels
from traceloom.analyze.kind_rules import KindRule, read_kind_rules
from traceloom.analyze.launches import launches
from traceloom.analyze.longest_gaps import longest_gaps
from traceloom.analyze.memory import memory
from traceloom.analyze.modules import modules
from traceloom.analyze.operators import operators
from traceloom.analyze.patterns import patterns
from traceloom.analyze.quality import quality
from traceloom.analyze.roofline import roofline
from traceloom.analyze.steps import step_times
from traceloom.analyze.threads import threads
from traceloom.analyze.work_per_step import work_per_step

__all__ = [
    "Comparison",
    "CriticalPath",
    "KindRule",
    "Rule",
    "across_ranks",
    "answer",
    "anti_patterns",
    "blocking_calls",
    "collectives",
    "collectives_of",
    "communication",
    "compare",
    "compiled",
    "copies",
    "counters",
    "critical_path",
    "data_loading",
    "declared_groups",
    "exchanges",
    "flame",
    "gpu_time",
    "graph_launches",
    "groups",
    "host",
    "idle",
    "imbalance",
    "inference",
    "kernel_bounds",
    "kernel_efficiency",
    "kernel_kinds",
    "kernel_shapes",
    "kernels",
    "launches",
    "longest_gaps",
    "matrix",
    "memory",
    "modules",
    "operators",
    "patterns",
    "quality",
    "rank_part",
    "read_kind_rules",
    "read_rules",
    "roofline",
    "slow_steps",
    "step_times",
    "threads",
    "work_per_step",
]
