"""capture.json: rewritten key by key; what is not in the format, or tells the place, is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from traceloom.anonymize.account import Account
from traceloom.anonymize.metadata import BASE_NS, Metadata, rank_list, text_of
from traceloom.anonymize.names import Pseudonyms
from traceloom.anonymize.policy import KEEP, Policy
from traceloom.anonymize.public import is_type
from traceloom.anonymize.shapes import Shapes
from traceloom.model.graph import STAGES

Rule = Callable[[Any], Any]
_STATES = frozenset(("recorded", "graph", "early", "disturbed", "unrecorded"))
_KINDS = frozenset(("steps", "early", "time", "block"))
_SOURCES = frozenset(("optimizer", "profiler", "call", "backward", "none", "mark"))
_DEVICES = frozenset(("cuda", "xpu", "cpu", "mps"))
_ENDS = frozenset(("exit", "os._exit", "SIGTERM", "block", "running"))
_VERSION_KEYS = ("python", "torch", "cuda", "hip", "xpu", "nccl")
_SETTINGS = (
    "first_step", "step_count", "after_seconds", "duration_seconds", "stacks", "memory", "module_names", "shapes",
    "graph_step", "sources",
)  # fmt: skip
_OVERHEAD = (
    "unrecorded_steps", "unrecorded_median_ns", "unrecorded_cpu_median_ns", "recorded_steps", "recorded_median_ns",
    "recorded_cpu_median_ns", "ratio", "ratio_low", "ratio_high", "graph_step_ns", "graph_step_ratio",
)  # fmt: skip
_RATIOS = frozenset(("cpu", "wall"))
_NOTICES = frozenset(
    (
        "no-early-stacks",
        "disk-full",
        "capture-moved",
        "no-memory-snapshot",
        "no-memory-history",
        "not-compressed",
        "sources-left-out",
    )
)
# Who owned which memory: addresses, and names of modules and parameters.
_LEFT_OUT = ("live_storages_at_start", "live_storages_at_end", "out_of_memory", "allocators_at_end")


class Captures:
    """Rewrites capture.json.

    Args:
        names: What names become.
        shapes: What sizes become.
        policy: The choices.
        account: Told what is left out.
        origin_ns: Subtracted from all times.
        files: Old name of a file -> new name; files that are not rewritten are not named any more.
    """

    def __init__(  # noqa: PLR0917  (what all rewriting needs)
        self, names: Pseudonyms, shapes: Shapes, policy: Policy, account: Account, origin_ns: int, files: dict[str, str]
    ) -> None:
        self._names = names
        self._shapes = shapes
        self._account = account
        self._files = files
        self._metadata = Metadata(names, policy, account)
        self._keeps_times = policy.times == KEEP
        moved_ns = 0 if self._keeps_times else BASE_NS - origin_ns
        self._time = _through(lambda time_ns: time_ns + moved_ns)

    def rewrite(self, document: dict[str, Any]) -> bytes:
        """The new capture.json."""
        ranks = document.get("ranks")
        timed = dict.fromkeys(("exit_code", "signal"), _whole) | dict.fromkeys(("started_ns", "ended_ns"), self._time)
        out: dict[str, Any] = {
            "format": "traceloom-capture",
            "version": 1,
            "traceloom": self._metadata.version(document.get("traceloom")),
            "stage": stage if (stage := document.get("stage")) in STAGES else None,
            "run": self._by(document.get("run"), timed, "run"),
            "ranks": [],
        }
        for entry in ranks if isinstance(ranks, list) else []:
            if isinstance(entry, dict):  # its name is that of its file, or its number
                window, rank = entry.get("window"), entry.get("rank")
                name = f"rank{rank}" if isinstance(rank, int) and not isinstance(rank, bool) else None
                file = self._file(window.get("file")) if isinstance(window, dict) else None
                if file is not None:
                    name = file.rpartition("/")[2].partition(".")[0]
                out["ranks"].append(self._by(entry, self._rank_rules(name), "rank"))
        for key in document.keys() - out.keys():
            self._account.drop(f"capture.{key}", text_of(document[key]), unknown=True)
        text = json.dumps(out, separators=(",", ":")).encode() + b"\n"
        self._account.scan(text)
        return text

    def _by(self, value: Any, rules: dict[str, Rule], where: str) -> dict[str, Any]:
        """An object by its rules; a key without a rule, and a value that its rule does not know, are left out."""
        out: dict[str, Any] = {}
        for key, item in value.items() if isinstance(value, dict) else ():
            rule = rules.get(key)
            made = rule(item) if rule is not None and item is not None else None
            if rule is not None and (made is not None or item is None):
                out[key] = made
            else:
                self._account.drop(f"{where}.{key}", text_of(item), unknown=rule is None)
        return out

    def _file(self, value: Any) -> str | None:
        return self._files.get(value) if isinstance(value, str) else None

    def _rank_rules(self, name: str | None) -> dict[str, Rule]:
        names, shapes, metadata = self._names, self._shapes, self._metadata

        def objects(rules: dict[str, Rule], where: str) -> Rule:
            return lambda value: [self._by(item, rules, where) for item in (value if isinstance(value, list) else [])]

        def columns(rules: dict[str, Rule], where: str) -> Rule:
            each = {key: _each(rule) for key, rule in rules.items()}
            return lambda value: self._by(value, each, where)

        def group(value: Any) -> str:
            return names.group(str(value))

        def live(value: Any) -> dict[str, Any]:
            return {
                key: shapes.total(number)
                for key, number in (value.items() if isinstance(value, dict) else ())
                if re.fullmatch(r"(cpu|cuda|xpu|hip|mps|meta)(:\d{1,3})?", key) and isinstance(number, int)
            }

        size, process = _through(shapes.size), _through(names.process)
        device: dict[str, Rule] = {
            "device": _whole, "memory_bytes": _whole, "multiprocessors": _whole, "name": metadata.device_name,
            "kind": _word_of(_DEVICES), "current": lambda item: item if isinstance(item, bool) else None,
        }  # fmt: skip
        window_rules: dict[str, Rule] = {
            "file": self._file, "kind": _word_of(_KINDS), "first_step": _whole,
            "step_count": _whole, "start_ns": self._time, "end_ns": self._time,
        }  # fmt: skip
        graph_step: dict[str, Rule] = {
            "step": _whole,
            "duration_ns": _whole,
            "file": self._file,
            "host_file": self._file,
            "sources": lambda _: None,  # code
        }
        groups: dict[str, Rule] = {
            "name": group, "group": group, "description": lambda item: names.description(str(item)),
            "backend": metadata.backend, "ranks": rank_list, "size": _whole,
        }  # fmt: skip
        collectives: dict[str, Rule] = {
            **dict.fromkeys(("group", "kind", "type", "sequence", "peer"), _whole),
            "groups": group, "kinds": lambda item: names.operation(str(item)),
            "types": lambda item: item if is_type(str(item)) else "",
            "bytes_in": size, "bytes_out": size, "start_ns": self._time, "thread": process,
        }  # fmt: skip
        steps = {"start_ns": self._time, "duration_ns": _whole, "cpu_ns": _whole, "state": _word_of(_STATES)}
        overhead = dict.fromkeys(_OVERHEAD, _number) | {"ratio_of": _word_of(_RATIOS)}
        notices = objects({"slug": _word_of(_NOTICES)}, "notices")  # the slug alone: messages hold paths
        # Times that are moved stand on the clock of the capture already.
        of_clock: Rule = _whole if self._keeps_times else lambda _: None
        clock = dict.fromkeys(("offset_ns", "error_ns"), of_clock)
        counts = ("rank", "world_size", "local_rank", "logical_cpus", "usable_cpus", "torch_threads")
        return {
            **dict.fromkeys(counts, _whole),
            "name": lambda _: name,
            "job": group,
            "incidental": _number,
            "host": metadata.host,
            "clock": lambda value: self._by(value, clock, "clock"),
            "process": process,
            "devices": objects(device, "devices"),
            "versions": lambda value: self._by(value, dict.fromkeys(_VERSION_KEYS, metadata.version), "versions"),
            "settings": lambda value: self._by(value, dict.fromkeys(_SETTINGS, _number), "settings"),
            "groups": objects(groups, "groups"),
            "created_ns": self._time,
            "written_ns": self._time,
            # Of an exception that ended the process not even the name, which may be the user's.
            "ended": lambda value: "exception" if str(value).startswith("exception") else _word_of(_ENDS)(value),
            "replay_of": lambda value: "a recorded run" if isinstance(value, str) else None,  # that it is one
            "window": lambda value: self._by(value, window_rules, "window"),
            "windows": objects(window_rules, "window"),
            "graph_step": lambda value: self._by(value, graph_step, "graph_step"),
            "step_source": _word_of(_SOURCES),
            "steps": columns(steps, "steps"),
            "collectives": columns(collectives, "collectives"),
            "live_bytes_at_start": live,
            "thread_cpu": columns({"thread": process, "time_ns": self._time, "cpu_ns": _whole}, "thread_cpu"),
            "overhead": lambda value: self._by(value, overhead, "overhead"),
            "notices": lambda value: [out | {"message": ""} if out else {} for out in notices(value)],
            **dict.fromkeys(_LEFT_OUT, lambda _: None),
        }


def _word_of(words: frozenset[str]) -> Rule:
    return lambda value: value if isinstance(value, str) and value in words else None


def _each(rule: Rule) -> Rule:
    """A rule for every item of a list; None where there is no list."""
    return lambda items: [None if item is None else rule(item) for item in items] if isinstance(items, list) else None


def _through(function: Callable[[int], int]) -> Rule:
    """A rule for whole numbers: what a function makes of them."""
    return lambda value: None if (number := _whole(value)) is None else function(number)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _number(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else None
