"""What stands in each frame of a trace, over all generations of writers."""

from __future__ import annotations

import json

import polars as pl
import pytest

from support.strategies import GENERATIONS
from traceloom.errors import InputError, UsageError
from traceloom.formats import arguments, read_kineto
from traceloom.formats.kineto_fields import convert_double_times, needs_text, parse_text_times
from traceloom.formats.links import classify_collective, get_element_size
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import SCHEMAS
from traceloom.trace.vocabulary import copy_kind, parse_memory_kinds


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_gives_the_same_trace(generation):
    made = TraceBuilder(generation=generation).step(3, 0, 100)
    made.op("aten::mm", 10, 20, shapes=[[2, 3], [3, 4]]).launch(
        "cudaLaunchKernel", 12, 5, correlation=7
    )
    made.kernel("gemm", 30, 40, correlation=7).copy(
        "Memcpy HtoD (Pageable -> Device)", 80, 5, bytes=64, correlation=8
    )
    trace = made.build()
    assert trace.events["category"].to_list() == ["annotation", "op", "runtime", "kernel", "copy"]
    assert trace.events["launch"].to_list() == [None, None, None, 2, None]
    assert trace.events["op"].to_list() == [None, None, 1, 1, None]
    assert trace.events["step"].to_list() == [3, 3, 3, 3, None]
    assert trace.events["parent"].to_list() == [None, 0, 1, None, None]
    assert trace.tensors["shapes"].to_list() == ["[[2,3],[3,4]]"]
    assert trace.copies.rows() == [(4, "HtoD", 64, "pageable", "device")]
    assert trace.flows.filter(pl.col("flow") == 7).rows() == [("launch", 7, 2, 3)]
    assert trace.steps.rows() == [(3, "ProfilerStep#3", 0, 100_000, "profiler-step", True)]
    assert [n.slug for n in trace.notices] == ["orphan-work"]


def test_an_empty_trace_has_all_frames():
    trace = TraceBuilder().build()
    assert {name: frame.schema for name, frame in trace.frames().items()} == SCHEMAS
    assert "no-events" in [n.slug for n in trace.notices]


def test_lanes_are_named_for_people():
    made = TraceBuilder(process=100)
    made.op("aten::mm", 0, 1, thread=100).op(
        "autograd::engine::evaluate_function: MmBackward0", 2, 1, thread=101
    )
    made.op("aten::to", 4, 1, thread=102).annotation("gloo:all_reduce", 5, 1, thread=103)
    made.thread_name(102, "thread 102 (python)").thread_name(103, "thread 103 (pt_gloo_runloop)")
    made.kernel("gemm", 6, 1, stream=7).gpu_annotation("fwd", 6, 1, stream=7).sync(
        "Stream Sync", 7, 1, stream=7
    )
    names = made.build().lanes.select("kind", "name").rows()
    assert names == [
        ("host", "main thread"),
        ("host", "autograd 101"),
        ("host", "thread 102"),
        ("host", "pt_gloo_runloop 103"),
        ("device", "stream 7"),
        ("device_annotation", "stream 7 annotations"),
        ("device_sync", "stream 7 syncs"),
    ]


def test_devices_in_use_but_not_listed_have_a_row_without_a_name():
    trace = TraceBuilder(device_name="", devices=2).kernel("gemm", 0, 1, device=5).build()
    assert trace.devices.select("device", "name", "used").rows() == [
        (0, None, False),
        (1, None, False),
        (5, None, True),
    ]


def test_groups_are_read_from_lists_and_text_and_cut_ones_are_null():
    made = TraceBuilder().group("0", [0, 1], description="dp")
    info = made.header()["distributedInfo"]
    info["pg_config"].append({"pg_name": "1", "pg_size": 2, "ranks": "[0, 1]"})
    info["pg_config"].append({"pg_name": "2", "pg_size": 64, "ranks": "[0, 1, ...]"})
    trace = made.metadata(distributedInfo=info).op("aten::mm", 0, 1)
    groups = read_text(trace).groups
    assert groups.select("group", "size", "ranks").rows() == [
        ("0", 2, [0, 1]),
        ("1", 2, [0, 1]),
        ("2", 64, None),
    ]


def read_text(made: TraceBuilder):
    header = made.header() | {
        key: value for key, value in made._header.items() if key == "distributedInfo"
    }
    made.header = lambda: header  # type: ignore[method-assign]
    return made.build()


def test_marks_make_steps_and_the_last_one_closes():
    trace = (
        TraceBuilder()
        .mark(5, 10)
        .op("aten::mm", 11, 4)
        .mark(6, 20)
        .op("aten::mm", 21, 4)
        .mark(7, 30)
        .build()
    )
    assert trace.steps.select("step", "start_ns", "end_ns", "evidence").rows() == [
        (5, 10_000, 20_000, "mark"),
        (6, 20_000, 30_000, "mark"),
    ]
    ops = trace.events.filter(pl.col("category") == "op")
    assert ops["step"].to_list() == [5, 6]


def test_the_most_regular_annotation_makes_steps_where_nothing_else_does():
    made = TraceBuilder()
    for number in range(5):
        made.annotation(f"iteration {number}", number * 100, 90).annotation(
            "Optimizer.step#SGD.step", number * 100 + 60, 20
        )
        made.gpu_annotation("everything", number * 100, 99)
    trace = made.annotation("odd one", 3, 4).build()
    assert trace.steps["evidence"].unique().to_list() == ["annotation"]
    assert trace.steps.select("step", "name", "start_ns").rows()[1] == (1, "iteration 1", 100_000)
    assert trace.steps["end_ns"].to_list() == [100_000, 200_000, 300_000, 400_000, 490_000]
    assert "steps-from-annotation" in [n.slug for n in trace.notices]


@pytest.mark.parametrize(
    ("begun_ns", "whole"), [(0, True), (40, False)], ids=["with a step", "within one"]
)
def test_steps_that_accumulate_gradients_end_with_the_optimizer(begun_ns: int, whole: bool):
    made = TraceBuilder()
    for number in range(4):
        for part in (0, 40):
            if number or part >= begun_ns:
                at = number * 100 + part
                made.annotation("DistributedDataParallel.forward", at, 20).op(
                    "aten::mm", at + 1, 10
                )
        made.annotation("Optimizer.step#AdamW.step", number * 100 + 85, 10)
    trace = made.annotation(
        "DistributedDataParallel.forward", 400, 20
    ).build()  # of a step that is not there
    assert trace.steps["end_ns"].to_list() == [95_000, 195_000, 295_000, 395_000]
    assert trace.steps["start_ns"].to_list() == [begun_ns * 1_000, 95_000, 195_000, 295_000]
    assert trace.steps["complete"].to_list() == [whole, True, True, True]
    assert "steps-from-annotation" in [n.slug for n in trace.notices]


def test_step_numbers_that_repeat_are_numbered_anew():
    trace = TraceBuilder().step(3, 0, 10).step(3, 20, 10).build()
    assert trace.steps["step"].to_list() == [0, 1]
    assert [n.slug for n in trace.notices] == ["renumbered-steps"]


def test_of_two_launch_rows_with_one_correlation_the_outermost_is_taken():
    made = TraceBuilder().launch("cudaLaunchKernel", 10, 10, correlation=1)
    made.launch("cuLaunchKernel", 12, 5, correlation=1, driver=True).kernel(
        "gemm", 30, 5, correlation=1
    )
    trace = made.build()
    assert trace.events["name"][trace.events["launch"][2]] == "cudaLaunchKernel"


def test_a_graph_launch_owns_all_its_kernels():
    made = TraceBuilder().launch("cudaGraphLaunch", 0, 5, correlation=1)
    for number in range(100):
        made.kernel("gemm", 10 + number, 1, correlation=1)
    assert made.build().gpu_work()["launch"].to_list() == [0] * 100


def test_external_ids_name_the_op_where_there_is_no_launch():
    made = TraceBuilder().op("aten::mm", 0, 5, external_id=77)
    made.kernel("gemm", 3, 5, correlation=9, **{"External id": 77})
    assert made.build().events["op"].to_list() == [None, 0]


def test_forward_backward_arrows_end_at_ops():
    made = (
        TraceBuilder()
        .op("aten::mm", 10, 5, sequence=4)
        .op("MmBackward0", 50, 5, thread=2, sequence=4, forward_thread=1)
    )
    trace = (
        made.forward_backward(1, 10, 50, backward_thread=2)
        .forward_backward(2, 99, 50, backward_thread=2)
        .build()
    )
    assert trace.flows.rows() == [("forward-backward", 1, 0, 1), ("forward-backward", 2, None, 1)]
    assert trace.events.select("sequence", "forward_thread").rows() == [(4, 0), (4, 1)]


def test_collectives_of_ops_kernels_and_annotations_are_described():
    made = TraceBuilder().collective(
        "_allgather_base", 0, 5, elements=100, element_type="BFloat16", Rank=0, Seq=9
    )
    made.kernel(
        "ncclDevKernel_AllGather",
        6,
        5,
        **made.collective_args("_allgather_base", "0", 2, 100, "BFloat16"),
    )
    made.annotation("nccl:all_reduce", 20, 5, **{"Input Dims": [[4, 5]], "Input type": ["float"]})
    made.annotation("nccl:send 0->3", 30, 5)
    rows = (
        made.build()
        .collectives.select("event", "kind", "element_type", "in_bytes", "sequence", "peer")
        .rows()
    )
    assert rows == [
        (0, "all_gather", "BFloat16", 200, 9, None),
        (1, "all_gather", "BFloat16", 200, None, None),
        (2, "all_reduce", "float", 80, None, None),
        (3, "send", None, None, None, 3),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("broadcast_oop", "broadcast"),
        ("reduce", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("barrier", "barrier"),
        ("send", "send"),
        ("recvAnySource", "recv"),
        ("wait", "wait"),
    ],
)
def test_collective_kinds_of_all_spellings(name, kind):
    assert classify_collective(name) == kind


def test_element_sizes():
    sizes = {
        "Float": 4,
        "BFloat16": 2,
        "Half": 2,
        "Char": 1,
        "Float8_e4m3fn": 1,
        "long int": 8,
        "c10::BFloat16": 2,
        "X": None,
    }
    assert {name: get_element_size(name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "argument", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", None, "HtoD"),
        ("Memcpy DtoH (Device -> Pinned)", None, "DtoH"),
        ("Memcpy PtoP (Device -> Device)", None, "PtoP"),
        ("CopyHostToDevice", None, "HtoD"),
        ("MEMORY_COPY_DEVICE_TO_HOST", None, "DtoH"),
        ("__amd_rocclr_copyBuffer.kd", None, "DtoD"),
        ("__amd_rocclr_fillBufferAligned", None, "fill"),
        ("zeCommandListAppendMemoryCopy(M2D)", None, "HtoD"),
        ("Memcpy", "8", "DtoD"),
        ("Memcpy", "HtoD", "HtoD"),
        ("Memcpy", None, "unknown"),
    ],
)
def test_copy_kinds_of_all_vendors(name, argument, kind):
    assert copy_kind(name, argument) == kind


def test_memory_kinds_come_from_the_name_or_the_arguments():
    assert parse_memory_kinds("Memcpy HtoD (Pinned -> Device)") == ("pinned", "device")
    assert parse_memory_kinds("Memcpy", "1", "Device") == ("pageable", "device")
    assert parse_memory_kinds("Memcpy") == (None, None)


def test_kernels_tell_how_they_fill_the_device_whatever_stands_there():
    made = TraceBuilder().kernel("bare", 0, 1)
    made.kernel(
        "full", 2, 1, **{"blocks per SM": 1.5, "warps per SM": 12, "est. achieved occupancy %": 40}
    )
    made.kernel(
        "odd",
        4,
        1,
        **{"blocks per SM": [1], "warps per SM": "6", "est. achieved occupancy %": "nan"},
    )
    trace = made.build()
    assert trace.kernels.rows() == [(1, 1.5, 12.0, 40.0), (2, None, 6.0, None)]
    assert not [notice for notice in trace.notices if notice.slug == "odd-values"]


def test_syncs_say_what_was_awaited():
    made = TraceBuilder().sync(
        "Stream Wait Event", 0, 5, stream=20, wait_on_stream=7, wait_on_cuda_event_record_corr_id=3
    )
    made.sync("Context Sync", 6, 5, stream=-1, wait_on_stream=4294967295)
    assert made.build().syncs.rows() == [
        (0, "Stream Wait Event", 20, 7, 3, None),
        (1, "Context Sync", -1, None, None, None),
    ]


def test_allocations_know_their_device_op_and_step():
    made = TraceBuilder().step(1, 0, 100).op("aten::empty", 10, 10)
    made.allocation(12, 512, address=2**64 - 1, total_allocated=512)
    made.allocation(50, -512, address=2**64 - 1, total_allocated=0, device_type=20, device=3)
    made.allocation(60, 8, address=1, total_allocated=8, device_type=99)
    rows = (
        made.build()
        .allocations.select("time_ns", "address", "bytes", "device_type", "device", "op", "step")
        .rows()
    )
    assert rows == [
        (12_000, 2**64 - 1, 512, "cuda", 0, 1, 1),
        (50_000, 2**64 - 1, -512, "privateuseone", 3, None, 1),
        (60_000, 1, 8, "other", 0, None, 1),
    ]


def test_counters_and_marks_are_kept():
    made = (
        TraceBuilder()
        .counter("dram", 5, 0.25)
        .counter("dram", 3, 0.5, key="read")
        .instant("Record Window End", 9)
    )
    trace = made.out_of_memory(7, 1 << 30).build()
    assert trace.counters.rows() == [
        (3_000, "GPU 0 Counters", "dram", "read", 0.5),
        (5_000, "GPU 0 Counters", "dram", "", 0.25),
    ]
    assert trace.marks.select("time_ns", "name", "bytes").rows() == [
        (7_000, "[OutOfMemory]", 1 << 30),
        (9_000, "Record Window End", None),
    ]


def test_unknown_categories_and_phases_are_kept_or_counted():
    made = TraceBuilder().op("aten::mm", 0, 1)
    events = [
        *made.events(),
        '{"ph": "X", "cat": "quantum", "name": "q", "pid": 1, "tid": 1, "ts": 5, "dur": 1}',
        '{"ph": "N"}',
    ]
    made.events = lambda: events  # type: ignore[method-assign]
    trace = made.build()
    assert trace.events["category"].to_list() == ["op", "other"]
    assert {"unknown-category", "unknown-phase"} <= {n.slug for n in trace.notices}


def test_unix_microseconds_with_nanoseconds_are_exact():
    texts = ["1712195495519689.047", "1712195495519689.048", "-0.5", "1e3", '"12.3456"', "NaN", ""]
    start, duration, good, _ = parse_text_times([t.encode() for t in texts], [b"0.953"] * 7)
    assert start[:5].tolist() == [1712195495519689047, 1712195495519689048, -500, 1_000_000, 12_346]
    assert duration[:2].tolist() == [953, 953]
    assert good.tolist() == [True] * 5 + [False] * 2


def test_doubles_are_exact_below_a_quarter_year():
    import numpy as np

    times = [7_889_237_999_999.999, 4_458_676_522_690.655, 0.001, 12.0]
    start, duration, _, _ = convert_double_times(
        np.array(times), np.array([0.001, 156.777, 1.0, 2.5])
    )
    assert start.tolist() == [7_889_237_999_999_999, 4_458_676_522_690_655, 1, 12_000]
    assert duration.tolist() == [1, 156_777, 1_000, 2_500]
    assert not needs_text(b'"ts": 4458676522690.655, "dur": 156.777')
    assert needs_text(b'"ts": 1712195495519689.047, "dur": 63.813')
    assert not needs_text(b'"ts": 1712195495519689, "dur": 63')


def test_doubles_that_are_no_times_are_told_apart_from_their_neighbours():
    import numpy as np

    nan = float("nan")
    found = convert_double_times(
        np.array([nan, 5.001, 1e300, 7.0]), np.array([1.0, nan, 2.0, -3.5])
    )
    start, duration, good, timed = (column.tolist() for column in found)
    assert good == [False, True, False, True]
    assert timed == [True, False, True, True]
    assert start == [0, 5_001, 0, 7_000]
    assert duration == [1_000, 0, 2_000, -3_500]


def test_many_different_lists_of_shapes_stay_apart():
    made = TraceBuilder()
    for number in range(3000):
        made.op(
            "aten::mm",
            number * 10,
            5,
            **{"Input Dims": [[number]], "Input type": [f"kind{number % 7}"]},
        )
    tensors = read_text(made).tensors
    assert tensors["shapes"].to_list() == [f"[[{number}]]" for number in range(3000)]
    assert tensors["types"].to_list() == [f'["kind{number % 7}"]' for number in range(3000)]
    assert tensors["strides"].null_count() == 3000


def test_arguments_are_read_again(tmp_path):
    path = (
        TraceBuilder()
        .op("aten::mm", 5, 1, colour="red")
        .op("aten::add", 2, 1)
        .write(tmp_path / "t.json.gz")
    )
    trace = read_kineto(path)
    assert arguments(trace, 1)["colour"] == "red"
    with pytest.raises(UsageError) as usage:
        arguments(trace, 2)
    assert usage.value.slug == "no-such-event"
    TraceBuilder().op("aten::mul", 5, 1).op("aten::sub", 2, 1).write(path)
    with pytest.raises(InputError) as changed:
        arguments(trace, 1)
    assert changed.value.slug == "changed-file"


def test_lists_of_shapes_are_compact_json():
    trace = TraceBuilder().op("aten::cat", 0, 1, shapes=[[[1, 2], [3]], []]).build()
    assert json.loads(trace.tensors["shapes"][0]) == [[[1, 2], [3]], []]
    assert " " not in trace.tensors["shapes"][0]
