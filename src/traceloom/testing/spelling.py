"""How each generation of writers spells what it records (category names, argument keys, times)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from traceloom.errors import UsageError

_COPY = re.compile(r"^Memcpy (\w+)(?: \((.+) -> (.+)\))?$")


@dataclass(frozen=True)
class Spelling:
    """The words of one generation."""

    op: str = "cpu_op"
    annotation: str = "user_annotation"
    python: str = "python_function"
    runtime: str = "cuda_runtime"
    driver: str = "cuda_driver"
    kernel: str = "kernel"
    memcpy: str = "gpu_memcpy"
    memset: str = "gpu_memset"
    fill_name: str = "Memset (Device)"
    input_dims: str = "Input Dims"
    flow_category: str = "ac2g"
    flow_name: str = "ac2g"
    has_base: bool = True  # baseTimeNanoseconds, and times with nanoseconds after the point
    external_is_correlation: bool = False
    external_key: str = "External id"
    hip: bool = False
    cuspy: bool = False

    def event(self, event: dict[str, Any]) -> str:
        """One entry of traceEvents as text."""
        fields = [f'"ph": {json.dumps(event["ph"])}']
        fields += [f'"{key}": {json.dumps(event[key])}' for key in ("cat", "id", "name") if event.get(key) is not None]
        fields += [f'"{key}": {json.dumps(event[key])}' for key in ("pid", "tid")]
        fields += [f'"{key}": {self.micros(event[key])}' for key in ("ts", "dur") if event[key] is not None]
        fields += [f'"{key}": {json.dumps(event[key])}' for key in ("bp", "args") if event.get(key) is not None]
        return "{" + ", ".join(fields) + "}"

    def micros(self, ns: int) -> str:
        """Nanoseconds as this generation writes microseconds."""
        if not self.has_base:
            return str(ns // 1000)
        sign = "-" if ns < 0 else ""
        return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"

    def call(self, name: str) -> str:
        """The runtime call's name: hip for cuda on ROCm."""
        return re.sub(r"^cuda", "hip", name) if self.hip else name

    def launch_args(self, name: str, correlation: int) -> dict[str, Any]:
        """Arguments of a runtime call."""
        if self.hip:
            return {"cid": 1, "correlation": correlation} | ({"kernel": name} if "Launch" in name else {})
        if self.cuspy:
            return {"cbid": 211, "correlation": correlation}
        external = {self.external_key: correlation} if self.external_is_correlation else {}
        return external | {"cbid": 211, "correlation": correlation}

    def kernel_args(self, device: int, stream: int, correlation: int | None) -> dict[str, Any]:
        """Arguments of a kernel; without a correlation it is work of before the window (a number nobody has)."""
        args: dict[str, Any] = {"device": device, "stream": stream}
        if self.hip:
            args["kind"] = "Dispatch Kernel"
        else:
            args["context"] = 1
        if correlation is not None:
            args["correlation"] = correlation
            if self.external_is_correlation:
                args[self.external_key] = correlation
        return args

    def copy(
        self, name: str, size: int, device: int, stream: int, correlation: int | None
    ) -> tuple[str, dict[str, Any]]:
        """A copy's name and arguments."""
        args = self.kernel_args(device, stream, correlation) | {"bytes": size}
        args.pop("kind", None)
        match = _COPY.match(name)
        if not self.cuspy or match is None:
            return name, args
        kind, source, target = match.groups()
        return "Memcpy", args | {"copy kind": kind, "src kind": source, "dst kind": target}

    def device(self, index: int, name: str) -> dict[str, Any]:
        """One entry of deviceProperties."""
        return {
            "id": index,
            "name": name,
            "totalGlobalMem": 85_045_346_304,
            "computeMajor": 9,
            "computeMinor": 0,
            "numSms": 132,
        }


_MODERN = Spelling()
_GENERATIONS = {
    "2021": Spelling(
        op="Operator",
        annotation="Operator",
        python="Python",
        runtime="Runtime",
        driver="Runtime",
        kernel="Kernel",
        memcpy="Memcpy",
        memset="Memset",
        input_dims="Input dims",
        flow_category="async",
        flow_name="launch",
        has_base=False,
        external_is_correlation=True,
        external_key="external id",
    ),
    "2022": replace(
        _MODERN, flow_category="async_cpu_to_gpu", flow_name="async_gpu", has_base=False, external_is_correlation=True
    ),
    "2023": replace(_MODERN, has_base=False, external_is_correlation=True),
    "2024": _MODERN,
    "2026": _MODERN,
    "rocm": replace(_MODERN, hip=True),
    "cuspy": replace(_MODERN, cuspy=True, fill_name="Memset"),
}


def spelling(generation: str) -> Spelling:
    """The words of a generation; UsageError for one that does not exist."""
    if generation not in _GENERATIONS:
        raise UsageError(
            f'expected a generation of writers ({", ".join(_GENERATIONS)}), got "{generation}"',
            slug="unknown-generation",
        )
    return _GENERATIONS[generation]
