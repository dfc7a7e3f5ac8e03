"""TraceBuilder: small Kineto traces, in the format of every generation of writers."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceloom.errors import UsageError

if TYPE_CHECKING:
    from traceloom.trace.trace import Trace


_COPY = re.compile(r"^Memcpy (\w+)(?: \((.+) -> (.+)\))?$")


@dataclass(frozen=True)
class Spelling:
    """The names and formats of one generation of writers."""

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
        """Returns one entry of `traceEvents` as text."""
        fields = [f'"ph": {json.dumps(event["ph"])}']
        fields += [
            f'"{key}": {json.dumps(event[key])}'
            for key in ("cat", "id", "name")
            if event.get(key) is not None
        ]
        fields += [f'"{key}": {json.dumps(event[key])}' for key in ("pid", "tid")]
        fields += [
            f'"{key}": {self.micros(event[key])}' for key in ("ts", "dur") if event[key] is not None
        ]
        fields += [
            f'"{key}": {json.dumps(event[key])}'
            for key in ("bp", "args")
            if event.get(key) is not None
        ]
        return "{" + ", ".join(fields) + "}"

    def micros(self, ns: int) -> str:
        """Returns nanoseconds as this generation writes microseconds."""
        if not self.has_base:
            return str(ns // 1000)
        sign = "-" if ns < 0 else ""
        return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"

    def call(self, name: str) -> str:
        """Returns the runtime call's name: `hip` instead of `cuda` on ROCm."""
        return re.sub(r"^cuda", "hip", name) if self.hip else name

    def launch_args(self, name: str, correlation: int) -> dict[str, Any]:
        """Returns the arguments of a runtime call."""
        if self.hip:
            return {"cid": 1, "correlation": correlation} | (
                {"kernel": name} if "Launch" in name else {}
            )
        if self.cuspy:
            return {"cbid": 211, "correlation": correlation}
        external = {self.external_key: correlation} if self.external_is_correlation else {}
        return external | {"cbid": 211, "correlation": correlation}

    def kernel_args(self, device: int, stream: int, correlation: int | None) -> dict[str, Any]:
        """Returns the arguments of a kernel; without a correlation it gets an unused number, as
        work launched before the window.
        """
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
        """Returns a copy's name and arguments."""
        args = self.kernel_args(device, stream, correlation) | {"bytes": size}
        args.pop("kind", None)
        match = _COPY.match(name)
        if not self.cuspy or match is None:
            return name, args
        kind, source, target = match.groups()
        return "Memcpy", args | {"copy kind": kind, "src kind": source, "dst kind": target}

    def device(self, index: int, name: str) -> dict[str, Any]:
        """Returns one entry of `deviceProperties`."""
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
        _MODERN,
        flow_category="async_cpu_to_gpu",
        flow_name="async_gpu",
        has_base=False,
        external_is_correlation=True,
    ),
    "2023": replace(_MODERN, has_base=False, external_is_correlation=True),
    "2024": _MODERN,
    "2026": _MODERN,
    "rocm": replace(_MODERN, hip=True),
    "cuspy": replace(_MODERN, cuspy=True, fill_name="Memset"),
}


def get_spelling(generation: str) -> Spelling:
    """Returns the format of a generation.

    Raises:
        UsageError: There is no such generation.
    """
    if generation not in _GENERATIONS:
        raise UsageError(
            f'expected a generation of writers ({", ".join(_GENERATIONS)}), got "{generation}"',
            slug="unknown-generation",
        )
    return _GENERATIONS[generation]


def _convert_to_ns(us: float) -> int:
    return round(us * 1000)


class TraceBuilder:
    """Adds events one by one; writes the Kineto JSON that PyTorch would have written, or returns
    the Trace.

    Times are microseconds (with whole nanoseconds after the point). Methods that add events return
    the builder, so that calls can be chained.

    Args:
        rank: Rank in `distributedInfo`; None leaves the whole entry out.
        world_size: World size in `distributedInfo`.
        device_name: Name of each device; None for a run without devices.
        devices: Number of visible devices.
        generation: Writer to imitate: 2021, 2022, 2023, 2024, 2026, cuspy or rocm.
        host: Host name.
        process: Process id; the thread of the same number is the main thread.
        base_ns: `baseTimeNanoseconds` (generations since 2024; older ones have none).
    """

    def __init__(
        self,
        rank: int | None = 0,
        world_size: int | None = 1,
        device_name: str | None = "NVIDIA H100 80GB HBM3",
        *,
        devices: int = 1,
        generation: str = "2024",
        host: str = "host0",
        process: int = 1,
        base_ns: int = 0,
    ) -> None:
        self._spell: Spelling = get_spelling(generation)
        self._process = process
        self._base_ns = base_ns
        self._events: list[dict[str, Any]] = []
        self._ids = 0
        self._groups: list[dict[str, Any]] = []
        self._allocated: dict[tuple[int, int], int] = {}
        self._header: dict[str, Any] = {"schemaVersion": 1}
        if device_name is not None:
            self._header["deviceProperties"] = [
                self._spell.device(index, device_name) for index in range(devices)
            ]
        self._info: dict[str, Any] = {}
        if rank is not None:
            self._info = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self._header["host_name"] = host

    # -- the host ---------------------------------------------------------------------------------------------

    def op(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        *,
        thread: int = 1,
        shapes: list[Any] | None = None,
        types: list[str] | None = None,
        sequence: int | None = None,
        forward_thread: int | None = None,
        external_id: int | None = None,
        **args: Any,
    ) -> TraceBuilder:
        """A framework operator; its input shapes and autograd sequence number are optional."""
        extra_args: dict[str, Any] = {
            "External id": external_id if external_id is not None else self._next_id()
        }
        if sequence is not None:
            extra_args |= {"Sequence number": sequence, "Fwd thread id": forward_thread or 0}
        if shapes is not None:
            extra_args |= {
                self._spell.input_dims: shapes,
                "Input type": types or ["float"] * len(shapes),
            }
        return self._span(self._spell.op, name, start_us, duration_us, thread, extra_args | args)

    def annotation(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        *,
        thread: int = 1,
        external_id: int | None = None,
        **args: Any,
    ) -> TraceBuilder:
        """A user annotation (`record_function`, `Optimizer.step#SGD.step`, `nccl:all_reduce`)."""
        extra_args = {"External id": self._next_id() if external_id is None else external_id}
        return self._span(
            self._spell.annotation, name, start_us, duration_us, thread, extra_args | args
        )

    def step(
        self, number: int, start_us: float, duration_us: float, *, thread: int = 1
    ) -> TraceBuilder:
        """A step of the PyTorch profiler: `ProfilerStep#number`."""
        return self.annotation(f"ProfilerStep#{number}", start_us, duration_us, thread=thread)

    def mark(self, number: int, time_us: float, *, thread: int = 1) -> TraceBuilder:
        """Traceloom's own mark: step `number` starts here; the last mark closes the last step."""
        return self.annotation(f"traceloom.step#{number}", time_us, 0.001, thread=thread)

    def python(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        *,
        thread: int = 1,
        module_id: int | None = None,
        parent_id: int | None = None,
        python_id: int | None = None,
    ) -> TraceBuilder:
        """A Python frame (`train.py(3): main`) or module call (`nn.Module: Linear_0`)."""
        own_id = self._next_id() if python_id is None else python_id
        args: dict[str, Any] = {"Python parent id": parent_id, "Python id": own_id}
        if module_id is not None:
            args["Python module id"] = module_id
        return self._span(self._spell.python, name, start_us, duration_us, thread, args)

    def launch(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        *,
        correlation: int,
        thread: int = 1,
        driver: bool = False,
        flow: bool = True,
        **args: Any,
    ) -> TraceBuilder:
        """A runtime (or driver) call; `correlation` joins it to the GPU work that it launches;
        `flow` starts its arrow.
        """
        category = self._spell.driver if driver else self._spell.runtime
        extra_args = self._spell.launch_args(name, correlation)
        self._span(
            category, self._spell.call(name), start_us, duration_us, thread, extra_args | args
        )
        return self._flow("s", correlation, start_us, self._process, thread) if flow else self

    def collective(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        *,
        thread: int = 1,
        group: str = "0",
        group_size: int = 2,
        elements: int = 1024,
        element_type: str = "Float",
        **args: Any,
    ) -> TraceBuilder:
        """A `record_param_comms` op; `name` as PyTorch writes it (`allreduce`, `_allgather_base`,
        `all_to_allv`).
        """
        return self.op(
            "record_param_comms",
            start_us,
            duration_us,
            thread=thread,
            **self.collective_args(name, group, group_size, elements, element_type),
            **args,
        )

    @staticmethod
    def collective_args(
        name: str, group: str, group_size: int, elements: int, element_type: str
    ) -> dict[str, Any]:
        """The arguments that describe a collective, for ops and for NCCL kernels."""
        return {
            "Collective name": name,
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": group_size,
            "dtype": element_type,
            "Process Group Name": group,
            "Process Group Description": "default_pg",
            "Process Group Ranks": json.dumps(list(range(group_size))),
        }

    # -- the device -------------------------------------------------------------------------------------------

    def kernel(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        *,
        stream: int = 7,
        correlation: int | None = None,
        device: int = 0,
        **args: Any,
    ) -> TraceBuilder:
        """A kernel; without a correlation it is an orphan, launched before the recording."""
        extra_args = self._spell.kernel_args(device, stream, correlation)
        return self._work(self._spell.kernel, name, start_us, duration_us, extra_args | args)

    def copy(
        self,
        name: str,
        start_us: float,
        duration_us: float,
        *,
        bytes: int,  # noqa: A002  (the word of the trace)
        stream: int = 7,
        correlation: int | None = None,
        device: int = 0,
    ) -> TraceBuilder:
        """A copy, with a name such as `Memcpy HtoD (Pageable -> Device)`."""
        full_name, extra_args = self._spell.copy(name, bytes, device, stream, correlation)
        return self._work(self._spell.memcpy, full_name, start_us, duration_us, extra_args)

    def fill(
        self,
        start_us: float,
        duration_us: float,
        *,
        bytes: int,  # noqa: A002  (the word of the trace)
        stream: int = 7,
        correlation: int | None = None,
        device: int = 0,
    ) -> TraceBuilder:
        """A memset."""
        extra_args = self._spell.kernel_args(device, stream, correlation) | {"bytes": bytes}
        return self._work(
            self._spell.memset, self._spell.fill_name, start_us, duration_us, extra_args
        )

    def gpu_annotation(
        self, name: str, start_us: float, duration_us: float, *, stream: int = 7, device: int = 0
    ) -> TraceBuilder:
        """The GPU counterpart of an annotation."""
        return self._add(
            "X", "gpu_user_annotation", name, start_us, duration_us, device, stream, {}
        )

    def sync(
        self,
        kind: str,
        start_us: float,
        duration_us: float,
        *,
        stream: int = 7,
        device: int = 0,
        correlation: int | None = None,
        **args: Any,
    ) -> TraceBuilder:
        """A synchronisation as the device saw it: `Stream Sync`, `Event Sync`, `Stream Wait Event`,
        `Context Sync`.
        """
        extra_args = {
            "cuda_sync_kind": kind,
            "stream": stream,
            "correlation": correlation or 0,
            "device": device,
        }
        return self._add(
            "X", "cuda_sync", kind, start_us, duration_us, device, stream, extra_args | args
        )

    # -- not spans --------------------------------------------------------------------------------------------

    def allocation(
        self,
        time_us: float,
        bytes: int,  # noqa: A002  (the word of the trace)
        *,
        address: int,
        total_allocated: int | None = None,
        total_reserved: int = 0,
        device: int = 0,
        device_type: int = 1,
        thread: int = 1,
    ) -> TraceBuilder:
        """A `[memory]` event: negative bytes free; device types are torch's numbers (0 CPU, 1 CUDA,
        6 HIP ...).

        `total_allocated` defaults to the sum of the allocations on that device so far, in the order
        of the calls.
        """
        key = (device_type, device)
        self._allocated[key] = (
            self._allocated.get(key, 0) + bytes if total_allocated is None else total_allocated
        )
        args = {
            "Total Reserved": total_reserved,
            "Total Allocated": self._allocated[key],
            "Bytes": bytes,
            "Addr": address,
            "Device Id": device,
            "Device Type": device_type,
        }
        return self._add(
            "i", "cpu_instant_event", "[memory]", time_us, None, self._process, thread, args
        )

    def out_of_memory(self, time_us: float, bytes: int, *, thread: int = 1) -> TraceBuilder:  # noqa: A002
        """An `[OutOfMemory]` event."""
        args = {"Bytes": bytes, "Device Type": 1, "Device Id": 0}
        return self._add(
            "i", "cpu_instant_event", "[OutOfMemory]", time_us, None, self._process, thread, args
        )

    def instant(self, name: str, time_us: float) -> TraceBuilder:
        """A global instant such as `Record Window End`."""
        return self._add("i", None, name, time_us, None, "", "", {})

    def counter(self, name: str, time_us: float, value: float, *, key: str = "") -> TraceBuilder:
        """One sample of a counter."""
        return self._add(
            "C", "hardware_counters", name, time_us, None, "GPU 0 Counters", 0, {key: value}
        )

    def forward_backward(
        self,
        flow: int,
        forward_us: float,
        backward_us: float,
        *,
        thread: int = 1,
        backward_thread: int = 1,
    ) -> TraceBuilder:
        """The arrow from a forward op to its backward op, which start at these times."""
        for phase, time_us, tid in (("s", forward_us, thread), ("f", backward_us, backward_thread)):
            self._add(phase, "fwdbwd", "fwdbwd", time_us, None, self._process, tid, None)
            self._events[-1]["id"] = flow
        return self

    def thread_name(self, thread: int, name: str) -> TraceBuilder:
        """A metadata event that names a thread."""
        return self._add("M", None, "thread_name", 0, None, self._process, thread, {"name": name})

    def group(
        self, name: str, ranks: list[int], *, description: str = "", backend: str = "cuda:nccl"
    ) -> TraceBuilder:
        """A process group in `distributedInfo`."""
        self._groups.append(
            {
                "pg_name": name,
                "pg_desc": description or "default_pg",
                "backend_config": backend,
                "pg_size": len(ranks),
                "ranks": ranks,
            }
        )
        return self

    def metadata(self, **entries: Any) -> TraceBuilder:
        """Set top-level entries of the file."""
        self._header |= entries
        return self

    # -- the result -------------------------------------------------------------------------------------------

    def events(self) -> list[str]:
        """Returns each entry of `traceEvents` as JSON text."""
        return [self._spell.event(event) for event in self._events]

    def header(self) -> dict[str, Any]:
        """Returns the top-level entries other than `traceEvents`."""
        header = dict(self._header)
        if self._info or self._groups:
            header["distributedInfo"] = self._info | (
                {"pg_count": len(self._groups), "pg_config": self._groups} if self._groups else {}
            )
        if self._spell.has_base:
            header["baseTimeNanoseconds"] = self._base_ns
        return header

    def text(self) -> str:
        """Returns the whole file as text."""
        head = "".join(
            f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in self.header().items()
        )
        body = ",\n  ".join(self.events())
        return f'{{\n{head}  "traceEvents": [\n  {body}\n  ],\n  "traceName": "built.json"\n}}\n'

    def write(self, path: str | Path) -> Path:
        """Write the file, compressed if its name ends in .gz, and return its path."""
        path = Path(path)
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, 1, mtime=0) if path.name.endswith(".gz") else data)
        return path

    def build(self) -> Trace:
        """Returns the trace, read as any other file is read."""
        from traceloom.formats import read_kineto

        with tempfile.TemporaryDirectory() as directory:
            return read_kineto(self.write(Path(directory) / "built.json"))

    # -- inside -----------------------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _span(  # noqa: PLR0917  (as below)
        self,
        category: str,
        name: str,
        start_us: float,
        duration_us: float,
        thread: int,
        args: dict[str, Any],
    ) -> TraceBuilder:
        return self._add("X", category, name, start_us, duration_us, self._process, thread, args)

    def _work(
        self, category: str, name: str, start_us: float, duration_us: float, args: dict[str, Any]
    ) -> TraceBuilder:
        device, stream = args["device"], args["stream"]
        self._add("X", category, name, start_us, duration_us, device, stream, args)
        if args.get("correlation") is None:
            return self
        return self._flow("f", args["correlation"], start_us, device, stream)

    def _flow(self, phase: str, number: int, time_us: float, pid: int, tid: int) -> TraceBuilder:
        self._add(
            phase, self._spell.flow_category, self._spell.flow_name, time_us, None, pid, tid, None
        )
        self._events[-1] |= {"id": number} | ({"bp": "e"} if phase == "f" else {})
        return self

    def _add(  # noqa: PLR0917  (the fields of one event, in the file's order)
        self,
        phase: str,
        category: str | None,
        name: str,
        time_us: float,
        duration_us: float | None,
        pid: int | str,
        tid: int | str,
        args: dict[str, Any] | None,
    ) -> TraceBuilder:
        event: dict[str, Any] = {"ph": phase, "cat": category, "name": name, "pid": pid, "tid": tid}
        event["ts"] = _convert_to_ns(time_us)
        event["dur"] = (
            None
            if duration_us is None
            else _convert_to_ns(time_us + duration_us) - _convert_to_ns(time_us)
        )
        event["args"] = args
        self._events.append(event)
        return self
