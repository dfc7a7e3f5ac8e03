"""One question, one function: from a trace (or a session) to a frozen result whose frames add up.

Each name is loaded when it is first used: a report of one question does not load the code of all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

lazy(
    __name__,
    {
        "across_ranks": ".across.across_ranks",
        "answer": ".answer",
        "anti_patterns": ".anti_patterns",
        "blocking_calls": ".blocking_calls",
        "collectives": ".collective.collectives",
        "collectives_of": ".collective.collectives",
        "communication": ".communication",
        "compare": ".compare",
        "Comparison": ".compare",
        "compiled": ".compiled",
        "copies": ".copies",
        "counters": ".counters",
        "critical_path": ".critical_path",
        "CriticalPath": ".critical_path",
        "data_loading": ".data_loading",
        "declared_groups": ".collective.groups",
        "exchanges": ".collective.matrix",
        "flame": ".flame",
        "gpu_time": ".breakdown",
        "graph_launches": ".graph_launches",
        "groups": ".collective.groups",
        "host": ".host",
        "idle": ".idle",
        "imbalance": ".across.imbalance",
        "inference": ".inference",
        "kernel_bounds": ".kernel_bound",
        "kernel_efficiency": ".kernel_efficiency",
        "kernel_kinds": ".kernel_kinds",
        "kernel_launches": ".kernel_launches",
        "kernel_shapes": ".kernel_shapes",
        "kernels": ".kernels",
        "KindRule": ".kind_rules",
        "load_rules": ".kind_rules",
        "launches": ".launches",
        "longest_gaps": ".longest_gaps",
        "matrix": ".collective.matrix",
        "memory": ".memory",
        "modules": ".modules",
        "operators": ".operators",
        "patterns": ".patterns",
        "quality": ".quality",
        "rank_part": ".across.rank_part",
        "read_kind_rules": ".kind_rules",
        "read_rules": ".classify",
        "roofline": ".roofline",
        "Rule": ".classify",
        "slow_steps": ".across.slow_steps",
        "step_times": ".steps",
        "threads": ".threads",
        "work_per_step": ".work_per_step",
    },
)

if TYPE_CHECKING:
    from traceloom.analyze.across.across_ranks import across_ranks as across_ranks
    from traceloom.analyze.across.imbalance import imbalance as imbalance
    from traceloom.analyze.across.rank_part import rank_part as rank_part
    from traceloom.analyze.across.slow_steps import slow_steps as slow_steps
    from traceloom.analyze.answer import answer as answer
    from traceloom.analyze.anti_patterns import anti_patterns as anti_patterns
    from traceloom.analyze.blocking_calls import blocking_calls as blocking_calls
    from traceloom.analyze.breakdown import gpu_time as gpu_time
    from traceloom.analyze.classify import Rule as Rule
    from traceloom.analyze.classify import read_rules as read_rules
    from traceloom.analyze.collective.collectives import collectives as collectives
    from traceloom.analyze.collective.collectives import collectives_of as collectives_of
    from traceloom.analyze.collective.groups import declared_groups as declared_groups
    from traceloom.analyze.collective.groups import groups as groups
    from traceloom.analyze.collective.matrix import exchanges as exchanges
    from traceloom.analyze.collective.matrix import matrix as matrix
    from traceloom.analyze.communication import communication as communication
    from traceloom.analyze.compare import Comparison as Comparison
    from traceloom.analyze.compare import compare as compare
    from traceloom.analyze.compiled import compiled as compiled
    from traceloom.analyze.copies import copies as copies
    from traceloom.analyze.counters import counters as counters
    from traceloom.analyze.critical_path import CriticalPath as CriticalPath
    from traceloom.analyze.critical_path import critical_path as critical_path
    from traceloom.analyze.data_loading import data_loading as data_loading
    from traceloom.analyze.flame import flame as flame
    from traceloom.analyze.graph_launches import graph_launches as graph_launches
    from traceloom.analyze.host import host as host
    from traceloom.analyze.idle import idle as idle
    from traceloom.analyze.inference import inference as inference
    from traceloom.analyze.kernel_bound import kernel_bounds as kernel_bounds
    from traceloom.analyze.kernel_efficiency import kernel_efficiency as kernel_efficiency
    from traceloom.analyze.kernel_kinds import kernel_kinds as kernel_kinds
    from traceloom.analyze.kernel_launches import kernel_launches as kernel_launches
    from traceloom.analyze.kernel_shapes import kernel_shapes as kernel_shapes
    from traceloom.analyze.kernels import kernels as kernels
    from traceloom.analyze.kind_rules import KindRule as KindRule
    from traceloom.analyze.kind_rules import load_rules as load_rules
    from traceloom.analyze.kind_rules import read_kind_rules as read_kind_rules
    from traceloom.analyze.launches import launches as launches
    from traceloom.analyze.longest_gaps import longest_gaps as longest_gaps
    from traceloom.analyze.memory import memory as memory
    from traceloom.analyze.modules import modules as modules
    from traceloom.analyze.operators import operators as operators
    from traceloom.analyze.patterns import patterns as patterns
    from traceloom.analyze.quality import quality as quality
    from traceloom.analyze.roofline import roofline as roofline
    from traceloom.analyze.steps import step_times as step_times
    from traceloom.analyze.threads import threads as threads
    from traceloom.analyze.work_per_step import work_per_step as work_per_step
