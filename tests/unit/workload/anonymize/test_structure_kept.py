"""What is shared has the structure of what is kept, node by node and event by event, and says the same when asked."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from planting import Anonymise, bytes_of, write_json

from support.strategies import builders
from support.workload import attribute, collective, node, receive, send, write_set
from traceloom import analyze
from traceloom.formats import load, read_kineto
from traceloom.formats.chakra.et_pb2 import AttributeProto, Node
from traceloom.formats.chakra.files import EtReader
from traceloom.formats.host_trace import read_host_trace
from traceloom.testing import HostTraceBuilder, TraceBuilder
from traceloom.trace.trace import Trace
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import anonymize
from traceloom.workload.chakra.validate import validate

POLICIES = {
    "default": Policy(),
    "all kept": Policy(shapes="keep", scalars="keep", times="keep"),
    "all dropped": Policy(shapes="drop", hosts="drop", devices="drop", versions="drop"),
}
KEY = Key(b"a key that only tests have")
QUICK = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)


def shared(source: Path, output: Path, policy: Policy | None = None, key: Key = KEY) -> Path:
    return anonymize([source], output, policy or Policy(), key, force=True).output


def numbered(frame: pl.DataFrame) -> list[int]:
    """Each row by the place at which it first stands: equal where two frames are equal but for their values."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(row, at) for at, row in enumerate(frame.rows())]


# -- device traces ---------------------------------------------------------------------------------------------------


def assert_same_structure(before: Trace, after: Trace) -> None:
    after.check()
    old, new = before.events, after.events
    for column in (
        "category",
        "duration_ns",
        "device",
        "stream",
        "correlation",
        "parent",
        "depth",
        "op",
        "launch",
        "sequence",
        "external_id",
        "record_function_id",
    ):
        assert new[column].to_list() == old[column].to_list(), column
    for column in (
        "name",
        "thread",
        "process",
        "lane",
    ):  # a kernel and an operator of one name have two
        assert numbered(new[["category", column]]) == numbered(old[["category", column]]), column
    for name in ("start_ns", "nested_end_ns"):
        assert (new[name] - after.start_ns).equals(old[name] - before.start_ns), name
    assert new["step"].is_null().equals(old["step"].is_null())
    assert after.steps.height == before.steps.height
    lanes = [
        Counter(trace.lanes.select("kind", "device", "stream", "events", "busy_ns").rows())
        for trace in (before, after)
    ]
    assert lanes[0] == lanes[1]
    assert after.flows.equals(before.flows)
    assert after.collectives.select("event", "kind", "group_size", "peer").equals(
        before.collectives.select("event", "kind", "group_size", "peer")
    )
    assert after.copies.select("event", "kind", "source_memory", "target_memory").equals(
        before.copies.select("event", "kind", "source_memory", "target_memory")
    )
    about = ["device_type", "device", "op"]
    assert after.allocations.select(about).equals(before.allocations.select(about))
    assert (after.allocations["bytes"].sign()).equals(before.allocations["bytes"].sign())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", POLICIES)
@QUICK
@given(builder=builders(max_events=16, generation="2024"))
def test_events_keep_their_places_times_and_joins(
    tmp_path: Path, policy: str, builder: TraceBuilder
) -> None:
    source = builder.op("aten::mm", 1, 5).write(tmp_path / "in.json")
    before = read_kineto(source)
    after = read_kineto(shared(source, tmp_path / "out.json", POLICIES[policy]))
    assert_same_structure(before, after)
    assert (after.rank, after.meta.world_size) == (before.rank, before.meta.world_size)


@pytest.mark.thorough
@QUICK
@given(builder=builders(max_events=10, generation="2024"))
def test_what_is_anonymised_twice_is_what_was_anonymised_once_by_another_name(
    tmp_path: Path, builder: TraceBuilder
) -> None:
    source = builder.op("aten::mm", 1, 5, shapes=[[700, 3]]).write(tmp_path / "in.json")
    once = shared(source, tmp_path / "once.json")
    twice = shared(once, tmp_path / "twice.json", key=Key(b"another key, for the second time"))
    first, second = read_kineto(once), read_kineto(twice)
    assert_same_structure(first, second)
    assert (
        second.tensors["shapes"].to_list() == first.tensors["shapes"].to_list()
    )  # rounded once is rounded


@pytest.mark.thorough
@QUICK
@given(builder=builders(max_events=10))
def test_the_same_key_gives_the_same_bytes_and_another_key_other_names(
    tmp_path: Path, builder: TraceBuilder
) -> None:
    source = builder.op("acme::secret", 1, 5).write(tmp_path / "in.json")
    outputs = [
        shared(source, tmp_path / f"{at}.json", key=key).read_bytes()
        for at, key in enumerate((KEY, KEY, Key(b"another key, for the second time")))
    ]
    assert outputs[0] == outputs[1] != outputs[2]


HIDDEN = "WombatNarwhalPangolinOcelotAxolotlQuetzalIbexKinkajou"


def secret_job(rank: int, words: dict[str, str]) -> TraceBuilder:
    """A rank whose every text of its own holds one of the words."""
    made = TraceBuilder(
        rank,
        2,
        device_name=words["device"],
        process=4000 + rank,
        host=words["host"],
        base_ns=1 << 60,
    )
    made.group("0", [0, 1], description=words["group"]).metadata(
        trace_id=words["job"], username=words["user"], traceName=f"/data/{words['path']}.json"
    )
    thread = 4000 + rank
    made.thread_name(77, words["thread"]).op("aten::add", 3, 1, thread=77)
    for step in range(2):
        at = 1000 * (step + 1)
        made.step(step, at, 900, thread=thread)
        made.annotation(f"## {words['region']} ##", at + 1, 500, thread=thread)
        made.op(
            f"{words['library']}::op",
            at + 5,
            60,
            thread=thread,
            shapes=[[31337, 77]],
            kernel_file=words["path"],
        )
        made.python(
            f"/home/{words['user']}/{words['path']}.py({step}): {words['function']}",
            at + 4,
            400,
            thread=thread,
        )
        made.launch("cudaLaunchKernel", at + 10, 5, correlation=step + 1, thread=thread)
        made.kernel(f"void {words['kernel']}<float>(int)", at + 40, 200, correlation=step + 1)
        made.collective("allreduce", at + 320, 30, thread=thread, group=words["group"])
        made.launch("cudaLaunchKernel", at + 325, 5, correlation=step + 11, thread=thread)
        more = made.collective_args("allreduce", words["group"], 2, 1024, "Float")
        made.kernel(
            "ncclDevKernel_AllReduce_Sum", at + 400, 150, stream=8, correlation=step + 11, **more
        )
        made.counter(words["counter"], at + 2, 0.5, key=words["counter"]).instant(
            words["mark"], at + 3
        )
    return made


WORDS = (
    "device",
    "host",
    "group",
    "job",
    "user",
    "path",
    "thread",
    "region",
    "library",
    "function",
    "kernel",
    "counter",
    "mark",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "policy",
    [*POLICIES.values(), Policy(structure="collapse"), Policy(shapes="drop", stacks="drop")],
    ids=[*POLICIES, "collapsed", "without shapes and stacks"],
)
def test_no_word_of_a_job_is_left_in_any_byte_on_any_rank(
    run: Anonymise, tmp_path: Path, policy: Policy
) -> None:
    # No two words have four letters in common, so that none hides behind another.
    words = {word: f"{HIDDEN[4 * at : 4 * at + 4]}{at:02d}Zq" for at, word in enumerate(WORDS)}
    folder = tmp_path / words["path"]
    folder.mkdir()
    for rank in range(2):
        secret_job(rank, words).write(folder / f"{words['job']}_rank{rank}.json.gz")
    data = bytes_of(run(folder, policy=policy).output).lower()
    kept = [word for word, text in words.items() if text.lower().encode() in data]
    assert kept == (
        ["device"] if policy.devices == "keep" and words["device"].lower().encode() in data else []
    )
    session = load(tmp_path / "out", cache=False)
    assert session.ranks == (0, 1)


ANSWERS: dict[str, Callable[[Trace], pl.DataFrame]] = {
    "device time": lambda trace: analyze.gpu_time(trace).devices.drop("name", "start_ns"),
    "device time by step": lambda trace: analyze.gpu_time(trace).steps.drop(
        "name", "start_ns", strict=False
    ),
    "steps": lambda trace: analyze.step_times(trace).steps.select("step", "duration_ns"),
    "kernels by category": lambda trace: analyze.kernels(trace).categories,
    "causes of idle time": lambda trace: analyze.idle(trace).causes,
    "communication": lambda trace: analyze.communication(trace).devices,
    "host": lambda trace: (
        analyze.host(trace)
        .account.group_by("step", "phase", "activity")
        .agg(pl.col("ns").sum())
        .sort("step", "phase", "activity", nulls_last=True)
    ),
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """A rank of a job before and after."""
    folder = tmp_path_factory.mktemp("answers")
    source = secret_job(0, {word: f"acme{word}" for word in WORDS}).write(folder / "rank0.json")
    return read_kineto(source), read_kineto(shared(source, folder / "out.json"))


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_has_the_same_answer_before_and_after(
    question: str, answered: tuple[Trace, Trace]
) -> None:
    before, after = (ANSWERS[question](trace) for trace in answered)
    assert before.height > 0
    assert after.to_dicts() == before.to_dicts()


def test_a_trace_with_times_that_nobody_can_retime_is_shared_all_the_same(
    run: Anonymise, tmp_path: Path
) -> None:
    made = (
        TraceBuilder().op("aten::mm", 1, 5).op("acme::op", 10, 200 * 86_400e6)
    )  # a damaged duration
    outcome = run(made.write(tmp_path / "a.json"), output="b.json")
    assert read_kineto(outcome.output).events["duration_ns"].to_list() == [
        5000,
        200 * 86_400 * 10**9,
    ]
    parts = {
        part["part"]: part["verdict"]
        for entry in outcome.report["utility"]
        for part in entry["parts"]
    }
    assert "critical path" not in parts
    assert set(parts.values()) == {"equal"}


@pytest.mark.parametrize("size", [2**62 + 1, 2**63 - 1, 2**63, 2**100, -(2**63), 3 * 2**61])
def test_sizes_that_no_column_holds_after_rounding_end_nothing(
    run: Anonymise, tmp_path: Path, size: int
) -> None:
    event = {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy HtoD",
        "pid": 0,
        "tid": 7,
        "ts": 1,
        "dur": 1,
        "args": {"bytes": size, "device": 0, "stream": 7},
    }
    source = write_json(tmp_path / "a.json", {"schemaVersion": 1, "traceEvents": [event]})
    assert read_kineto(run(source, output="b.json").output).copies.height == 1


# -- host traces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["1.0.1", "1.0.3-chakra.0.0.4", "1.1.1-chakra.0.0.4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_nodes_of_host_traces_keep_ids_parents_threads_and_order(
    tmp_path: Path, schema: str, policy: str
) -> None:
    made = HostTraceBuilder(schema, process=77)
    outer = made.op("acme::outer", scope=7)
    for number in range(6):
        tensor = ([number, 6, 0, 700, 4, "cuda:0"], [700, 1], "Tensor(float)")
        made.op(
            f"acme::op{number % 3}",
            parent=outer,
            thread=1 + number % 2,
            sequence=number,
            inputs=[tensor],
        )
    source = tmp_path / "rank0.host.json"
    source.write_text(made.text())
    before, after = (
        read_host_trace(source),
        read_host_trace(shared(source, tmp_path / "out.json", POLICIES[policy])),
    )
    same = [
        "id",
        "parent",
        "thread",
        "sequence",
        "scope",
        "forward_thread",
        "record_function_id",
        "input_types",
    ]
    if schema == "1.0.1":  # what it is rewritten to has other types of nothing
        same.remove("input_types")
    assert after.ops.select(same).equals(before.ops.select(same))
    assert numbered(after.ops[["name"]]) == numbered(before.ops[["name"]])
    shapes = {"default": [[512, 1]], "all kept": [[700, 1]], "all dropped": [[]]}
    assert json.loads(after.ops["input_shapes"][-1]) == shapes[policy]
    assert not [notice for notice in after.notices if notice not in before.notices]


# -- Chakra ----------------------------------------------------------------------------------------------------------

WORKLOADS: dict[str, tuple[list[list[Node]], Any]] = {
    "right": ([[node(1), collective(2, deps=[1])], [node(1), collective(2, deps=[1])]], None),
    "of groups": (
        [
            [collective(1, pg_name="acme-tp"), node(2, deps=[1])],
            [collective(1, pg_name="acme-tp"), node(2, deps=[1])],
        ],
        {"acme-tp": [0, 1]},
    ),
    "messages": ([[send(1, 1), node(2, deps=[1])], [receive(1, 0), node(2, deps=[1])]], None),
    "a message nobody takes": ([[send(1, 1), node(2, deps=[1])], [node(1)]], None),
    "orders that differ": (
        [
            [collective(1), collective(2, "ALL_GATHER", deps=[1])],
            [collective(1, "ALL_GATHER"), collective(2, deps=[1])],
        ],
        None,
    ),
    "a circle": ([[node(1, deps=[2]), node(2, deps=[1])]], None),
    "nobody's dependency": ([[node(1), node(2, deps=[7]), node(2)]], None),
    "no size": ([[collective(1, size=0), node(2, deps=[1])]], None),
    "a group that is not told": (
        [[collective(1, pg_name="acme")], [collective(1, pg_name="acme")]],
        {"other": [0, 1]},
    ),
    "on the host": ([[collective(1, is_cpu_op=True), node(2, deps=[1], is_cpu_op=True)]], None),
}


def node_mask(folder: Path) -> list[list[Node]]:
    out = []
    for path in sorted(folder.glob("*.et")):
        with EtReader(path) as reader:
            out.append(list(reader))
    return out


@pytest.mark.sampled(7)
@pytest.mark.parametrize("target", ["chakra", "astra-sim"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_breaks_the_same_rules_before_and_after(
    tmp_path: Path, workload: str, target: Any
) -> None:
    ranks, groups = WORKLOADS[workload]
    source = write_set(tmp_path / "in", *ranks, groups=groups)
    output = shared(source, tmp_path / "out")
    before, after = (
        Counter(
            (problem.rule, problem.severity) for problem in validate(folder, target=target).problems
        )
        for folder in (source, output)
    )
    assert after == before
    assert b"acme" not in bytes_of(output)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nodes_keep_ids_kinds_durations_and_dependencies(tmp_path: Path, workload: str) -> None:
    ranks, groups = WORKLOADS[workload]
    source = write_set(tmp_path / "in", *ranks, groups=groups)
    after = node_mask(shared(source, tmp_path / "out"))
    assert len(after) == len(ranks)
    for old_nodes, new_nodes in zip(node_mask(source), after, strict=True):
        for old, new in zip(old_nodes, new_nodes, strict=True):
            for field in ("id", "type", "duration_micros", "data_deps", "ctrl_deps"):
                assert getattr(new, field) == getattr(old, field)
            assert [a.name for a in new.attr] == [a.name for a in old.attr]


@pytest.mark.parametrize("name", ["comm_groups.json", "comm_group.json"])
def test_a_group_file_of_either_name_keeps_its_members(
    run: Anonymise, tmp_path: Path, name: str
) -> None:
    source = write_set(
        tmp_path / "in", [collective(1, pg_name="acme")], [collective(1, pg_name="acme")]
    )
    write_json(source / name, {"acme": [0, 1], "5": [1], "odd": ["x"]})
    outcome = run(source)
    assert outcome.refused == []
    groups = json.loads((outcome.output / "comm_groups.json").read_text())
    assert sorted(groups.values()) == [[0, 1], [1]]
    (hidden,) = {
        a.string_val
        for nodes in node_mask(outcome.output)
        for n in nodes
        for a in n.attr
        if a.name == "pg_name"
    }
    assert groups[hidden] == [0, 1]


LIMITS = {
    "int32_val": (-(2**31), 2**31 - 1),
    "sint32_val": (-(2**31), 2**31 - 1),
    "sfixed32_val": (-(2**31), 2**31 - 1),
    "uint32_val": (0, 2**32 - 1),
    "fixed32_val": (0, 2**32 - 1),
    "int64_val": (-(2**63), 2**63 - 1),
    "sint64_val": (-(2**63), 2**63 - 1),
    "uint64_val": (0, 2**64 - 1),
    "fixed64_val": (0, 2**64 - 1),
    "bool_val": (0, 1),
}


@pytest.mark.parametrize("name", ["comm_size", "tensor_size", "num_ops"])
@pytest.mark.parametrize("member", LIMITS)
def test_sizes_of_every_type_are_rounded_within_it(tmp_path: Path, member: str, name: str) -> None:
    sizes = [size for limit in LIMITS[member] for size in (limit, limit // 2, limit // 3 * 2)]
    source = write_set(
        tmp_path / "in", [node(at + 1, **{name: (member, size)}) for at, size in enumerate(sizes)]
    )
    (nodes,) = node_mask(shared(source, tmp_path / "out"))
    rounded = [getattr(made.attr[0], member) for made in nodes]
    for size, shown in zip(sizes, rounded, strict=True):
        assert 1 / 2**0.5 - 1e-6 <= (shown / size if size else 1) <= 2**0.5 + 1e-6
        if size not in LIMITS[member]:
            assert abs(shown) < 3 or abs(shown) & (abs(shown) - 1) == 0  # a power of two


def test_uneven_exchanges_at_the_limit_and_odd_names_of_tensors_are_rewritten(
    tmp_path: Path,
) -> None:
    made = node(1)
    made.attr.add(name="in_splits").int64_list.values.extend([2**63 - 1, 700, 0, -(2**63)])
    made.attr.add(name="inputs").string_list.values.extend(
        ["weight", "700", "bias", "²", "x", "٣", "y", "9" * 21]
    )
    source = write_set(tmp_path / "in", [made])
    ((after,),) = node_mask(shared(source, tmp_path / "out"))
    splits, inputs = (list(getattr(a, a.WhichOneof("value")).values) for a in after.attr)
    assert splits == [2**63 - 1, 512, 0, -(2**63)]
    assert inputs[1] == "512"
    assert not {"weight", "bias", "²", "9" * 21} & set(inputs)
    assert len(inputs) == 8


def test_chains_that_last_longer_than_any_clock_are_joined(tmp_path: Path) -> None:
    longest = [
        node(at, deps=[at - 1] if at else [], us=2**63, num_ops=2**63 - 1) for at in range(3)
    ]
    source = write_set(tmp_path / "in", longest)
    ((joined,),) = node_mask(shared(source, tmp_path / "out", Policy(structure="collapse")))
    assert joined.duration_micros == 2**64 - 1


IDS = st.integers(1, 8)
RANDOM = st.lists(
    st.builds(
        lambda deps, ctrl, us, kind, more: (deps, ctrl, us, kind, more),
        st.lists(IDS, max_size=2, unique=True),
        st.lists(IDS, max_size=1),
        st.integers(0, 100),
        st.sampled_from(["COMP_NODE", "COMP_NODE", "MEM_LOAD_NODE", "COMM_COLL_NODE"]),
        st.lists(
            st.sampled_from(["tensor_size", "num_ops", "secret", "stream"]), max_size=3, unique=True
        ),
    ),
    min_size=1,
    max_size=8,
)


@QUICK
@given(rows=RANDOM)
def test_collapsing_any_workload_keeps_the_longest_path_and_all_communication(
    tmp_path: Path, rows: list[Any]
) -> None:
    made = []
    for at, (deps, ctrl, us, kind, more) in enumerate(rows, start=1):
        one = node(
            at,
            kind,
            [dep for dep in deps if dep < at],
            ctrl=[dep for dep in ctrl if dep < at],
            us=us,
        )
        one.attr.extend(attribute(name, 7) for name in more)
        if kind == "COMM_COLL_NODE":
            one.attr.extend(
                [
                    AttributeProto(name="comm_type", int64_val=0),
                    AttributeProto(name="comm_size", int64_val=64),
                ]
            )
        made.append(one)
    source = write_set(tmp_path / "in", made)
    (after,) = node_mask(shared(source, tmp_path / "out", Policy(structure="collapse")))
    assert longest(after) == longest(made)
    assert [n.id for n in after if n.type == 7] == [n.id for n in made if n.type == 7]
    assert {n.id for n in after} <= {n.id for n in made}
    assert sum(n.duration_micros for n in after) == sum(n.duration_micros for n in made)
    assert all(dep in {n.id for n in after} for n in after for dep in (*n.data_deps, *n.ctrl_deps))


def longest(nodes: list[Node]) -> int:
    """How long the workload takes with nothing to share; every node stands behind what it waits for."""
    ends: dict[int, int] = {}
    for one in sorted(nodes, key=lambda one: one.id):
        ends[one.id] = one.duration_micros + max(
            (ends[dep] for dep in (*one.data_deps, *one.ctrl_deps)), default=0
        )
    return max(ends.values())
