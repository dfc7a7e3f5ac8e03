"""The file that says which ranks are in which group: `comm_groups.json`, as simulators read it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from traceloom.errors import InputError
from traceloom.files import read_small

GROUP_FILES = ("comm_groups.json", "comm_group.json")  # the first is written
FILES_OF_RANKS = r"workload\.[^/]*\.et(\.gz)?|comm_groups\.json"
"""What a directory with the files of all ranks holds, as a regular expression."""
MOST_GROUP_BYTES = 1 << 28


@dataclass(frozen=True)
class GroupFile:
    """The group file of a set.

    Attributes:
        path: Where it was read from; empty where there is none.
        members: Ranks of each group, by name.
        faults: What is wrong with it, in words.
    """

    path: str = ""
    members: dict[str, tuple[int, ...]] | None = None
    faults: tuple[str, ...] = ()


def read_groups(path: Path) -> GroupFile:
    """A group file: a JSON object with the name of each group and the list of its ranks.

    Raises:
        InputError: `not-a-group-file`: it cannot be read at all.
    """
    try:
        document = json.loads(read_small(path, MOST_GROUP_BYTES))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"the group file cannot be read: {reason}", slug="not-a-group-file", where=str(path)
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"no group file: {error}", slug="not-a-group-file", where=str(path)) from error
    if not isinstance(document, dict):
        raise InputError("a group file is a JSON object", slug="not-a-group-file", where=str(path))
    members: dict[str, tuple[int, ...]] = {}
    faults: list[str] = []
    for name, ranks in document.items():
        is_rank_list = isinstance(ranks, list) and all(
            isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks
        )
        if is_rank_list:
            members[name] = tuple(ranks)
            if len(set(ranks)) < len(ranks):
                faults.append(f"group `{name}` names a rank twice")
        else:
            faults.append(f"group `{name}` is not a list of ranks")
    return GroupFile(str(path), members, tuple(faults))


def group_text(groups: Mapping[str, Iterable[int]]) -> str:
    """A group file's text, as simulators read it."""
    return json.dumps({name: list(ranks) for name, ranks in groups.items()}, indent=1) + "\n"
