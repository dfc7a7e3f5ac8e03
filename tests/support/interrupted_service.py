"""`traceloom serve` that sends itself a signal at a point of the way, once: `POINT before|after SIGNAL SERVE...`.

POINT is a state of a request (`armed`), as it is written down, or `commit`: rows of captures go into the tables.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from traceloom.cli import main
from traceloom.fleet.service import committer
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.objects import ObjectStore
from traceloom.fleet.store.tables import Tables


def interrupted(point: str, when: str, number: int) -> None:
    """Have this process interrupted there."""
    waiting = [number]

    def around(real: Callable[..., Any], is_there: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            there = is_there(*arguments) and bool(waiting)
            if there and when == "before":
                os.kill(os.getpid(), waiting.pop())
            result = real(*arguments, **named)
            if there and when == "after":
                os.kill(os.getpid(), waiting.pop())
            return result

        return call

    def is_state(
        _state: ServiceState, _name: str, _asked_ns: int, document: str, _term: str
    ) -> bool:
        return bool(json.loads(document)["state"] == point)

    def is_commit(
        _tables: Tables, source: str, _number: int, rows: Mapping[str, object], *_: object
    ) -> bool:
        return point == "commit" and source.startswith("captures") and bool(rows)

    def here(state: str, store: str) -> committer.TableWriter:
        return committer.TableWriter(ServiceState(state), ObjectStore(store), Tables(store))

    # So that a point of a commit is in this process.
    committer.WriterProcess = here  # type: ignore[assignment,misc]
    ServiceState.put_request = around(ServiceState.put_request, is_state)  # type: ignore[method-assign]
    Tables.commit = around(Tables.commit, is_commit)  # type: ignore[method-assign]


if __name__ == "__main__":
    interrupted(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.exit(main(["serve", *sys.argv[4:]]))
