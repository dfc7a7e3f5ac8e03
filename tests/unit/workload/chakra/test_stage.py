"""Every graph says whether it is the model as written, as compiled, or as it was executed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.small_graph import small_graph
from traceloom.formats.chakra.files import EtReader, EtWriter, write_with
from traceloom.graph.graph import STAGES
from traceloom.workload.chakra.astra_sim import to_astra_sim
from traceloom.workload.chakra.generate import PipelineOptions, generate_pipeline, write_generated
from traceloom.workload.chakra.graph_read import read_graph, write_ranks


def _files(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.suffix == ".et"]


def test_a_generated_workload_is_the_model_as_written(tmp_path: Path) -> None:
    paths = write_generated(generate_pipeline(PipelineOptions(ranks=2)), tmp_path / "made")
    assert read_graph(_files(paths)).stage == "pre-transformed"


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_survives_files_and_targets(tmp_path: Path, stage: str) -> None:
    graph = replace(small_graph(), stage=stage)
    assert read_graph(_files(write_ranks(graph, tmp_path / "et"))).stage == stage
    assert read_graph(_files(to_astra_sim(graph).write(tmp_path / "sim"))).stage == stage


def test_files_that_say_nothing_or_nonsense_count_as_recorded(tmp_path: Path) -> None:
    paths = _files(write_generated(generate_pipeline(PipelineOptions(ranks=2)), tmp_path / "made"))
    with EtReader(paths[0]) as reader:
        metadata, nodes = reader.metadata, list(reader)
    for attribute in metadata.attr:
        if attribute.name == "stage":
            attribute.string_val = "half-baked"

    def fill(writer: EtWriter) -> None:
        for message in (metadata, *nodes):
            writer.message(message)

    write_with(tmp_path / "odd.et", fill)
    assert read_graph([tmp_path / "odd.et"]).stage == "profiled"
