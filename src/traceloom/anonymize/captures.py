"""capture.json: rewritten key by key; what is not in the format, or tells the place, is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from traceloom.anonymize.account import Account
from traceloom.anonymize.metadata import BASE_NS, Metadata, rank_list
from traceloom.anonymize.names import Names
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
    "graph_step",
)  # fmt: skip
_OVERHEAD = (
    "unrecorded_steps", "unrecorded_median_ns", "unrecorded_cpu_median_ns", "recorded_steps", "recorded_median_ns",
    "recorded_cpu_median_ns", "ratio", "ratio_low", "ratio_high", "graph_step_ns", "graph_step_ratio",
)  # fmt: skip
_RATIOS = frozenset(("cpu", "wall"))


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
        self, names: Names, shapes: Shapes, policy: Policy, account: Account, origin_ns: int, files: dict[str, str]
    ) -> None:
        self._names = names
        self._shapes = shapes
        self._policy = policy
        self._account = account
        self._origin_ns = origin_ns
        self._files = files
        self._metadata = Metadata(names, policy, account)

    def rewrite(self, document: dict[str, Any]) -> bytes:
        """The new capture.json."""
        ranks = document.get("ranks")
        timed: dict[str, Rule] = {
            "exit_code": _whole,
            "signal": _whole,
            "started_ns": self._time,
            "ended_ns": self._time,
        }
        out = {
            "format": "traceloom-capture",
            "version": 1,
            "traceloom": self._metadata.version(document.get("traceloom")),
            "stage": stage if (stage := document.get("stage")) in STAGES else None,
            "run": self._by(document.get("run"), timed, "run"),
            "ranks": [self._rank(entry) for entry in _listed(ranks) if isinstance(entry, dict)],
        }
        for key in document.keys() - out.keys():
            self._account.drop(f"capture.{key}", _text(document[key]), unknown=True)
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
                self._account.drop(f"{where}.{key}", _text(item), unknown=rule is None)
        return out

    def _rank(self, entry: dict[str, Any]) -> dict[str, Any]:
        rules: dict[str, Rule] = dict.fromkeys(
            ("rank", "world_size", "local_rank", "logical_cpus", "usable_cpus", "torch_threads"), _whole
        )
        rules |= {
            "name": lambda _: self._stem(entry),
            "job": lambda item: self._names.group(str(item)),
            "incidental": _number,
            "host": self._metadata.host,
            "process": self._process,
            "devices": lambda value: [self._device(device) for device in _listed(value)],
            "versions": lambda value: self._by(value, dict.fromkeys(_VERSION_KEYS, self._version), "versions"),
            "settings": lambda value: self._by(value, dict.fromkeys(_SETTINGS, _number), "settings"),
            "groups": lambda value: [self._group(group) for group in _listed(value)],
            "created_ns": self._time,
            "written_ns": self._time,
            "ended": _ended,
            "window": self._window,
            "windows": lambda value: [self._window(window) for window in _listed(value)],
            "graph_step": self._graph_step,
            "step_source": _word_of(_SOURCES),
            "steps": self._steps,
            "collectives": self._collectives,
            "live_bytes_at_start": self._live,
            "thread_cpu": self._thread_cpu,
            "overhead": lambda value: self._by(
                value, dict.fromkeys(_OVERHEAD, _number) | {"ratio_of": _word_of(_RATIOS)}, "overhead"
            ),
            "notices": lambda value: [self._notice(notice) for notice in _listed(value)],
            **dict.fromkeys(_LEFT_OUT, _nothing),
        }  # fmt: skip
        return self._by(entry, rules, "rank")

    def _stem(self, entry: dict[str, Any]) -> str | None:
        window, rank = entry.get("window"), entry.get("rank")
        file = self._file(window.get("file")) if isinstance(window, dict) else None
        if file is not None:
            return file.rpartition("/")[2].partition(".")[0]
        return f"rank{rank}" if isinstance(rank, int) and not isinstance(rank, bool) else None

    def _version(self, value: Any) -> Any:
        return self._metadata.version(value)

    def _time(self, value: Any) -> int | None:
        time_ns = _whole(value)
        if time_ns is None or self._policy.times == KEEP:
            return time_ns
        return time_ns - self._origin_ns + BASE_NS

    def _size(self, value: Any) -> int | None:
        size = _whole(value)
        return None if size is None else self._shapes.size(size)

    def _process(self, value: Any) -> int | None:
        process = _whole(value)
        return None if process is None else self._names.process(process)

    def _file(self, value: Any) -> str | None:
        return self._files.get(value) if isinstance(value, str) else None

    def _device(self, value: Any) -> dict[str, Any]:
        rules: dict[str, Rule] = {
            "device": _whole, "memory_bytes": _whole, "multiprocessors": _whole, "name": self._metadata.device_name,
            "kind": _word_of(_DEVICES),
            "current": lambda item: item if isinstance(item, bool) else None,
        }  # fmt: skip
        return self._by(value, rules, "devices")

    def _group(self, value: Any) -> dict[str, Any]:
        rules: dict[str, Rule] = {
            "name": lambda item: self._names.group(str(item)),
            "group": lambda item: self._names.group(str(item)),
            "description": lambda item: self._names.description(str(item)),
            "backend": self._metadata.backend,
            "ranks": rank_list,
            "size": _whole,
        }
        return self._by(value, rules, "groups")

    def _window(self, value: Any) -> dict[str, Any]:
        rules: dict[str, Rule] = {
            "file": self._file, "kind": _word_of(_KINDS), "first_step": _whole,
            "step_count": _whole, "start_ns": self._time, "end_ns": self._time,
        }  # fmt: skip
        return self._by(value, rules, "window")

    def _graph_step(self, value: Any) -> dict[str, Any]:
        rules: dict[str, Rule] = {
            "step": _whole, "duration_ns": _whole, "file": self._file, "host_file": self._file
        }  # fmt: skip
        return self._by(value, rules, "graph_step")

    def _steps(self, value: Any) -> dict[str, Any]:
        rules: dict[str, Rule] = {
            "start_ns": lambda items: _each(items, self._time),
            "duration_ns": lambda items: _each(items, _whole),
            "cpu_ns": lambda items: _each(items, _whole),
            "state": lambda items: _each(items, _word_of(_STATES)),
        }
        return self._by(value, rules, "steps")

    def _collectives(self, value: Any) -> dict[str, Any]:
        rules: dict[str, Rule] = dict.fromkeys(
            ("group", "kind", "type", "sequence", "peer"), lambda items: _each(items, _whole)
        )
        rules |= {
            "groups": lambda items: _each(items, lambda item: self._names.group(str(item))),
            "kinds": lambda items: _each(items, self._kind),
            "types": lambda items: _each(items, lambda item: item if is_type(str(item)) else ""),
            "bytes_in": lambda items: _each(items, self._size),
            "bytes_out": lambda items: _each(items, self._size),
            "start_ns": lambda items: _each(items, self._time),
            "thread": lambda items: _each(items, self._process),
        }
        return self._by(value, rules, "collectives")

    def _thread_cpu(self, value: Any) -> dict[str, Any]:
        rules: dict[str, Rule] = {
            "thread": lambda items: _each(items, self._process),
            "time_ns": lambda items: _each(items, self._time),
            "cpu_ns": lambda items: _each(items, _whole),
        }
        return self._by(value, rules, "thread_cpu")

    def _kind(self, item: Any) -> str:
        return self._names.operation(str(item))

    def _live(self, value: Any) -> dict[str, Any]:
        sizes = value if isinstance(value, dict) else {}
        return {
            key: self._shapes.total(size)
            for key, size in sizes.items()
            if re.fullmatch(r"(cpu|cuda|xpu|hip|mps|meta)(:\d{1,3})?", key) and isinstance(size, int)
        }

    def _notice(self, value: Any) -> dict[str, Any]:
        """The slug alone: messages hold paths."""
        rules: dict[str, Rule] = {
            "slug": _word_of(_NOTICES),
        }  # fmt: skip
        out = self._by(value, rules, "notices")
        return out | {"message": ""} if out else {}


_NOTICES = frozenset(
    ("no-early-stacks", "disk-full", "capture-moved", "no-memory-snapshot", "no-memory-history", "not-compressed")
)


def _nothing(_: Any) -> None:
    """Known, and left out."""


def _ended(value: Any) -> str | None:
    """How a process ended; of an exception not even the name, which may be the user's."""
    return "exception" if str(value).startswith("exception") else _word_of(_ENDS)(value)


def _word_of(words: frozenset[str]) -> Rule:
    return lambda value: value if isinstance(value, str) and value in words else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _each(items: Any, rule: Rule) -> list[Any] | None:
    if not isinstance(items, list):
        return None
    return [None if item is None else rule(item) for item in items]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _number(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else None


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
