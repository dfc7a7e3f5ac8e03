"""Graph to the files that ASTRA-sim takes: `PREFIX.RANK.et` for ranks from 0, and the group file.

ASTRA-sim honours dependencies between ends and starts only, runs one CPU operation, one GPU operation and one
communication of a rank at a time, and starts what is ready in the order of ids. So:
- host nodes run together to units (see `units`), and with `gpu_only` their order is folded into dependencies;
- what is left out passes on what it waited for (see `order`): nothing dangles, and no order is lost;
- communication that it does not have becomes something that it has (see `communication`);
- communication gets one order over all ranks, where nothing orders it: ranks in different orders hang silently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traceloom.chakra.astra_sim.layout import lay_out
from traceloom.chakra.plain import PlainNodes, plain_metadata, write_plain
from traceloom.model.graph import Graph, Stage
from traceloom.model.notice import Notice

SCHEMA = "traceloom-astra-sim"


@dataclass(frozen=True)
class AstraSim:
    """What is written for ASTRA-sim.

    Attributes:
        ranks: The rank in the graph of each file, by the file's number.
        files: The nodes of each file.
        groups: Members of the groups that are not all ranks, by number.
        notices: What was changed or left out, counted.
        stage: Which of Chakra's kinds of graph it was made of.
    """

    ranks: tuple[int, ...]
    files: tuple[PlainNodes, ...]
    groups: dict[str, list[int]]
    notices: tuple[Notice, ...]
    stage: Stage = "profiled"

    def write(self, directory: str | Path, *, force: bool = False) -> list[Path]:
        """Write all files, or nothing.

        Raises:
            OutputError: `file-exists`, `cannot-write`.
        """
        notices = json.dumps([notice.to_dict() for notice in self.notices])
        parts = [
            (plain_metadata(SCHEMA, {"recorded_rank": rank, "stage": self.stage, "notices": notices}), nodes)
            for rank, nodes in zip(self.ranks, self.files, strict=True)
        ]
        return write_plain(Path(directory), parts, self.groups, force=force)


def to_astra_sim(graph: Graph, *, gpu_only: bool = False) -> AstraSim:
    """What ASTRA-sim needs of a graph.

    Args:
        graph: A calibrated graph.
        gpu_only: Leave out the work of the host. Its order goes into dependencies; where the GPU had nothing to do, a
            GPU node of that length stands for the host's time.
    """
    ranks = sorted({int(rank) for rank in graph.nodes["rank"].drop_nulls().unique()})
    files, groups, notices = lay_out(graph, ranks, gpu_only=gpu_only)
    return AstraSim(tuple(ranks), tuple(files), groups, tuple(notices), graph.stage)


__all__: Sequence[str] = ("SCHEMA", "AstraSim", "to_astra_sim")
