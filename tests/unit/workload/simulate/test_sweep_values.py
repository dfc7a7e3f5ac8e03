"""Values that a sweep is given, and what files say of how they were made: right ones count, others are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.jobs import ParallelRecipe, parallel_job
from support.workload import METADATA, node
from traceloom.errors import InputError, UsageError
from traceloom.formats.chakra import files
from traceloom.formats.chakra.et_pb2 import AttributeProto, GlobalMetadata
from traceloom.workload.chakra.generate import (
    SCHEMA,
    VERSION,
    CollectiveOptions,
    PipelineOptions,
    TransformerOptions,
    generate_collectives,
    generate_pipeline,
    generate_transformer,
    write_generated,
)
from traceloom.workload.simulate.machine import AlgorithmRule, Dimension, Machine
from traceloom.workload.simulate.machine_file import machine_text
from traceloom.workload.simulate.native import run
from traceloom.workload.simulate.sweep import SweepEvaluator, SweepQuestion


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("values")
    write_generated(
        generate_collectives(CollectiveOptions("all_reduce", ranks=4, size=1 << 20)),
        home / "collective",
    )
    write_generated(generate_pipeline(PipelineOptions(2, 2)), home / "pipeline")
    write_generated(
        generate_transformer(TransformerOptions(layers=2, hidden=64)), home / "transformer"
    )
    parallel_job(ParallelRecipe(data=2, steps=2, layers=1)).run().write(home / "run")
    rules = (AlgorithmRule("all_reduce", "ring"),)
    machine = Machine((Dimension("switch", 4, 10.0, 100.0),), algorithms=rules)
    (home / "machine.toml").write_text(machine_text(machine), encoding="utf-8")
    return home


def evaluator(folder: Path, name: str) -> SweepEvaluator:
    return SweepEvaluator(
        SweepQuestion((str(folder / name),), machine=str(folder / "machine.toml"), draws=5)
    )


@pytest.mark.parametrize(
    ("name", "point", "reason"),
    [
        ("collective", {"ranks": "x"}, "`ranks` is a whole number above 0, not x"),
        ("collective", {"ranks": 1.5}, "`ranks` is a whole number above 0, not 1.5"),
        ("collective", {"ranks": 0}, "`ranks` is a whole number above 0, not 0"),
        ("collective", {"size": -1}, "`size` is a whole number of at least 0, not -1"),
        ("collective", {"algorithm": 3}, "`3` is no algorithm"),
        ("collective", {"collective": "dance"}, "`dance` is no collective"),
        ("pipeline", {"schedule": "gpip"}, "`gpip` is no schedule"),
        ("pipeline", {"size": float("inf")}, "`size` is a whole number of at least 0, not inf"),
        ("transformer", {"tflops": "fast"}, "`tflops` is a number above 0, not fast"),
        ("transformer", {"tflops": 0}, "`tflops` is a number above 0, not 0"),
        (
            "transformer",
            {"pipeline_parallel": 0},
            "`pipeline_parallel` is a whole number above 0, not 0",
        ),
        (
            "transformer",
            {"data_parallel": 1.5},
            "`data_parallel` is a whole number above 0, not 1.5",
        ),
        (
            "transformer",
            {"global_batch": "all"},
            "`global_batch` is a whole number above 0, not all",
        ),
        ("run", {"ranks": "many"}, "`ranks` is a whole number above 0, not many"),
        ("run", {"data_parallel": 2.5}, "`data_parallel` is a whole number above 0, not 2.5"),
        ("run", {"host_factor": "slow"}, "`host_factor` is a number above 0, not slow"),
    ],
)
def test_a_value_that_means_nothing_is_the_reason_of_its_point(
    folder: Path, name: str, point: dict[str, Any], reason: str
) -> None:
    row = evaluator(folder, name)(point)
    assert row["reason"] == reason
    assert row["time_ns"] is None


def test_right_values_have_the_answers_of_what_they_generate(folder: Path, tmp_path: Path) -> None:
    """A ring of n ranks over a switch: 2 (n - 1) steps of two links and an n-th of the bytes."""
    asked = evaluator(folder, "collective")
    for ranks, size in ((2, 4_000), (4, 80_000), (8, 1 << 20)):
        row = asked({"ranks": ranks, "size": float(size)})  # as ranges of halves give it
        assert row["reason"] is None
        assert row["time_ns"] == pytest.approx(2 * (ranks - 1) * (200 + size / ranks / 10), abs=1)
        assert row["ranks"] == ranks
    schedules = {
        name: evaluator(folder, "pipeline")({"schedule": name, "micro_batches": 6})
        for name in ("1f1b", "gpipe")
    }
    for name, row in schedules.items():
        write_generated(generate_pipeline(PipelineOptions(2, 6, name)), tmp_path / name)
        machine = Machine((Dimension("switch", 2, 10.0, 100.0),))
        assert row["time_ns"] == run(tmp_path / name, machine).after_ns
    batch = evaluator(folder, "transformer")({"global_batch": 8, "data_parallel": 2})
    assert batch["samples"] == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[1, 2]",
        "7",
        '{"kind": ["x"], "options": {}}',
        '{"kind": "pipeline", "options": [1]}',
        '{"kind": "dance", "options": {}}',
        "[" * 100_000,
    ],
)
def test_whatever_files_say_of_how_they_were_made_they_are_files(text: str, tmp_path: Path) -> None:
    metadata = GlobalMetadata(version=METADATA.version)
    metadata.attr.append(AttributeProto(name="generated", string_val=text))
    files.write(tmp_path / "workload.0.et", metadata, [node(1, us=4)], force=True)
    asked = SweepEvaluator(SweepQuestion((str(tmp_path),)))
    assert asked.generated is None
    assert asked({})["time_ns"] == 4_000


def test_a_workload_that_was_generated_in_another_version_is_refused(tmp_path: Path) -> None:
    metadata = GlobalMetadata(version=METADATA.version)
    metadata.attr.append(
        AttributeProto(name="generated", string_val=json.dumps({"format": SCHEMA, "version": 2}))
    )
    files.write(tmp_path / "workload.0.et", metadata, [node(1, us=4)], force=True)
    with pytest.raises(InputError) as refused:
        _ = SweepEvaluator(SweepQuestion((str(tmp_path),))).generated
    assert refused.value.slug == "other-version"


def test_options_that_files_make_up_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    for options, reason in (
        ({"ranks": "x"}, "`ranks` is a whole number above 0, not x"),
        ({"micro_batches": [1]}, "`micro_batches` is a whole number above 0, not [1]"),
        ({"ranks": 2, "nobody": 1}, None),
    ):
        metadata = GlobalMetadata(version=METADATA.version)
        text = json.dumps(
            {"format": SCHEMA, "version": VERSION, "kind": "pipeline", "options": options}
        )
        metadata.attr.append(AttributeProto(name="generated", string_val=text))
        files.write(tmp_path / "workload.0.et", metadata, [node(1)], force=True)
        machine = str(folder / "machine.toml")
        asked = SweepEvaluator(SweepQuestion((str(tmp_path),), machine=machine))
        assert asked({"size": 10})["reason"] == reason
        with pytest.raises(UsageError, match="nothing that can be swept"):
            asked.check(["sizes"])
