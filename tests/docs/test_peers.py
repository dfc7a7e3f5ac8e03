"""The page that maps other tools to ours: complete, and every command, call and test in it exists."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

from traceloom import analyze
from traceloom.cli import VERBS
from traceloom.report.sections import CORE, load_extra_sections

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "peers.md"

# What HTA 0.5.0 and 0.6.1 offer on `TraceAnalysis`.
HTA = re.findall(
    r"\w+",
    """
critical_path_analysis generate_trace_with_counters get_aten_op_kernels_and_delay get_comm_comp_overlap
get_cuda_kernel_launch_stats get_cupti_counter_data_with_operators get_frequent_cuda_kernel_sequences
get_gpu_kernel_breakdown get_gpu_kernels_with_user_annotations get_gpu_user_annotation_breakdown
get_idle_time_breakdown get_memory_bw_summary get_memory_bw_time_series get_potential_stragglers get_profiler_steps
get_queue_length_summary get_queue_length_summary_from_time_series get_queue_length_time_series
get_temporal_breakdown get_time_spent_blocked_on_full_queue overlay_critical_path_analysis
""",
)

# What TraceLens 1.0.0 installs as commands, and the sheets that these write.
COMMANDS = re.findall(
    r"\w+",
    """
compare_perf_reports_pytorch generate_multi_rank_collective_report_pytorch generate_perf_report_genesis
generate_perf_report_jax generate_perf_report_pftrace_hip_activity generate_perf_report_pftrace_hip_api
generate_perf_report_pftrace_memory_copy generate_perf_report_pytorch generate_perf_report_pytorch_inference
generate_perf_report_rocprof split_inference_trace
""",
)
SHEETS = re.findall(
    r"\w+",
    """
coll_analysis df_xla_perf diff_stats gpu_events_averages gpu_timeline kernel_details kernel_launchers
kernel_launchers_summary kernel_launchers_summary_by_category kernel_launchers_unique_args kernel_summary
kernel_summary_by_category nccl_all2allv nccl_all2allv_heatmap nccl_implicit_sync nccl_long nccl_summary_all2allv
nccl_summary_implicit_sync nccl_summary_long ops_summary ops_summary_by_category ops_unique_args
ops_unique_args_kl_overlap short_kernel_histogram short_kernels_summary straggler_summary unified_perf_summary
unified_perf_summary_kl_overlap xla_summary
""",
)


def rows() -> list[tuple[str, str, str]]:
    """(theirs, ours, test) of every row of every table."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = (
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            if line.startswith("|")
            else []
        )
        if len(cells) == 3 and cells[0] not in {"theirs", "---"}:
            found.append((cells[0], cells[1], cells[2]))
    return found


@lru_cache(maxsize=64)
def _names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_nothing_of_theirs_is_left_out() -> None:
    named = "".join(theirs for theirs, _, _ in rows())
    names = [*HTA, *(f"TraceLens_{command}" for command in COMMANDS), *SHEETS]
    assert [name for name in names if f"`{name}`" not in named] == []


def test_every_row_has_a_test_that_exists_or_says_why_not() -> None:
    assert [
        theirs for theirs, ours, test in rows() if not test and not ours.startswith("no: ")
    ] == []
    missing = []
    for _, _, test in rows():
        for place in re.findall(r"`([^`]+)`", test):
            path, _, name = place.partition("::")
            if not (ROOT / "tests" / path).is_file() or name not in _names_in(
                ROOT / "tests" / path
            ):
                missing.append(place)
    assert missing == []


def test_every_call_section_and_command_exists() -> None:
    known = {section.key for section in load_extra_sections()} | {CORE}
    for _, ours, _ in rows():
        assert ours
        assert all(hasattr(analyze, name) for name in re.findall(r"`analyze\.(\w+)`", ours)), ours
        assert {
            key for keys in re.findall(r"--only ([a-z_,]+)", ours) for key in keys.split(",")
        } <= known, ours
        assert set(re.findall(r"`traceloom ([a-z]+)", ours)) <= set(VERBS), ours
