"""Generated workloads: right for everybody, the same every time, and what is said to be known of them is so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traceloom.cli import main
from traceloom.errors import UsageError
from traceloom.formats.chakra.et_pb2 import NodeType
from traceloom.formats.chakra.nodes import NodeFrame, read_table
from traceloom.workload.chakra.generate import (
    ALGORITHMS,
    KINDS,
    CollectiveOptions,
    Generated,
    PipelineOptions,
    TransformerOptions,
    generate_collectives,
    generate_pipeline,
    generate_transformer,
    write_generated,
)
from traceloom.workload.chakra.validate import validate

MESSAGES = {
    ("ring", "all_reduce"): lambda n: 2 * (n - 1) * n,
    ("ring", "reduce_scatter"): lambda n: (n - 1) * n,
    ("ring", "all_gather"): lambda n: (n - 1) * n,
    ("ring", "broadcast"): lambda n: n - 1,
    ("tree", "all_reduce"): lambda n: 2 * (n - 1),
    ("tree", "reduce"): lambda n: n - 1,
    ("tree", "broadcast"): lambda n: n - 1,
    ("direct", "all_reduce"): lambda n: 2 * (n - 1) * n,
    ("direct", "reduce_scatter"): lambda n: (n - 1) * n,
    ("direct", "all_gather"): lambda n: (n - 1) * n,
    ("direct", "all_to_all"): lambda n: (n - 1) * n,
    ("direct", "broadcast"): lambda n: n - 1,
    ("direct", "reduce"): lambda n: n - 1,
    ("direct", "gather"): lambda n: n - 1,
    ("direct", "scatter"): lambda n: n - 1,
}


def bytes_sent(algorithm: str, kind: str, n: int, size: int) -> int:
    """What all ranks send together, in closed form."""
    if kind == "all_gather":
        return n * (n - 1) * size
    if algorithm == "tree" or kind in ("broadcast", "reduce"):
        return MESSAGES[algorithm, kind](n) * size
    if kind in ("gather", "scatter"):
        return size - size // n  # all but the root's own part, which is the first one
    return (2 if kind == "all_reduce" else 1) * (n - 1) * size


def written(generated: Generated, home: Path) -> list[NodeFrame]:
    """Written, right for everybody, read again."""
    files = write_generated(generated, home / "set")
    assert validate(home / "set").problems == ()
    return [read_table(path) for path in files if path.suffix == ".et"]


def last_end(files: list[NodeFrame]) -> int:
    """Longest path over all ranks in µs, where a message arrives as soon as it is sent."""
    nodes = {(r, row["id"]): row for r, t in enumerate(files) for row in t.nodes.rows(named=True)}
    before = {key: [] for key in nodes}
    for r, table in enumerate(files):
        ids = table.nodes["id"].to_list()
        for row, awaited in zip(table.data.row.tolist(), table.data.id.tolist(), strict=True):
            before[r, ids[row]].append((r, awaited))
    sends = {
        (n["comm_src"], n["comm_dst"], n["comm_tag"]): k
        for k, n in nodes.items()
        if n["type"] == NodeType.COMM_SEND_NODE
    }
    for key, n in nodes.items():
        if n["type"] == NodeType.COMM_RECV_NODE:
            before[key].append(sends[n["comm_src"], n["comm_dst"], n["comm_tag"]])
    ends: dict[tuple[int, int], int] = {}
    todo = list(nodes)
    while todo:
        key = todo[-1]
        missing = [each for each in before[key] if each not in ends]
        if key in ends or not missing:
            ends.setdefault(
                key,
                max((ends[each] for each in before[key]), default=0) + nodes[key]["duration_us"],
            )
            todo.pop()
        else:
            todo += missing
    return max(ends.values())


class TestCollectives:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_as_one_node(self, tmp_path: Path, kind: str) -> None:
        generated = generate_collectives(CollectiveOptions(kind, ranks=4, size=4096, compute_us=5))
        files = written(generated, tmp_path)
        assert [len(f) for f in files] == [2] * 4
        assert generated.totals["comm_bytes"] == [0 if kind == "barrier" else 4096] * 4

    @pytest.mark.sampled(15)
    @pytest.mark.parametrize(
        "ranks",
        [2, 5, 8, *(pytest.param(ranks, marks=pytest.mark.thorough) for ranks in (3, 4, 13))],
    )
    @pytest.mark.parametrize(("algorithm", "kind"), MESSAGES)
    def test_algorithms_send_what_they_must(
        self, tmp_path: Path, algorithm: str, kind: str, ranks: int
    ) -> None:
        size = 1001
        generated = generate_collectives(
            CollectiveOptions(kind, ranks=ranks, size=size, algorithm=algorithm, compute_us=1)
        )
        written(generated, tmp_path)
        assert generated.totals["messages"] == MESSAGES[algorithm, kind](ranks)
        assert sum(generated.totals["sent_bytes"]) == bytes_sent(algorithm, kind, ranks, size)

    def test_a_ring_sends_evenly(self) -> None:
        sent = generate_collectives(
            CollectiveOptions(ranks=8, size=1 << 20, algorithm="ring")
        ).totals["sent_bytes"]
        assert sent == [2 * 7 * (1 << 20) // 8] * 8

    @pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
    def test_messages_go_on_only_after_what_they_carry_has_come(
        self, tmp_path: Path, algorithm: str
    ) -> None:
        ranks = 8
        files = written(
            generate_collectives(CollectiveOptions(ranks=ranks, algorithm=algorithm, compute_us=1)),
            tmp_path,
        )
        # Before it 1, then one for each message that is reduced; inner ranks of the two trees have two children each.
        depth = {
            "ring": 7,
            "direct": 7,
            "halving-doubling": 3,
            "tree": 3,
            "double-tree": 2 + 2 + 1,
            "two-level": 7,
        }
        assert last_end(files) == 1 + depth[algorithm]

    def test_what_an_algorithm_cannot_do_is_refused(self) -> None:
        with pytest.raises(UsageError, match="no ring algorithm for gather"):
            generate_collectives(CollectiveOptions("gather", algorithm="ring"))
        with pytest.raises(UsageError, match="fewer than one for each"):
            generate_collectives(CollectiveOptions(size=3, ranks=4))

    def test_astra_sim_takes_what_it_knows(self, tmp_path: Path) -> None:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            write_generated(generate_collectives(CollectiveOptions(kind)), tmp_path / kind)
            assert validate(tmp_path / kind, target="astra-sim").problems == ()
        write_generated(
            generate_collectives(CollectiveOptions(algorithm="ring", compute_us=3)),
            tmp_path / "ring",
        )
        assert validate(tmp_path / "ring", target="astra-sim").problems == ()


class TestPipeline:
    @pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
    @pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 4), (4, 8), (5, 3)])
    def test_the_step_takes_what_is_known(
        self, tmp_path: Path, schedule: str, ranks: int, micro_batches: int
    ) -> None:
        generated = generate_pipeline(PipelineOptions(ranks, micro_batches, schedule))
        files = written(generated, tmp_path)
        assert last_end(files) == generated.totals["step_us"] == (micro_batches + ranks - 1) * 300
        assert generated.totals["compute_us"] == [micro_batches * 300] * ranks
        assert validate(tmp_path / "set", target="astra-sim").problems == ()

    def test_1f1b_holds_fewer_micro_batches(self) -> None:
        assert generate_pipeline(PipelineOptions(4, 8, "1f1b")).totals["activations"] == [
            4,
            3,
            2,
            1,
        ]
        assert generate_pipeline(PipelineOptions(4, 8, "gpipe")).totals["activations"] == [
            8,
            8,
            8,
            8,
        ]


class TestTransformer:
    @pytest.mark.parametrize(
        ("data", "tensor", "stages"),
        [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 4, 2), (3, 1, 2), (1, 1, 1)],
    )
    def test_it_is_right_however_it_is_shared(
        self, tmp_path: Path, data: int, tensor: int, stages: int
    ) -> None:
        generated = generate_transformer(
            TransformerOptions(data, tensor, stages, layers=4, hidden=64)
        )
        files = written(generated, tmp_path)
        assert len(files) == data * tensor * stages
        alone = ["one-rank"] if len(files) == 1 else []
        assert [
            problem.rule for problem in validate(tmp_path / "set", target="astra-sim").problems
        ] == alone

    def test_operations_do_not_depend_on_how_it_is_shared(self) -> None:
        def model(data: int, tensor: int, stages: int, micro_batches: int) -> int:
            made = generate_transformer(
                TransformerOptions(
                    data, tensor, stages, layers=4, hidden=64, micro_batches=micro_batches
                )
            )
            weights = 12 * 64**2 * 4
            return sum(made.totals["operations"]) - data * 12 * weights  # without the optimizers

        tokens, width = 1024 * 8, 64
        expected = 3 * 4 * (24 * width**2 + 4 * width * 1024) * tokens
        assert {model(1, 1, 1, 8), model(2, 1, 1, 4), model(1, 2, 2, 8), model(2, 2, 2, 4)} == {
            expected
        }

    def test_gradients_of_all_weights_are_reduced_once(self) -> None:
        made = generate_transformer(TransformerOptions(2, 1, 2, layers=4, hidden=64))
        assert made.totals["collective_bytes"] == [{"all_reduce": 2 * 12 * 64**2 * 2}] * 4

    def test_what_cannot_be_shared_is_refused(self) -> None:
        with pytest.raises(UsageError, match="cannot be shared"):
            generate_transformer(TransformerOptions(layers=3))


class TestCommand:
    def test_the_same_files_every_time(self, tmp_path: Path, capsys) -> None:
        for name in ("a", "b"):
            assert (
                main(["generate", "transformer", "--hidden", "64", "-o", str(tmp_path / name)]) == 0
            )
        for path in sorted((tmp_path / "a").iterdir()):
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

    def test_what_is_known_is_said_and_stands_in_the_metadata(self, tmp_path: Path, capsys) -> None:
        home = tmp_path / "p"
        assert (
            main(
                [
                    "generate",
                    "pipeline",
                    "--ranks",
                    "2",
                    "--micro-batches",
                    "3",
                    "-o",
                    str(home),
                    "--json",
                ]
            )
            == 0
        )
        said = json.loads(capsys.readouterr().out)
        assert said["totals"]["step_us"] == 1200
        metadata = read_table(home / "workload.1.et").metadata
        assert {a.name: a.string_val for a in metadata.attr}["generated"] == json.dumps(said)

    def test_the_last_line_says_what_was_written(self, tmp_path: Path, capsys) -> None:
        home = tmp_path / "c"
        assert (
            main(["generate", "collective", "--size", "64kB", "--ranks", "3", "-o", str(home)]) == 0
        )
        out = capsys.readouterr().out.splitlines()
        assert "64,000 on each of 3 ranks" in out[0]
        assert out[-1] == f"Wrote {home} (4 files, 3 nodes); next: traceloom validate {home}"
        assert main(["generate", "collective", "-o", str(home)]) == 3
        assert main(["generate", "collective", "-o", str(home), "--force", "--quiet"]) == 0

    @pytest.mark.parametrize(
        "arguments",
        [
            ["pipeline", "--hidden", "8"],
            ["collective", "--collective", "nothing"],
            ["collective", "--ranks", "1"],
            ["collective", "--size", "large"],
            ["transformer", "--tflops", "nan"],
            ["nothing"],
        ],
    )
    def test_a_wrong_call_is_exit_code_2(
        self, tmp_path: Path, capsys, arguments: list[str]
    ) -> None:
        assert main(["generate", *arguments, "-o", str(tmp_path / "x")]) == 2
        assert not (tmp_path / "x").exists()
