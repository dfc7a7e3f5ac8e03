"""Rewriting metadata entries of traces, and capture.json."""

import json
import re
from collections.abc import Callable
from typing import Any

from traceloom.formats.kineto_metadata import parse_whole_number
from traceloom.graph.graph import STAGES
from traceloom.workload.anonymize.names import Pseudonyms
from traceloom.workload.anonymize.policy import DROP, KEEP, Policy, RewriteStats, is_type
from traceloom.workload.anonymize.sizes import Shapes

# A base time that readers accept as Unix time but that is evidently artificial: 2001-10-01, a
# multiple of Kineto's unit.
BASE_NS = 7_889_238 * 127 * 10**9

_FLAGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSIONS = (
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "hip_runtime_version",
    "hip_driver_version",
    "roctracer_version",
    "nccl_version",
    "pytorch_version",
    "torch_version",
    "xpu_runtime_version",
)
_JOBS = ("trace_id", "group_trace_id", "mast_job_name", "tw_job", "job_id", "PT_PROFILER_JOB_ID")
_PROPERTIES = (
    "id",
    "totalGlobalMem",
    "computeMajor",
    "computeMinor",
    "maxThreadsPerBlock",
    "maxThreadsPerMultiprocessor",
    "regsPerBlock",
    "warpSize",
    "sharedMemPerBlock",
    "numSms",
    "regsPerMultiprocessor",
    "sharedMemPerBlockOptin",
    "sharedMemPerMultiprocessor",
    "maxSharedMemoryPerMultiProcessor",
    "regsPerMultiprocessor",
)
KNOWN_KEYS = (*_FLAGS, *_VERSIONS, *_JOBS, *_PROPERTIES, "host_name")
_VERSION = re.compile(r"v?(\d{1,4}(\.\d{1,4}){0,3})(?![\w.])")
_LONG_VERSION = re.compile(r"\d{1,9}")
_BACKEND = re.compile(
    r"((cpu|cuda|hip|xpu|mtia|hpu|npu):)?(nccl|rccl|gloo|mpi|ucc|hccl|xccl|ccl|fake|undefined|threaded)"
)
_SIMPLE = ("rank", "world_size", "pg_count")

# Public product names; the rest of a device's name is dropped.
_VENDOR = re.compile(r"\b(NVIDIA|AMD|Intel|Tesla|GeForce|Quadro|Instinct|Radeon)\b")
_MODEL = re.compile(
    r"\b((?:GB|GH|[ABHLTVPK])\d{1,3}(?:S|G|X)?|MI\d{2,3}[AX]?|RTX (?:A?\d{4}|PRO \d{4})(?: Ti| SUPER)?"
    r"|GTX \d{4}(?: Ti)?|Titan (?:V|RTX|Xp)|Max \d{4}|Gaudi ?[23]?|W\d{4}|Graphics)(?=\b|-)"
)
_FORM_FACTOR = re.compile(r"\b(SXM\d?|PCIe|HBM\d(?:e)?|\d{2,3} ?GB|NVL|OAM)\b")


class MetadataRewriter:
    """Rewrites the entries besides the events."""

    def __init__(self, names: Pseudonyms, policy: Policy, account: RewriteStats) -> None:
        self._names = names
        self._policy = policy
        self._account = account

    def rewrite(self, metadata: dict[str, Any], *, unix: bool) -> dict[str, Any]:
        """Returns the entries of the output.

        Args:
            metadata: Entries of the file.
            unix: Whether the file has Unix times; then the output states Unix times too, with our
                own origin.
        """
        out: dict[str, Any] = {"schemaVersion": 1}
        for key, value in metadata.items():
            new_value: Any = None
            if key in ("schemaVersion", "baseTimeNanoseconds", "displayTimeUnit"):
                continue
            if key == "distributedInfo":
                new_value = self._distributed(value)
            elif key == "deviceProperties":
                items = value if isinstance(value, list) else []
                new_value = [self._device(item) for item in items if isinstance(item, dict)]
            elif key in _FLAGS:
                new_value = int(bool(value)) if isinstance(value, (bool, int)) else None
            elif key in _VERSIONS:
                new_value = self.version(value)
            elif key in _JOBS:
                new_value = (
                    f"job_{self._names.letters(str(value))}"
                    if isinstance(value, (str, int))
                    else None
                )
            elif key == "host_name":
                new_value = self.host(value)
            elif key in self._policy.keep_arguments and isinstance(value, (int, float)):
                new_value = value
            if new_value is None:
                expected = key in (
                    "traceName",
                    "metadata",
                    "INFO",
                    "ERROR",
                    "WARNING",
                    "username",
                    *_JOBS,
                    *_VERSIONS,
                    *_FLAGS,
                )
                self._account.drop(key, encode_json(value), unknown=not expected)
            else:
                out[key] = new_value
        if self._policy.times == KEEP:
            base = parse_whole_number(metadata.get("baseTimeNanoseconds"))
            return out if base is None else out | {"baseTimeNanoseconds": base}
        return out | {"baseTimeNanoseconds": BASE_NS} if unix else out

    def host(self, value: Any) -> str | None:
        """Returns the pseudonym of a host name."""
        if not isinstance(value, str) or not value or self._policy.hosts == DROP:
            return None
        return self._names.host_name(value)

    def version(self, value: Any) -> Any:
        """Returns the digits and dots of a version, without the label of a local build."""
        if self._policy.versions == DROP or isinstance(value, bool):
            return None
        if isinstance(value, int):
            return value if 0 <= value < 10**9 else None
        match = _VERSION.match(str(value)) or _LONG_VERSION.fullmatch(str(value))
        return match[0].removeprefix("v") if match else None

    def device_name(self, value: Any) -> str | None:
        """Returns vendor, model, memory and form factor if they are public product names."""
        if not isinstance(value, str) or self._policy.devices == DROP:
            return None
        model = _MODEL.search(value)
        if model is None:
            return ""
        vendor = _VENDOR.search(value)
        form_factors = [match[0] for match in _FORM_FACTOR.finditer(value)]
        return " ".join(
            part for part in (vendor[0] if vendor else "", model[1], *form_factors) if part
        )

    def backend(self, value: Any) -> str | None:
        """Returns a communication backend, or several with the devices they serve."""
        if not isinstance(value, str):
            return None
        parts = [part.strip() for part in value.lower().split(",")]
        return ",".join(parts) if all(_BACKEND.fullmatch(part) for part in parts) else None

    def _device(self, item: dict[str, Any]) -> dict[str, Any]:
        properties = {
            key: item[key] for key in _PROPERTIES if isinstance(item.get(key), (int, float))
        }
        name = self.device_name(item.get("name"))
        for key in item.keys() - properties.keys() - {"name"}:
            self._account.drop(f"deviceProperties.{key}", encode_json(item[key]), unknown=True)
        return properties if name is None else properties | {"name": name}

    def _distributed(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        out: dict[str, Any] = {
            key: value[key] for key in _SIMPLE if parse_whole_number(value.get(key)) is not None
        }
        backend, nccl_version = self.backend(value.get("backend")), value.get("nccl_version")
        if backend is not None:
            out["backend"] = backend
        if nccl_version is not None and (version := self.version(nccl_version)) is not None:
            out["nccl_version"] = version
        if isinstance(value.get("pg_config"), list):
            out["pg_config"] = []
            for item in value["pg_config"]:
                if not isinstance(item, dict):
                    continue
                group: dict[str, Any] = {}
                if item.get("pg_name") is not None:
                    group["pg_name"] = self._names.group(str(item["pg_name"]))
                if isinstance(item.get("pg_desc"), str):
                    group["pg_desc"] = self._names.description(item["pg_desc"])
                if (backend := self.backend(item.get("backend_config"))) is not None:
                    group["backend_config"] = backend
                if parse_whole_number(item.get("pg_size")) is not None:
                    group["pg_size"] = item["pg_size"]
                if (ranks := check_rank_list(item.get("ranks"))) is not None:
                    group["ranks"] = ranks
                for key in item.keys() - group.keys():
                    self._account.drop(f"pg_config.{key}", encode_json(item[key]), unknown=True)
                out["pg_config"].append(group)
        for key in value.keys() - out.keys():
            self._account.drop(f"distributedInfo.{key}", encode_json(value[key]), unknown=True)
        return out


def encode_json(value: Any) -> bytes:
    """Returns a value as JSON, for the statistics of dropped values."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def check_rank_list(value: Any) -> Any:
    """Returns a list of ranks, or its text; None for anything else."""
    if isinstance(value, str):
        return value if re.fullmatch(r"\[[\d,\s]*(\.\.\.)?\s*\]?", value) else None
    if isinstance(value, list) and all(
        isinstance(rank, int) and not isinstance(rank, bool) for rank in value
    ):
        return value
    return None


Rule = Callable[[Any], Any]
_STATES = frozenset(("recorded", "graph", "early", "disturbed", "unrecorded"))
_KINDS = frozenset(("steps", "early", "time", "block"))
_SOURCES = frozenset(("optimizer", "profiler", "call", "backward", "none", "mark"))
_DEVICES = frozenset(("cuda", "xpu", "cpu", "mps"))
_ENDS = frozenset(("exit", "os._exit", "block", "running"))
_VERSION_KEYS = ("python", "torch", "cuda", "hip", "xpu", "nccl")
_SETTINGS = (
    "first_step",
    "step_count",
    "after_seconds",
    "duration_seconds",
    "stacks",
    "memory",
    "module_names",
    "shapes",
    "graph_step",
    "sources",
)
_OVERHEAD = (
    "unrecorded_steps",
    "unrecorded_median_ns",
    "unrecorded_cpu_median_ns",
    "recorded_steps",
    "recorded_median_ns",
    "recorded_cpu_median_ns",
    "ratio",
    "ratio_low",
    "ratio_high",
    "graph_step_ns",
    "graph_step_ratio",
)
_RATIOS = frozenset(("cpu", "wall"))
_NOTICES = frozenset(
    (
        "budget-reached",
        "no-graph-step",
        "no-memory-recorded",
        "no-stacks",
        "disk-full",
        "capture-moved",
        "no-memory-snapshot",
        "no-memory-history",
        "not-compressed",
        "sources-left-out",
    )
)
# Owners of memory: addresses, and names of modules and parameters; a file that is left behind.
_LEFT_OUT = (
    "live_storages_at_start",
    "live_storages_at_end",
    "out_of_memory",
    "allocators_at_end",
    "stack_samples",
)


class CaptureRewriter:
    """Rewrites capture.json.

    Args:
        names: Pseudonyms of names.
        shapes: Rounding of sizes.
        policy: The policy.
        account: Counts what is dropped.
        origin_ns: Subtracted from all times.
        files: Old name of a file -> new name; files that are not rewritten are not listed.
    """

    def __init__(  # noqa: PLR0917  (what all rewriting needs)
        self,
        names: Pseudonyms,
        shapes: Shapes,
        policy: Policy,
        account: RewriteStats,
        origin_ns: int,
        files: dict[str, str],
    ) -> None:
        self._names = names
        self._shapes = shapes
        self._account = account
        self._files = files
        self._metadata = MetadataRewriter(names, policy, account)
        self._keeps_times = policy.times == KEEP
        moved_ns = 0 if self._keeps_times else BASE_NS - origin_ns
        self._time = _make_integer_rule(lambda time_ns: time_ns + moved_ns)

    def rewrite(self, document: dict[str, Any]) -> bytes:
        ranks = document.get("ranks")
        run_rules = dict.fromkeys(("exit_code", "signal"), _check_integer) | dict.fromkeys(
            ("started_ns", "ended_ns"), self._time
        )
        out: dict[str, Any] = {
            "format": "traceloom-capture",
            "version": 1,
            "traceloom": self._metadata.version(document.get("traceloom")),
            "stage": stage if (stage := document.get("stage")) in STAGES else None,
            "run": self._by(document.get("run"), run_rules, "run"),
            "ranks": [],
        }
        for entry in ranks if isinstance(ranks, list) else []:
            if isinstance(entry, dict):  # named by its file, or by its number
                window, rank = entry.get("window"), entry.get("rank")
                name = (
                    f"rank{rank}" if isinstance(rank, int) and not isinstance(rank, bool) else None
                )
                file = self._file(window.get("file")) if isinstance(window, dict) else None
                if file is not None:
                    name = file.rpartition("/")[2].partition(".")[0]
                out["ranks"].append(self._by(entry, self._rank_rules(name), "rank"))
        for key in document.keys() - out.keys():
            self._account.drop(f"capture.{key}", encode_json(document[key]), unknown=True)
        text = json.dumps(out, separators=(",", ":")).encode() + b"\n"
        self._account.scan(text)
        return text

    def _by(self, value: Any, rules: dict[str, Rule], section: str) -> dict[str, Any]:
        """Applies rules to an object by key; keys without a rule, and values that their rule
        rejects, are dropped.
        """
        out: dict[str, Any] = {}
        for key, item in value.items() if isinstance(value, dict) else ():
            rule = rules.get(key)
            new_value = rule(item) if rule is not None and item is not None else None
            if rule is not None and (new_value is not None or item is None):
                out[key] = new_value
            else:
                self._account.drop(f"{section}.{key}", encode_json(item), unknown=rule is None)
        return out

    def _file(self, value: Any) -> str | None:
        return self._files.get(value) if isinstance(value, str) else None

    def _rank_rules(self, name: str | None) -> dict[str, Rule]:
        names, shapes, metadata = self._names, self._shapes, self._metadata

        def objects(rules: dict[str, Rule], section: str) -> Rule:
            return lambda value: [
                self._by(item, rules, section)
                for item in (value if isinstance(value, list) else [])
            ]

        def columns(rules: dict[str, Rule], section: str) -> Rule:
            list_rules = {key: _make_list_rule(rule) for key, rule in rules.items()}
            return lambda value: self._by(value, list_rules, section)

        def group(value: Any) -> str:
            return names.group(str(value))

        def live(value: Any) -> dict[str, Any]:
            return {
                key: shapes.total(number)
                for key, number in (value.items() if isinstance(value, dict) else ())
                if re.fullmatch(r"(cpu|cuda|xpu|hip|mps|meta)(:\d{1,3})?", key)
                and isinstance(number, int)
            }

        size, process = _make_integer_rule(shapes.size), _make_integer_rule(names.process)
        device: dict[str, Rule] = {
            "device": _check_integer,
            "memory_bytes": _check_integer,
            "multiprocessors": _check_integer,
            "name": metadata.device_name,
            "kind": _make_word_rule(_DEVICES),
            "current": lambda item: item if isinstance(item, bool) else None,
        }
        window_rules: dict[str, Rule] = {
            "file": self._file,
            "kind": _make_word_rule(_KINDS),
            "first_step": _check_integer,
            "step_count": _check_integer,
            "start_ns": self._time,
            "end_ns": self._time,
        }
        graph_step: dict[str, Rule] = {
            "step": _check_integer,
            "duration_ns": _check_integer,
            "file": self._file,
            "host_file": self._file,
            "sources": lambda _: None,  # code
        }
        groups: dict[str, Rule] = {
            "name": group,
            "group": group,
            "description": lambda item: names.description(str(item)),
            "backend": metadata.backend,
            "ranks": check_rank_list,
            "size": _check_integer,
        }
        collectives: dict[str, Rule] = {
            **dict.fromkeys(("group", "kind", "type", "sequence", "peer"), _check_integer),
            "groups": group,
            "kinds": lambda item: names.operation(str(item)),
            "types": lambda item: item if is_type(str(item)) else "",
            "bytes_in": size,
            "bytes_out": size,
            "start_ns": self._time,
            "thread": process,
        }
        steps = {
            "start_ns": self._time,
            "duration_ns": _check_integer,
            "cpu_ns": _check_integer,
            "memory_bytes": _check_integer,
            "device_memory_bytes": _check_integer,
            "state": _make_word_rule(_STATES),
        }
        overhead = dict.fromkeys(_OVERHEAD, _check_number) | {"ratio_of": _make_word_rule(_RATIOS)}
        notices = objects(
            {"slug": _make_word_rule(_NOTICES)}, "notices"
        )  # only the slug: messages contain paths
        # Shifted times are already on the clock of the capture.
        clock_rule: Rule = _check_integer if self._keeps_times else lambda _: None
        clock = dict.fromkeys(("offset_ns", "error_ns"), clock_rule)
        counts = (
            "rank",
            "world_size",
            "local_rank",
            "logical_cpus",
            "usable_cpus",
            "torch_threads",
        )
        return {
            **dict.fromkeys(counts, _check_integer),
            "name": lambda _: name,
            "job": group,
            "incidental": _check_number,
            "host": metadata.host,
            "clock": lambda value: self._by(value, clock, "clock"),
            "process": process,
            "devices": objects(device, "devices"),
            "versions": lambda value: self._by(
                value, dict.fromkeys(_VERSION_KEYS, metadata.version), "versions"
            ),
            "settings": lambda value: self._by(
                value, dict.fromkeys(_SETTINGS, _check_number), "settings"
            ),
            "groups": objects(groups, "groups"),
            "created_ns": self._time,
            "written_ns": self._time,
            # Not even the name of an exception that ended the process, since it may be
            # user-defined.
            "ended": lambda value: (
                "exception" if str(value).startswith("exception") else _make_word_rule(_ENDS)(value)
            ),
            "replay_of": lambda value: (
                "a recorded run" if isinstance(value, str) else None
            ),  # only that there is one
            "window": lambda value: self._by(value, window_rules, "window"),
            "windows": objects(window_rules, "window"),
            "graph_step": lambda value: self._by(value, graph_step, "graph_step"),
            "step_source": _make_word_rule(_SOURCES),
            "steps": columns(steps, "steps"),
            "collectives": columns(collectives, "collectives"),
            "live_bytes_at_start": live,
            "thread_cpu": columns(
                {
                    "thread": process,
                    "time_ns": self._time,
                    "cpu_ns": _check_integer,
                    "waited_ns": _check_integer,
                },
                "thread_cpu",
            ),
            "overhead": lambda value: self._by(value, overhead, "overhead"),
            "notices": lambda value: [
                out | {"message": ""} if out else {} for out in notices(value)
            ],
            **dict.fromkeys(_LEFT_OUT, lambda _: None),
        }


def _make_word_rule(allowed_words: frozenset[str]) -> Rule:
    return lambda value: value if isinstance(value, str) and value in allowed_words else None


def _make_list_rule(rule: Rule) -> Rule:
    """Returns a rule for every item of a list; None if the value is not a list."""
    return lambda items: (
        [None if item is None else rule(item) for item in items]
        if isinstance(items, list)
        else None
    )


def _make_integer_rule(function: Callable[[int], int]) -> Rule:
    return lambda value: None if (number := _check_integer(value)) is None else function(number)


def _check_integer(value: Any) -> int | None:
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        else None
    )


def _check_number(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else None
