"""One question, one function: from a trace (or a session) to a frozen result whose frames add up.

Names are loaded on first use, so that one analysis does not load the code of all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.system.lazy_import import lazy

lazy(
    __name__,
    {
        "across_ranks": ".across_ranks",
        "answer": ".answer",
        "anti_patterns": ".anti_patterns",
        "blocking_calls": ".blocking_calls",
        "collectives": ".collectives",
        "collect_session_calls": ".collectives",
        "communication": ".collectives",
        "compare": ".compare",
        "Comparison": ".compare",
        "compiled": ".compiled",
        "copies": ".copies",
        "counters": ".kernel_efficiency",
        "critical_path": ".critical_path",
        "CriticalPath": ".critical_path",
        "data_loading": ".data_loading",
        "declared_groups": ".groups",
        "exchanges": ".groups",
        "flame": ".flame",
        "gpu_time": ".gpu_time",
        "graph_launches": ".graph_launches",
        "groups": ".groups",
        "host": ".host_time",
        "idle": ".idle",
        "imbalance": ".across_ranks",
        "inference": ".inference",
        "kernel_bounds": ".kernel_efficiency",
        "kernel_efficiency": ".kernel_efficiency",
        "kernel_kinds": ".kernel_kinds",
        "kernel_launches": ".kernels",
        "kernel_shapes": ".kernels",
        "kernels": ".kernels",
        "KindRule": ".kernel_rules",
        "load_rules": ".kernel_rules",
        "launches": ".launches",
        "longest_gaps": ".idle",
        "matrix": ".groups",
        "memory": ".memory",
        "modules": ".modules",
        "operators": ".kernels",
        "patterns": ".patterns",
        "quality": ".quality",
        "summarize_rank": ".rank_summary",
        "read_kind_rules": ".kernel_rules",
        "read_rules": ".kernel_rules",
        "roofline": ".roofline",
        "Rule": ".kernel_rules",
        "slow_steps": ".across_ranks",
        "step_times": ".steps",
        "threads": ".host_time",
        "work_per_step": ".kernels",
    },
)

if TYPE_CHECKING:
    from traceloom.analyze.across_ranks import (
        across_ranks as across_ranks,
        imbalance as imbalance,
        slow_steps as slow_steps,
    )
    from traceloom.analyze.answer import answer as answer
    from traceloom.analyze.anti_patterns import anti_patterns as anti_patterns
    from traceloom.analyze.blocking_calls import blocking_calls as blocking_calls
    from traceloom.analyze.collectives import (
        collect_session_calls as collect_session_calls,
        collectives as collectives,
        communication as communication,
    )
    from traceloom.analyze.compare import Comparison as Comparison, compare as compare
    from traceloom.analyze.compiled import compiled as compiled
    from traceloom.analyze.copies import copies as copies
    from traceloom.analyze.critical_path import (
        CriticalPath as CriticalPath,
        critical_path as critical_path,
    )
    from traceloom.analyze.data_loading import data_loading as data_loading
    from traceloom.analyze.flame import flame as flame
    from traceloom.analyze.gpu_time import gpu_time as gpu_time
    from traceloom.analyze.graph_launches import graph_launches as graph_launches
    from traceloom.analyze.groups import (
        declared_groups as declared_groups,
        exchanges as exchanges,
        groups as groups,
        matrix as matrix,
    )
    from traceloom.analyze.host_time import host as host, threads as threads
    from traceloom.analyze.idle import idle as idle, longest_gaps as longest_gaps
    from traceloom.analyze.inference import inference as inference
    from traceloom.analyze.kernel_efficiency import (
        counters as counters,
        kernel_bounds as kernel_bounds,
        kernel_efficiency as kernel_efficiency,
    )
    from traceloom.analyze.kernel_kinds import kernel_kinds as kernel_kinds
    from traceloom.analyze.kernel_rules import (
        KindRule as KindRule,
        Rule as Rule,
        load_rules as load_rules,
        read_kind_rules as read_kind_rules,
        read_rules as read_rules,
    )
    from traceloom.analyze.kernels import (
        kernel_launches as kernel_launches,
        kernel_shapes as kernel_shapes,
        kernels as kernels,
        operators as operators,
        work_per_step as work_per_step,
    )
    from traceloom.analyze.launches import launches as launches
    from traceloom.analyze.memory import memory as memory
    from traceloom.analyze.modules import modules as modules
    from traceloom.analyze.patterns import patterns as patterns
    from traceloom.analyze.quality import quality as quality
    from traceloom.analyze.rank_summary import summarize_rank as summarize_rank
    from traceloom.analyze.roofline import roofline as roofline
    from traceloom.analyze.steps import step_times as step_times
