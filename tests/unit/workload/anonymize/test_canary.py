"""Secrets planted in every field of every kind of file: none of them, nor a part, is anywhere in the output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from planting import NUMBER, SECRET, Anonymise, bytes_of, leaks, planted, write_json

from traceloom.formats import read_kineto
from traceloom.formats.chakra.et_pb2 import AttributeProto, GlobalMetadata, Node
from traceloom.formats.chakra.files import EtReader, write
from traceloom.workload.anonymize.policy import Policy

POLICIES = {
    "default": Policy(),
    "shapes kept": Policy(shapes="keep", scalars="keep"),
    "dropped": Policy(shapes="drop", hosts="drop", stacks="drop", devices="drop", versions="drop"),
    "collapsed": Policy(structure="collapse"),
    "for replay": Policy().for_replay(),
}
two = pytest.mark.parametrize(
    "policy", [POLICIES["default"], POLICIES["shapes kept"]], ids=["default", "shapes kept"]
)
everywhere = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)

COLLECTIVE = {
    "External id": 5,
    "Collective name": "allreduce",
    "In msg nelems": 100,
    "Out msg nelems": 100,
    "Group size": 2,
    "dtype": "Float",
    "In split size": "[1, 2]",
    "Out split size": [],
    "Process Group Name": "tp",
    "Process Group Description": "default_pg",
    "Process Group Ranks": "[0, 1]",
    "Rank": 0,
    "Seq": 3,
}
EVENTS: list[dict[str, Any]] = [
    {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 77,
        "tid": 77,
        "ts": 1.5,
        "dur": 2.5,
        "args": {
            "External id": 1,
            "Record function id": 2,
            "Ev Idx": 3,
            "Sequence number": 4,
            "Fwd thread id": 0,
            "Input Dims": [[31337, 77], [77, 5]],
            "Input type": ["float", "c10::Half"],
            "Input Strides": [[77, 1], [5, 1]],
            "Concrete Inputs": ["", "3", "bhqd,bhkd->bhqk", "[1, 2]"],
            "Call stack": "a.py(1): f",
            "kernel_file": "/x/y.py",
            "Module Hierarchy": "net.layer",
            "kernel_backend": "triton",
            "kernel_hash": "abc",
        },
    },
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "## forward ##",
        "pid": 77,
        "tid": 77,
        "ts": 1,
        "dur": 9,
        "args": {"External id": 9},
    },
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#3",
        "pid": 77,
        "tid": 77,
        "ts": 0,
        "dur": 90,
    },
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "nccl:all_reduce",
        "pid": 77,
        "tid": 77,
        "ts": 2,
        "dur": 1,
    },
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "traceloom.scope:part.sub",
        "pid": 77,
        "tid": 77,
        "ts": 2,
        "dur": 1,
    },
    {
        "ph": "X",
        "cat": "cpu_op",
        "name": "autograd::engine::evaluate_function: AddmmBackward0",
        "pid": 77,
        "tid": 78,
        "ts": 2,
        "dur": 1,
    },
    {
        "ph": "X",
        "cat": "cpu_op",
        "name": "record_param_comms",
        "pid": 77,
        "tid": 77,
        "ts": 2,
        "dur": 1,
        "args": COLLECTIVE,
    },
    {
        "ph": "X",
        "cat": "python_function",
        "name": "nn.Module: Linear_3",
        "pid": 77,
        "tid": 77,
        "ts": 2,
        "dur": 1,
        "args": {"Python id": 1, "Python parent id": None, "Python module id": 3},
    },
    {
        "ph": "X",
        "cat": "python_function",
        "name": "torch/optim/adam.py(3): step",
        "pid": 77,
        "tid": 77,
        "ts": 2,
        "dur": 1,
        "args": {"Python id": 2},
    },
    {
        "ph": "X",
        "cat": "python_function",
        "name": "<built-in method acquire of lock>",
        "pid": 77,
        "tid": 77,
        "ts": 2,
        "dur": 1,
    },
    {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 77,
        "tid": 77,
        "ts": 2,
        "dur": 1,
        "args": {"cbid": 211, "correlation": 7, "External id": 1},
    },
    {
        "ph": "X",
        "cat": "kernel",
        "name": "volta_sgemm_128x64",
        "pid": 0,
        "tid": 7,
        "ts": 5,
        "dur": 4,
        "args": {
            "External id": 1,
            "queued": 0,
            "device": 0,
            "context": 1,
            "stream": 7,
            "correlation": 7,
            "grid": [31, 1, 1],
            "block": [128, 1, 1],
            "registers per thread": 32,
            "shared memory": 0,
            "blocks per SM": 0.5,
            "warps per SM": 2.5,
            "est. achieved occupancy %": 12,
        },
    },
    {
        "ph": "X",
        "cat": "kernel",
        "name": "ncclDevKernel_AllReduce",
        "pid": 0,
        "tid": 7,
        "ts": 9,
        "dur": 4,
        "args": COLLECTIVE | {"device": 0, "stream": 7, "correlation": 8},
    },
    {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy HtoD (Pageable -> Device)",
        "pid": 0,
        "tid": 7,
        "ts": 9,
        "dur": 4,
        "args": {
            "bytes": 400,
            "memory bandwidth (GB/s)": 1.5,
            "device": 0,
            "stream": 7,
            "correlation": 9,
            "kind": "HtoD",
        },
    },
    {
        "ph": "X",
        "cat": "cuda_sync",
        "name": "Stream Sync",
        "pid": 0,
        "tid": 7,
        "ts": 9,
        "dur": 4,
        "args": {"cuda_sync_kind": "Stream Sync", "stream": 7, "device": 0},
    },
    {
        "ph": "X",
        "cat": "Trace",
        "name": "PyTorch Profiler (0)",
        "pid": "Spans",
        "tid": "PyTorch Profiler",
        "ts": 0,
        "dur": 100,
        "args": {"Op count": 0},
    },
    {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
    {
        "ph": "M",
        "name": "thread_name",
        "pid": 77,
        "tid": 78,
        "ts": 0,
        "args": {"name": "thread 78 (pt_autograd_0)"},
    },
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
    {"ph": "s", "id": 7, "pid": 77, "tid": 77, "ts": 2, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 7, "pid": 0, "tid": 7, "ts": 5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 77,
        "tid": 77,
        "ts": 3,
        "args": {
            "Addr": 140000000,
            "Bytes": 1024,
            "Total Allocated": 4096,
            "Total Reserved": 8192,
            "Device Type": 1,
            "Device Id": 0,
        },
    },
    {
        "ph": "i",
        "s": "g",
        "name": "Record Window End",
        "pid": "Traces",
        "tid": "Trace PyTorch Profiler",
        "ts": 99,
    },
    {"ph": "C", "name": "util", "pid": "GPU 0 Counters", "tid": 0, "ts": 4, "args": {"": 0.5}},
]
HEADER: dict[str, Any] = {
    "schemaVersion": 1,
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": 1759300074000000000,
    "traceName": "/x/net.json",
    "deviceProperties": [
        {"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132, "totalGlobalMem": 85000000000}
    ],
    "distributedInfo": {
        "backend": "nccl",
        "rank": 0,
        "world_size": 2,
        "pg_count": 1,
        "nccl_version": "2.21.5",
        "pg_config": [
            {
                "pg_name": "0",
                "pg_desc": "default_pg",
                "backend_config": "cuda:nccl",
                "pg_size": 2,
                "ranks": [0, 1],
            }
        ],
    },
    "host_name": "machine-1",
    "trace_id": "ABC",
    "username": "me",
    "mast_job_name": "job",
    "with_stack": 1,
    "cuda_runtime_version": 12040,
    "INFO": ["note"],
    "metadata": {"a": {"b": [1, "c"]}},
}


@pytest.mark.sampled(1)
@everywhere
def test_no_secret_of_an_event_survives(run: Anonymise, tmp_path: Path, policy: Policy) -> None:
    events = EVENTS + [made for event in EVENTS for made in planted(event)]
    source = write_json(tmp_path / "trace.json", HEADER | {"traceEvents": events})
    outcome = run(source, policy=policy)
    assert leaks(bytes_of(outcome.output)) == []
    after = read_kineto(outcome.output / "trace-1.kineto.json")
    assert after.events.height >= (
        20 if policy.structure == "collapse" else 500
    )  # it is not empty that is safe


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("unmeasured")
@two
def test_no_secret_beside_the_events_survives(
    run: Anonymise, tmp_path: Path, policy: Policy
) -> None:
    for number, header in enumerate(planted(HEADER, few=True)):
        folder = tmp_path / f"in-{number}"
        folder.mkdir()
        write_json(folder / "trace.json", header | {"traceEvents": EVENTS})
    outcome = run(
        *(path for path in sorted(tmp_path.iterdir()) if path.name.startswith("in-")), policy=policy
    )
    assert leaks(bytes_of(outcome.output)) == []
    assert len(outcome.report["files"]) > 50


NODES: list[dict[str, Any]] = [
    {
        "id": 3,
        "name": "## process_group:init ##",
        "ctrl_deps": 2,
        "inputs": {
            "values": [
                json.dumps(
                    [
                        {
                            "pg_name": "0",
                            "pg_desc": "default_pg",
                            "backend_config": "cuda:nccl",
                            "ranks": [],
                            "group_size": 2,
                            "group_count": 1,
                        }
                    ]
                )
            ],
            "shapes": [[]],
            "types": ["String"],
        },
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": "rf_id", "type": "uint64", "value": 1}],
    },
    {
        "id": 4,
        "name": "aten::mm",
        "ctrl_deps": 3,
        "inputs": {
            "values": [
                [5, 6, 0, 31337, 4, "cuda:0"],
                [[7, 8, 0, 77, 4, "cpu"]],
                "bhqd,bhkd->bhqk",
                3,
                "<None>",
                1e-5,
            ],
            "shapes": [[31337], [[7, 11]], [], [], [], []],
            "types": [
                "Tensor(float)",
                "GenericList[Tensor(c10::Half)]",
                "String",
                "Int",
                "None",
                "Double",
            ],
            "strides": [[1], [[11, 1]], [], [], [], []],
        },
        "outputs": {
            "values": [[9, 10, 0, 5, 4, "cuda:0"]],
            "shapes": [[5]],
            "types": ["Tensor(float)"],
        },
        "attrs": [
            {"name": "rf_id", "type": "uint64", "value": 2},
            {"name": "seq_id", "type": "int64", "value": -1},
            {"name": "scope", "type": "uint64", "value": 0},
            {"name": "tid", "type": "uint64", "value": 1},
            {
                "name": "op_schema",
                "type": "string",
                "value": "aten::mm(Tensor self, Tensor mat2) -> Tensor",
            },
            {"name": "kernel_backend", "type": "string", "value": "triton"},
            {"name": "kernel_file", "type": "string", "value": "abc.py"},
            {"name": "tensor_range", "type": "string", "value": '{"0":[1,5]}'},
        ],
    },
    {
        "id": 11,
        "name": "record_param_comms",
        "ctrl_deps": 3,
        "inputs": {
            "values": [
                [[5, 6, 0, 100, 4, "cuda:0"]],
                7,
                ["tp", "default_pg"],
                0,
                "allreduce",
                [],
                [],
                0,
                1,
                2,
            ],
            "shapes": [[[100]], [], [], [], [], [], [], [], [], []],
            "types": ["Int"] * 10,
        },
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [
            {"name": "collective_name", "type": "string", "value": "allreduce"},
            {"name": "dtype", "type": "string", "value": "Float"},
            {"name": "in_msg_nelems", "type": "uint64", "value": 100},
            {"name": "in_split_size", "type": "string", "value": "[1, 2]"},
            {"name": "pg_name", "type": "string", "value": "tp"},
            {"name": "pg_desc", "type": "string", "value": "default_pg"},
            {"name": "pg_size", "type": "uint64", "value": 2},
        ],
    },
    {
        "id": 12,
        "name": "## my region ##",
        "ctrl_deps": 3,
        "inputs": {"values": [], "shapes": [], "types": []},
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": "scope", "type": "uint64", "value": 7}],
    },
]
ENVELOPE: dict[str, Any] = {
    "schema": "1.1.1-chakra.0.0.4",
    "pid": 4242,
    "time": "2025-11-21 10:00:00",
    "start_ts": 123456,
    "finish_ts": 123999,
}
FLAT: dict[str, Any] = {
    "name": "aten::mm",
    "id": 4,
    "rf_id": 2,
    "parent": 3,
    "fw_parent": 0,
    "seq_id": -1,
    "scope": 0,
    "tid": 1,
    "fw_tid": 0,
    "op_schema": "aten::mm(Tensor self, Tensor mat2) -> Tensor",
    "inputs": [[5, 6, 0, 31337, 4, "cuda:0"], "text"],
    "input_shapes": [[31337], []],
    "input_types": ["Tensor(float)", "String"],
    "outputs": [],
    "output_shapes": [],
    "output_types": [],
}


@pytest.mark.sampled(2)
@everywhere
@pytest.mark.parametrize("nodes", [NODES, [FLAT]], ids=["nested", "flat"])
def test_no_secret_of_a_host_trace_survives(
    run: Anonymise, tmp_path: Path, policy: Policy, nodes: list[dict[str, Any]]
) -> None:
    many = [made for node in nodes for made in planted(node)]
    for number, node in enumerate(many):
        if isinstance(node.get("id"), int):
            node["id"] = number + 100
    source = write_json(tmp_path / "rank0.host.json", ENVELOPE | {"nodes": nodes + many})
    outcome = run(source, policy=policy)
    assert leaks(bytes_of(outcome.output)) == []
    assert outcome.report["files"][0]["entries_out"] >= len(many) // 3


@two
def test_no_secret_around_the_nodes_of_a_host_trace_survives(
    run: Anonymise, tmp_path: Path, policy: Policy
) -> None:
    sources = []
    for number, envelope in enumerate(planted(ENVELOPE, few=True)):
        folder = tmp_path / f"in-{number}"
        folder.mkdir()
        sources.append(write_json(folder / "rank0.host.json", envelope | {"nodes": NODES}))
    assert leaks(bytes_of(run(*sources, policy=policy).output)) == []


CAPTURE: dict[str, Any] = {
    "format": "traceloom-capture",
    "version": 1,
    "traceloom": "0.1.0",
    "run": {"command": ["python", "net.py"], "exit_code": 0, "started_ns": 1759300075000000000},
    "ranks": [
        {
            "rank": 0,
            "world_size": 2,
            "local_rank": 0,
            "name": "rank0",
            "host": "machine-1",
            "process": 77,
            "command": ["python", "net.py"],
            "platform": "Linux",
            "processor": "CPU",
            "logical_cpus": 8,
            "devices": [
                {
                    "device": 0,
                    "kind": "cuda",
                    "name": "NVIDIA H100",
                    "memory_bytes": 85,
                    "current": True,
                }
            ],
            "versions": {"python": "3.11.2", "torch": "2.9.0+local"},
            "settings": {"first_step": 3, "stacks": True},
            "groups": [
                {"name": "0", "description": "default_pg", "backend": "nccl", "ranks": [0, 1]}
            ],
            "created_ns": 1759300075000000000,
            "written_ns": 1759300076000000000,
            "ended": "exception: NetError",
            "window": {
                "file": "rank0.kineto.json",
                "kind": "steps",
                "first_step": 3,
                "step_count": 2,
                "start_ns": 1759300075000000000,
                "end_ns": 1759300076000000000,
            },
            "graph_step": {
                "step": 5,
                "duration_ns": 5,
                "file": None,
                "sources": ["rank0.host_resources/csecret.py"],
            },
            "step_source": "optimizer",
            "steps": {"start_ns": [1759300075000000000], "duration_ns": [5], "state": ["recorded"]},
            "collectives": {
                "groups": ["0"],
                "kinds": ["all_reduce"],
                "types": ["Float"],
                "group": [0],
                "kind": [0],
                "type": [0],
                "sequence": [1],
                "bytes_in": [100],
                "bytes_out": [100],
                "peer": [None],
                "start_ns": [1759300075000000000],
                "thread": [77],
            },
            "live_bytes_at_start": {"cpu": 100},
            "overhead": {"ratio": 1.5},
            "live_storages_at_start": {
                "address": [77],
                "bytes": [31337],
                "device_type": ["cpu"],
                "device": [-1],
                "owner": ["parameter"],
                "name": ["Net.secret.weight"],
            },
            "live_storages_at_end": {"owner": ["other"], "name": ["Batch [31337, 77]"]},
            "out_of_memory": {"file": "rank0.oom.json"},
            "allocators_at_end": [{"device_type": "cuda", "device": 0, "total_bytes": 85}],
            "notices": [{"slug": "disk-full", "message": "`/x/y` is full"}],
        }
    ],
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(  # the policies do not differ in what a capture holds
    "policy",
    [
        POLICIES["default"],
        pytest.param(POLICIES["shapes kept"], marks=pytest.mark.thorough),
    ],
    ids=["default", "shapes kept"],
)
def test_no_secret_of_a_capture_survives(run: Anonymise, tmp_path: Path, policy: Policy) -> None:
    folders = []
    for number, capture in enumerate(planted(CAPTURE, few=True)):
        head = capture["format"], capture["version"]
        if head != ("traceloom-capture", 1) or not isinstance(capture["ranks"], list):
            continue  # no capture that is read
        folder = tmp_path / f"in-{number}"
        folder.mkdir()
        write_json(folder / "rank0.kineto.json", HEADER | {"traceEvents": EVENTS[:2]})
        write_json(folder / "capture.json", capture)
        (folder / f"{SECRET}.pickle").write_bytes(SECRET.encode())
        (folder / "rank0.host_resources").mkdir()
        (folder / "rank0.host_resources" / "csecret.py").write_text(f"{SECRET} = 1")
        folders.append(folder)
    outcome = run(*folders, policy=policy)
    assert leaks(bytes_of(outcome.output)) == []
    assert sum(one["kind"] == "capture" for one in outcome.report["files"]) > 100
    assert not list(outcome.output.rglob("*.py"))
    assert (
        outcome.report["omitted"][
            "sources of compiled kernels and contents of tensors beside a host trace"
        ]
        > 100
    )


def _nodes() -> list[Node]:
    return [
        Node(id=0, name="aten::mm(0)", type=4, duration_micros=5),
        Node(id=1, name="volta_sgemm", type=4, data_deps=[0], duration_micros=7),
        Node(
            id=2,
            name="ncclKernel_AllReduce",
            type=7,
            data_deps=[1],
            ctrl_deps=[0],
            duration_micros=9,
        ),
        Node(id=3, name="COMM_SEND_NODE_x", type=5, data_deps=[2]),
        Node(id=4, name="Memcpy HtoD", type=2),
        Node(id=5, name="[pytorch|profiler|execution_trace|thread]", type=1),
        Node(id=6, name="record_param_comms", type=4),
    ]


def _attributes(name: str) -> list[AttributeProto]:
    made = [
        AttributeProto(name=name, string_val=SECRET),
        AttributeProto(name=name, bytes_val=SECRET.encode()),
        AttributeProto(name=name, doc_string=SECRET, int64_val=1),
        AttributeProto(name=name, string_val=f"x{SECRET}"),
    ]
    listed = AttributeProto(name=name)
    listed.string_list.values.extend([SECRET, SECRET, SECRET])
    packed = AttributeProto(name=name)
    packed.bytes_list.values.append(SECRET.encode())
    return [*made, listed, packed]


NAMES_OF_ATTRIBUTES = (
    "is_cpu_op",
    "comm_type",
    "comm_size",
    "pg_name",
    "op_schema",
    "inputs",
    "outputs",
    "stream",
    "tid",
    "involved_dim",
    "kernel_file",
    "op_type",
    "dtype",
    "collective_name",
    "num_ops",
    "start_ns",
    "tensor_size",
    "comm_kind",
    SECRET,
)


@everywhere
def test_no_secret_of_a_chakra_file_survives(
    run: Anonymise, tmp_path: Path, policy: Policy
) -> None:
    many = _nodes()
    for old in _nodes():
        for name in (
            SECRET,
            old.name + SECRET,
            f"{SECRET}{old.name}",
            old.name[:5] + SECRET + old.name[5:],
        ):
            node = Node.FromString(old.SerializeToString())
            node.id, node.name = len(many), name
            many.append(node)
        for name in NAMES_OF_ATTRIBUTES:
            for attribute in _attributes(name):
                node = Node.FromString(old.SerializeToString())
                node.id = len(many)
                node.attr.append(attribute)
                many.append(node)
        for text in (
            SECRET,
            f"['{SECRET}', [1, 2, 3, 4, 4, 'cuda:{SECRET}']]",
            f'[["{SECRET}"], 7]',
        ):
            node = Node.FromString(old.SerializeToString())
            node.id = len(many)
            for side in (node.inputs, node.outputs):
                side.values = side.shapes = side.types = text
            many.append(node)
        # a field that no version has, behind the known ones
        data = old.SerializeToString() + b"\xfa\x07" + bytes([len(SECRET)]) + SECRET.encode()
        node = Node.FromString(data)
        node.id = len(many)
        many.append(node)
    metadata = GlobalMetadata(version=SECRET)
    for name in ("schema", "pid", "time", "input_file", "start_ts", SECRET):
        metadata.attr.extend(_attributes(name))
    write(tmp_path / "workload.0.et", metadata, many)
    write_json(
        tmp_path / "comm_groups.json", {"0": [0, 1], SECRET: [0], "1": [SECRET], "2": SECRET}
    )
    outcome = run(tmp_path, policy=policy, output="shared")
    assert leaks(bytes_of(outcome.output)) == []
    with EtReader(outcome.output / "workload.0.et") as reader:
        count = sum(1 for _ in reader)
    assert count == len(many) or policy.structure == "collapse"


def test_the_search_finds_secrets_where_they_are() -> None:
    assert leaks(f"x {SECRET} y".encode())
    assert leaks(b"xx quokkaz yy")
    assert leaks(b"arbezakkouq")
    assert leaks(b"UXVva2thWmVicmE=")  # the secret in base 64
    assert leaks(NUMBER.encode())
    assert leaks(b"nothing of the kind") == []
