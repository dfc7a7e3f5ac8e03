"""The whole way: files in, files of the same kinds out, and reports that are true."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parent))

from planting import Anonymise, write_json

from support.strategies import builders
from traceloom.cli import main
from traceloom.errors import InputError, OutputError, UsageError
from traceloom.formats import load, read_kineto
from traceloom.formats.chakra.et_pb2 import AttributeProto, GlobalMetadata, Node
from traceloom.formats.chakra.files import EtReader, write
from traceloom.graph.rank import link_rank
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace
from traceloom.workload.anonymize import run as run_module
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import anonymize
from traceloom.workload.chakra.graph_read import write_rank

BASE = 7889238 * 223 * 10**9


def job(rank: int, *, shift_us: float = 0, base_ns: int = BASE) -> TraceBuilder:
    """One rank of two: two steps, a matrix product and a collective each."""
    made = TraceBuilder(rank, 2, process=4000 + rank, base_ns=base_ns, host=f"machine-{rank}")
    made.group("0", [0, 1], description="default_pg")
    for step in range(2):
        at = 1000 + shift_us + 1000 * step
        thread = 4000 + rank
        made.step(step + 7, at, 900, thread=thread)
        made.annotation("## forward ##", at + 5, 300, thread=thread)
        made.op("aten::mm", at + 10, 100, thread=thread, shapes=[[700, 300], [300, 77]])
        made.op("my_library::secret_op", at + 150, 50, thread=thread, shapes=[[31337]])
        made.launch("cudaLaunchKernel", at + 20, 5, correlation=2 * step + 1, thread=thread)
        made.kernel(
            "volta_sgemm_128x64_nn", at + 40, 200, correlation=2 * step + 1, grid=[31, 7, 1]
        )
        made.collective("allreduce", at + 320, 30, thread=thread, elements=53900)
        made.launch("cudaLaunchKernel", at + 325, 5, correlation=2 * step + 2, thread=thread)
        more = made.collective_args("allreduce", "0", 2, 53900, "Float")
        made.kernel(
            "ncclDevKernel_AllReduce_Sum", at + 400, 150, stream=8, correlation=2 * step + 2, **more
        )
    return made


def ranks(folder: Path, **options: float) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [
        job(rank, **options).write(folder / f"worker{rank}_secret.json.gz") for rank in range(2)
    ]


def verdicts(outcome: run_module.Anonymized) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for entry in outcome.report["utility"]:
        for part in entry["parts"]:
            found.setdefault(part["verdict"], set()).add(part["part"])
    return found


@pytest.mark.thorough
def test_ranks_stay_a_run_and_every_analysis_says_the_same(run: Anonymise, tmp_path: Path) -> None:
    outcome = run(*ranks(tmp_path / "in"))
    session = load(outcome.output, cache=False)
    assert [trace.rank for trace in session.traces] == [0, 1]
    assert session.world_size == 2
    assert verdicts(outcome).keys() == {"equal", "rounded"}
    assert verdicts(outcome)["rounded"] == {"bytes of collectives"}
    assert all(not entry["new_notices"] for entry in outcome.report["utility"])
    assert sorted(path.name for path in outcome.output.iterdir()) == [
        "rank0.kineto.json.gz",
        "rank1.kineto.json.gz",
    ]


def test_times_begin_anew_but_ranks_stay_apart(run: Anonymise, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    first = job(0).write(folder / "rank0.json")
    second = job(1, shift_us=123.456).write(folder / "rank1.json")
    before = [read_kineto(path) for path in (first, second)]
    after = load(run(first, second).output, cache=False).traces
    assert (
        after[1].start_ns - after[0].start_ns == before[1].start_ns - before[0].start_ns == 123_456
    )
    assert all(
        trace.meta.clock == "unix" and trace.start_ns < 1_002_000_000 * 10**9 for trace in after
    )
    kept = load(
        run(first, second, output="kept", policy=Policy(times="keep")).output, cache=False
    ).traces
    assert [trace.start_ns for trace in kept] == [trace.start_ns for trace in before]


def test_what_is_shown_is_the_same_on_all_ranks(run: Anonymise, tmp_path: Path) -> None:
    outcome = run(*ranks(tmp_path / "in"), mapping=tmp_path / "names.json")
    names = [set(read_kineto(path).events["name"]) for path in sorted(outcome.output.iterdir())]
    assert names[0] == names[1]
    assert "aten::mm" in names[0]
    way_back = json.loads((tmp_path / "names.json").read_text())
    op = next(name for name in names[0] if name.startswith("op_"))
    assert way_back["names"][op] == "my_library::secret_op"
    assert {4000, 4001} <= set(way_back["processes"].values())
    assert (tmp_path / "names.json").stat().st_mode & 0o777 == 0o600
    assert outcome.report_path.stat().st_mode & 0o777 == 0o600


def test_shapes_are_rounded_kept_or_left_out(run: Anonymise, tmp_path: Path) -> None:
    source = job(0).write(tmp_path / "rank0.json")
    shapes = {
        mode: set(
            read_kineto(
                run(source, output=f"{mode}.json", policy=Policy(shapes=mode)).output
            ).tensors["shapes"]
        )
        for mode in ("bucket", "keep", "drop")
    }
    assert shapes == {
        "bucket": {"[[512,256],[256,64]]", "[[32768]]"},
        "keep": {"[[700,300],[300,77]]", "[[31337]]"},
        "drop": set(),
    }


def test_the_leak_report_finds_shapes_that_bytes_and_names_give_away(
    run: Anonymise, tmp_path: Path
) -> None:
    made = job(0)
    made.copy("Memcpy HtoD (Pageable -> Device)", 50, 5, bytes=31337 * 4)
    source = made.write(tmp_path / "rank0.json")
    dropped = run(source, policy=Policy(shapes="drop")).report["leaks"]["shapes"]
    assert {"shape": [31337], "by": ["bytes"]} in dropped["given_away"]
    assert run(source, output="b").report["leaks"]["shapes"]["given_away"] == []
    named = TraceBuilder(0, 1)
    named.op("aten::mm", 1, 1, shapes=[[31337, 5]]).kernel("my_gemm_31337x5", 2, 3, correlation=1)
    source = named.write(tmp_path / "named.json")
    kept = run(source, output="c", policy=Policy(kernels="keep")).report["leaks"]
    assert kept["shapes"]["given_away"] == [{"shape": [31337, 5], "by": ["names (31337)"]}]
    assert kept["kept_by_policy"] == ["my_gemm_31337x5"]


def test_the_leak_report_lists_every_text_of_the_output(run: Anonymise, tmp_path: Path) -> None:
    outcome = run(job(0).write(tmp_path / "rank0.json"))
    data = (outcome.output / "rank0.kineto.json").read_text()
    texts = {one["text"] for one in outcome.report["leaks"]["strings"]}

    def strings(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {text for item in value.values() for text in strings(item)}
        if isinstance(value, list):
            return {text for item in value for text in strings(item)}
        return {value} if isinstance(value, str) else set()

    assert strings(json.loads(data)) <= texts
    assert sum(outcome.report["leaks"]["counts"].values()) == len(
        outcome.report["leaks"]["strings"]
    )


def test_words_of_hidden_names_in_the_output_are_reported(run: Anonymise, tmp_path: Path) -> None:
    made = job(0).annotation("our volta region", 1, 2)
    source = made.write(tmp_path / "rank0.json")
    leaks = run(source, policy=Policy(kernels="keep")).report["leaks"]
    assert [one["word"] for one in leaks["echoes"]] == ["volta"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(builder=builders())
def test_random_traces_come_out_with_the_same_times(builder: TraceBuilder, tmp_path: Path) -> None:
    source = builder.write(tmp_path / "trace.json")
    output = tmp_path / "out.json"
    outcome = anonymize([source], output, Policy(), Key(b"a key that only tests have"), force=True)
    before, after = read_kineto(source), read_kineto(output)
    assert after.events["duration_ns"].to_list() == before.events["duration_ns"].to_list()
    assert after.events["launch"].to_list() == before.events["launch"].to_list()
    assert after.events["parent"].to_list() == before.events["parent"].to_list()
    # Pseudonyms of threads are ordered otherwise than their numbers. Where random traces have events of
    # several threads at one instant, that order decides which path is told, and where time is cut.
    changed = verdicts(outcome).get("changed", set())
    assert changed <= {"critical path", "graph edges", "graph nodes"}
    assert all(not entry["new_notices"] for entry in outcome.report["utility"])


def test_collapsing_hides_the_tree_and_keeps_the_gpu_and_its_causes(
    run: Anonymise, tmp_path: Path
) -> None:
    outcome = run(*ranks(tmp_path / "in"), policy=Policy(structure="collapse"))
    found = verdicts(outcome)
    assert {
        "GPU time by device",
        "GPU time by step",
        "steps",
        "kernel categories",
        "launches",
        "collectives",
        "idle causes",
        "re-timing",
    } <= found["equal"]
    assert "changed" not in found
    trace: Trace = read_kineto(outcome.output / "rank0.kineto.json.gz")
    names = set(trace.events["name"])
    assert {"host_work", "gemm", "nccl_all_reduce", "record_param_comms"} <= names
    assert not {"aten::mm", "ac2g"} & names
    assert not trace.tensors.height
    launches = trace.events.filter(category="runtime").select("start_ns", "nested_end_ns").rows()
    fused = trace.events.filter(name="host_work").select("start_ns", "nested_end_ns").rows()
    assert all(end <= start or begin >= stop for start, stop in launches for begin, end in fused)


def test_a_linked_workload_keeps_the_distance_of_all_its_nodes(
    run: Anonymise, tmp_path: Path
) -> None:
    built = TraceBuilder().op("aten::mm", 0, 50).op("aten::add", 60, 20)
    built.launch("cudaLaunchKernel", 10, 5, correlation=1).kernel("k", 30, 20, correlation=1)
    write_rank(link_rank(built.build()), tmp_path / "workload.0.et")
    outcome = run(tmp_path / "workload.0.et")

    def starts(path: Path) -> list[tuple[int, int]]:
        with EtReader(path) as reader:
            return [
                (node.start_time_micros, attribute.int64_val)
                for node in reader
                for attribute in node.attr
                if attribute.name == "start_ns"
            ]

    before = starts(tmp_path / "workload.0.et")
    assert (0, 0) in before
    assert len(before) > 4
    assert starts(outcome.output / "workload.0.et") == before


def test_collapsing_joins_chains_of_a_chakra_file(run: Anonymise, tmp_path: Path) -> None:
    def node(number: int, name: str, deps: list[int], *, cpu: bool, us: int) -> Node:
        made = Node(id=number, name=name, type=4, data_deps=deps, duration_micros=us)
        made.attr.extend(
            [
                AttributeProto(name="is_cpu_op", bool_val=cpu),
                AttributeProto(name="num_ops", int64_val=100),
            ]
        )
        return made

    nodes = [
        node(0, "a", [], cpu=True, us=1),
        node(1, "b", [0], cpu=True, us=2),
        node(2, "c", [1], cpu=True, us=4),
        node(3, "k", [2], cpu=False, us=8),
        node(4, "k", [3], cpu=False, us=16),
        node(5, "d", [2], cpu=True, us=32),
        node(6, "e", [5, 4], cpu=True, us=64),
    ]
    write(tmp_path / "workload.0.et", GlobalMetadata(version="0.0.4"), nodes)
    outcome = run(tmp_path / "workload.0.et", policy=Policy(structure="collapse", shapes="keep"))
    with EtReader(outcome.output / "workload.0.et") as reader:
        made = {
            one.id: (list(one.data_deps), one.duration_micros, one.attr[1].int64_val)
            for one in reader
        }
    assert made == {0: ([], 7, 300), 3: ([0], 24, 200), 5: ([0], 32, 100), 6: ([5, 3], 64, 100)}
    assert {"total time", "ideal time"} <= verdicts(outcome)["equal"]


def test_a_damaged_trace_comes_out_whole_with_what_could_be_read(
    run: Anonymise, tmp_path: Path
) -> None:
    text = job(0).text().replace('"aten::mm"', '"aten::mm "quoted" x"', 1)
    source = tmp_path / "rank0.json"
    source.write_text(text[: int(len(text) * 0.8)])
    before = read_kineto(source)
    outcome = run(source, output="shared.json")
    after = read_kineto(outcome.output)
    assert {notice.slug for notice in before.notices} >= {"cut-file"}
    assert {notice.slug for notice in after.notices} <= {
        notice.slug for notice in before.notices
    } - {"cut-file"}
    assert after.events.height == before.events.height
    assert "changed" not in verdicts(outcome)


def test_one_file_goes_into_one_file_packed_as_its_name_says(
    run: Anonymise, tmp_path: Path
) -> None:
    source = job(0).write(tmp_path / "rank0.json.gz")
    plain = run(source, output="shared.json")
    packed = run(source, output="shared.json.gz")
    assert json.loads(plain.output.read_bytes())["traceEvents"]
    assert gzip.decompress(packed.output.read_bytes()) == plain.output.read_bytes()


def test_one_of_several_that_is_refused_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = job(0).write(tmp_path / "rank0.json")
    bad = tmp_path / "note.json"
    bad.write_text("this is no trace")
    out = tmp_path / "out"
    assert main(["anonymize", str(good), str(bad), "-o", str(out)]) == 4
    assert "no JSON object or list" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["rank0.kineto.json"]


def test_nothing_is_written_where_nothing_can_be_used(run: Anonymise, tmp_path: Path) -> None:
    bad = tmp_path / "note.json"
    bad.write_text("this is no trace")
    with pytest.raises(InputError):
        run(bad)
    with pytest.raises(InputError, match="no such file"):
        run(tmp_path / "absent.json")
    assert {path.name for path in tmp_path.iterdir()} == {"note.json"}


def test_nothing_is_left_behind_when_writing_fails(
    run: Anonymise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = job(0).write(tmp_path / "rank0.json")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "_write_private", full)
    with pytest.raises(OutputError, match="no space left"):
        run(source)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.json"}


def test_an_output_is_replaced_only_by_force_and_only_where_it_is_ours(
    run: Anonymise, tmp_path: Path
) -> None:
    source = job(0).write(tmp_path / "rank0.json")
    run(source)
    with pytest.raises(OutputError, match="exists already"):
        run(source)
    run(source, force=True)
    with pytest.raises(UsageError, match="is an input too"):
        run(source, output="new", mapping=source, force=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "out" / "diary.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"diary\.txt"):
        run(source, force=True)
    assert (tmp_path / "out" / "diary.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="is an input too"):
        run(source, output="rank0.json", force=True)
    with pytest.raises(UsageError, match="where the inputs are"):
        run(source, output=".", force=True)


def test_a_recorded_run_stays_a_recorded_run(run: Anonymise, tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    folder.mkdir()
    job(0).write(folder / "rank0.kineto.json")
    start = BASE + 1_000_000
    entry = {
        "rank": 0,
        "world_size": 2,
        "host": "machine-0",
        "process": 4000,
        "command": ["python", "secret.py"],
        "window": {
            "file": "rank0.kineto.json",
            "kind": "steps",
            "start_ns": start,
            "end_ns": start + 5,
        },
        "steps": {"start_ns": [start], "duration_ns": [9], "state": ["recorded"]},
    }
    write_json(
        folder / "capture.json", {"format": "traceloom-capture", "version": 1, "ranks": [entry]}
    )
    outcome = run(folder)
    session = load(outcome.output, cache=False)
    assert session.capture is not None
    entry = session.capture["ranks"][0]
    assert (
        entry["window"]["start_ns"] == entry["steps"]["start_ns"][0] == session.traces[0].start_ns
    )
    assert entry["process"] == session.traces[0].meta.process
    assert "command" not in entry


@pytest.mark.thorough
def test_the_command_prints_both_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [str(path) for path in ranks(tmp_path / "in")]
    out, key = tmp_path / "out", tmp_path / "secret.key"
    assert (
        main(
            [
                "anonymize",
                *sources,
                "-o",
                str(out),
                "--key",
                str(key),
                "--map",
                str(tmp_path / "map.json"),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    for words in (
        "Utility: what the analyses say",
        "equal    critical path",
        "equal    re-timing",
        "Leaks: distinct texts",
        "keep it to yourself",
        "do not share it",
        f"traceloom report {out}",
    ):
        assert words in said
    assert (
        main(["anonymize", *sources, "-o", str(out), "--key", str(key), "--json", "--force"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.anonymize.json").read_text())
    assert printed["format"] == "traceloom-anonymize-report"
