"""Small workloads with known answers, for tests, validation and simulation; the same files on every run."""

from __future__ import annotations

import json
from pathlib import Path

from traceloom.chakra.generate.collectives import ALGORITHMS, KINDS, CollectiveOptions, collectives
from traceloom.chakra.generate.pipeline import SCHEDULES, PipelineOptions, pipeline
from traceloom.chakra.generate.program import SCHEMA, VERSION, Generated, RankProgram
from traceloom.chakra.generate.transformer import TransformerOptions, memory_bytes, transformer
from traceloom.chakra.plain import plain_metadata, write_plain

STAGE = "pre-transformed"  # the workload as it is written down; nothing has compiled or run it

__all__ = [
    "ALGORITHMS",
    "KINDS",
    "SCHEDULES",
    "SCHEMA",
    "VERSION",
    "CollectiveOptions",
    "Generated",
    "PipelineOptions",
    "RankProgram",
    "TransformerOptions",
    "collectives",
    "memory_bytes",
    "pipeline",
    "transformer",
    "write_generated",
]


def write_generated(generated: Generated, directory: str | Path, *, force: bool = False) -> list[Path]:
    """Write `workload.<rank>.et` and the group file; the metadata of every file describe the whole workload.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    description = json.dumps(generated.to_dict())
    ranks = [
        (plain_metadata(SCHEMA, {"rank": p.rank, "stage": STAGE, "generated": description}), p.plain())
        for p in generated.programs
    ]
    return write_plain(Path(directory), ranks, generated.groups, force=force)
