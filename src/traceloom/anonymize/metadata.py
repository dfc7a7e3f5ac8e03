"""The entries beside the events of a Kineto trace: an allow-list; the rest is left out and counted."""

from __future__ import annotations

import json
import re
from typing import Any

from traceloom.anonymize.account import Account
from traceloom.anonymize.names import Pseudonyms
from traceloom.anonymize.policy import DROP, KEEP, Policy
from traceloom.read.metadata import whole

# A base time that every reader takes for Unix time, and nobody for the truth: 2001-10-01, a multiple of Kineto's unit.
BASE_NS = 7_889_238 * 127 * 10**9

_FLAGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSIONS = (
    "cuda_runtime_version", "cuda_driver_version", "cupti_version", "hip_runtime_version", "hip_driver_version",
    "roctracer_version", "nccl_version", "pytorch_version", "torch_version", "xpu_runtime_version",
)  # fmt: skip
_JOBS = ("trace_id", "group_trace_id", "mast_job_name", "tw_job", "job_id", "PT_PROFILER_JOB_ID")
_PROPERTIES = (
    "id", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock", "maxThreadsPerMultiprocessor",
    "regsPerBlock", "warpSize", "sharedMemPerBlock", "numSms", "regsPerMultiprocessor", "sharedMemPerBlockOptin",
    "sharedMemPerMultiprocessor", "maxSharedMemoryPerMultiProcessor", "regsPerMultiprocessor",
)  # fmt: skip
KNOWN_KEYS = (*_FLAGS, *_VERSIONS, *_JOBS, *_PROPERTIES, "host_name")
_VERSION = re.compile(r"v?(\d{1,4}(\.\d{1,4}){0,3})(?![\w.])")
_LONG_VERSION = re.compile(r"\d{1,9}")
_BACKEND = re.compile(
    r"((cpu|cuda|hip|xpu|mtia|hpu|npu):)?(nccl|rccl|gloo|mpi|ucc|hccl|xccl|ccl|fake|undefined|threaded)"
)
_SIMPLE = ("rank", "world_size", "pg_count")

# Product names that everybody knows; what else stands in a device's name is left out.
_VENDOR = re.compile(r"\b(NVIDIA|AMD|Intel|Tesla|GeForce|Quadro|Instinct|Radeon)\b")
_MODEL = re.compile(
    r"\b((?:GB|GH|[ABHLTVPK])\d{1,3}(?:S|G|X)?|MI\d{2,3}[AX]?|RTX (?:A?\d{4}|PRO \d{4})(?: Ti| SUPER)?"
    r"|GTX \d{4}(?: Ti)?|Titan (?:V|RTX|Xp)|Max \d{4}|Gaudi ?[23]?|W\d{4}|Graphics)(?=\b|-)"
)
_FORM = re.compile(r"\b(SXM\d?|PCIe|HBM\d(?:e)?|\d{2,3} ?GB|NVL|OAM)\b")


class Metadata:
    """Rewrites what stands beside the events."""

    def __init__(self, names: Pseudonyms, policy: Policy, account: Account) -> None:
        self._names = names
        self._policy = policy
        self._account = account

    def rewrite(self, metadata: dict[str, Any], *, unix: bool) -> dict[str, Any]:
        """The entries of the output.

        Args:
            metadata: Entries of the file.
            unix: The file's times are Unix times: the output says so too, with an origin of our own.
        """
        out: dict[str, Any] = {"schemaVersion": 1}
        for key, value in metadata.items():
            made: Any = None
            if key in ("schemaVersion", "baseTimeNanoseconds", "displayTimeUnit"):
                continue
            if key == "distributedInfo":
                made = self._distributed(value)
            elif key == "deviceProperties":
                items = value if isinstance(value, list) else []
                made = [self._device(item) for item in items if isinstance(item, dict)]
            elif key in _FLAGS:
                made = int(bool(value)) if isinstance(value, (bool, int)) else None
            elif key in _VERSIONS:
                made = self.version(value)
            elif key in _JOBS:
                made = f"job_{self._names.letters(str(value))}" if isinstance(value, (str, int)) else None
            elif key == "host_name":
                made = self.host(value)
            elif key in self._policy.keep_arguments and isinstance(value, (int, float)):
                made = value
            if made is None:
                expected = key in (
                    "traceName", "metadata", "INFO", "ERROR", "WARNING", "username", *_JOBS, *_VERSIONS, *_FLAGS
                )  # fmt: skip
                self._account.drop(key, text_of(value), unknown=not expected)
            else:
                out[key] = made
        if self._policy.times == KEEP:
            base = whole(metadata.get("baseTimeNanoseconds"))
            return out if base is None else out | {"baseTimeNanoseconds": base}
        return out | {"baseTimeNanoseconds": BASE_NS} if unix else out

    def host(self, value: Any) -> str | None:
        """A host name."""
        if not isinstance(value, str) or not value or self._policy.hosts == DROP:
            return None
        return self._names.host_name(value)

    def version(self, value: Any) -> Any:
        """Numbers and dots of a version; what is local to somebody's build goes."""
        if self._policy.versions == DROP or isinstance(value, bool):
            return None
        if isinstance(value, int):
            return value if 0 <= value < 10**9 else None
        match = _VERSION.match(str(value)) or _LONG_VERSION.fullmatch(str(value))
        return match[0].removeprefix("v") if match else None

    def device_name(self, value: Any) -> str | None:
        """Vendor, model, memory and form, where they are products that everybody knows."""
        if not isinstance(value, str) or self._policy.devices == DROP:
            return None
        model = _MODEL.search(value)
        if model is None:
            return ""
        vendor = _VENDOR.search(value)
        forms = [match[0] for match in _FORM.finditer(value)]
        return " ".join(part for part in (vendor[0] if vendor else "", model[1], *forms) if part)

    def backend(self, value: Any) -> str | None:
        """A back end of communication, or several with the devices they serve."""
        if not isinstance(value, str):
            return None
        parts = [part.strip() for part in value.lower().split(",")]
        return ",".join(parts) if all(_BACKEND.fullmatch(part) for part in parts) else None

    def _device(self, item: dict[str, Any]) -> dict[str, Any]:
        properties = {key: item[key] for key in _PROPERTIES if isinstance(item.get(key), (int, float))}
        name = self.device_name(item.get("name"))
        for key in item.keys() - properties.keys() - {"name"}:
            self._account.drop(f"deviceProperties.{key}", text_of(item[key]), unknown=True)
        return properties if name is None else properties | {"name": name}

    def _distributed(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        out: dict[str, Any] = {key: value[key] for key in _SIMPLE if whole(value.get(key)) is not None}
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
                if whole(item.get("pg_size")) is not None:
                    group["pg_size"] = item["pg_size"]
                if (ranks := rank_list(item.get("ranks"))) is not None:
                    group["ranks"] = ranks
                for key in item.keys() - group.keys():
                    self._account.drop(f"pg_config.{key}", text_of(item[key]), unknown=True)
                out["pg_config"].append(group)
        for key in value.keys() - out.keys():
            self._account.drop(f"distributedInfo.{key}", text_of(value[key]), unknown=True)
        return out


def text_of(value: Any) -> bytes:
    """A value as JSON, for the account of what is left out."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def rank_list(value: Any) -> Any:
    """A list of ranks, or its text; None for anything else."""
    if isinstance(value, str):
        return value if re.fullmatch(r"\[[\d,\s]*(\.\.\.)?\s*\]?", value) else None
    if isinstance(value, list) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in value):
        return value
    return None
