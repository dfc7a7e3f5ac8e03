"""Kernels of compiled graphs: Triton programs whose sources the recorder or PyTorch left next to
the host trace.

A source is untrusted code, and running it means trusting it. So a plan contains sources and their
SHA-256 but runs none of them; a run does if the user allows it (`--trust`), and if there is a GPU
and Triton. Otherwise stand-ins replace the kernels, with the reason. A kernel gets the arguments
that PyTorch recorded: tensors, numbers, the stream after them and, until PyTorch 2.5, the grid
before that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from traceloom.system.units import format_quantity
from traceloom.workload.replay.binding import BindError, BoundCall
from traceloom.workload.replay.inputs import Resources
from traceloom.workload.replay.plan import (
    NO_SOURCES,
    NOT_TRUSTED,
    SOURCE_NAME,
    RankPlan,
    ReplayPlan,
)
from traceloom.workload.replay.schema import Refusal
from traceloom.workload.replay.values import Kind

if TYPE_CHECKING:
    import torch

# Why a stand-in replaces a kernel, as far as a plan determines it.
KERNEL_REASONS = {
    NO_SOURCES: "the source of the compiled kernel was not captured beside the host trace",
    NOT_TRUSTED: "the source of the compiled kernel came with the trace, and runs on a GPU with --trust",
}
_MAX_BYTES = 1 << 20  # max size of a source
_GRID = re.compile(r"(\w*)\(((?:\d{1,10},? ?){1,3})\)")
_GRIDS = frozenset({"grid", "split_scan_grid"})


class KernelSource(msgspec.Struct, frozen=True):
    """A captured module with a kernel.

    Attributes:
        file: Its name, which is derived from its content.
        text: The module.
        sha256: Of its bytes.
    """

    file: str
    text: str
    sha256: str


def read_source(resources: Resources, file: str) -> KernelSource | None:
    """Returns a source next to a host trace; None if there is none, or it is not text, or too
    long.
    """
    data = resources.read(file, _MAX_BYTES) if SOURCE_NAME.fullmatch(file) else None
    try:
        return (
            None
            if data is None
            else KernelSource(file, data.decode(), hashlib.sha256(data).hexdigest())
        )
    except UnicodeDecodeError:
        return None


def convert_arguments(values: Sequence[Any], kinds: Sequence[Kind]) -> tuple[bytes, str | None]:
    """Returns the arguments of a recorded kernel as those of a call, and its grid as written.

    Args:
        values: As recorded; the last is the stream, which a replay replaces by its own.
        kinds: Kind of each.
    """
    grid, call_arguments = None, list(zip(values, kinds, strict=False))[:-1]
    if (
        call_arguments
        and isinstance(call_arguments[-1][0], str)
        and _GRID.fullmatch(call_arguments[-1][0])
    ):
        grid = call_arguments.pop()[0]
    tensors = iter(range(len(call_arguments)))
    typed = [
        {"tensor": next(tensors)}
        if kind and isinstance(kind, str)
        else None
        if kind is not None
        else value
        for value, kind in call_arguments
    ]
    return msgspec.json.encode(typed), grid


def describe_sources(plan: ReplayPlan) -> list[str]:
    """Returns the sources that a trusted run executes: a line for each, with its hash and its
    number of calls.
    """
    calls: Counter[tuple[str, str]] = Counter()
    for rank_plan in plan:
        ops = rank_plan.ops.join(rank_plan.kernels.drop_nulls("source"), on="call")
        calls.update(ops.select("file", "sha256").iter_rows())
    return [
        f"{file} (sha256 {sha256}), {format_quantity(count, 'call')}"
        for (file, sha256), count in sorted(calls.items())
    ]


def find_missing_hardware(device: torch.device) -> Refusal | None:
    """Returns what a kernel needs and this machine lacks; None if nothing."""
    if device.type == "cpu":
        return Refusal("no-gpu", "it was compiled for a GPU, and the replay runs on the CPU")
    if importlib.util.find_spec("triton") is None:
        return Refusal("no-triton", "the package triton, which compiles it, is not installed")
    return None


def get_current_stream(device: torch.device) -> int:
    """Returns the driver's handle of the stream on which PyTorch launches now."""
    from torch._dynamo.device_interface import get_interface_for_device

    return int(get_interface_for_device(device.type).get_raw_stream(device.index or 0))


def run_kernel(
    run: Callable[..., Any], stream: Callable[[], int], options: Mapping[str, Any], *arguments: Any
) -> None:
    """Calls a kernel as the code of a compiled graph does."""
    run(*arguments, stream=stream(), **options)


class KernelLoader:
    """Binds the kernels of a rank's plan.

    Args:
        plan: Plan of the rank.
        device: Device of the run.
        directory: Where sources are written before they are imported; None if they are not trusted.
        lacks: Returns what the machine lacks for them.
        stream: Returns the stream of a launch.
    """

    def __init__(
        self,
        plan: RankPlan,
        device: torch.device,
        directory: Path | None = None,
        *,
        lacks: Callable[[torch.device], Refusal | None] = find_missing_hardware,
        stream: Callable[[torch.device], int] = get_current_stream,
    ) -> None:
        self.calls = {row["call"]: row for row in plan.kernels.iter_rows(named=True)}
        self._device, self._folder, self._lacks, self._stream = device, directory, lacks, stream
        self._modules: dict[str, ModuleType] = {}

    def bind(self, call: int, arguments: str) -> BoundCall:
        """Returns a kernel with its arguments.

        Args:
            call: The row of the plan's `calls`.
            arguments: JSON as in `traceloom.workload.replay.plan`.

        Raises:
            BindError: slugs `no-sources`, `not-trusted`, `no-gpu`, `no-triton`, `other-kernel`.
        """
        kernel = self.calls[call]
        if kernel["source"] is None:
            raise BindError(NO_SOURCES, KERNEL_REASONS[NO_SOURCES])
        if self._folder is None:
            raise BindError(NOT_TRUSTED, KERNEL_REASONS[NOT_TRUSTED])
        if lack := self._lacks(self._device):
            raise BindError(*lack)
        try:
            module = self._modules.get(kernel["sha256"]) or self._imported(
                self._folder / kernel["sha256"], kernel
            )
        except Exception as error:  # an untrusted module may raise anything
            raise BindError(
                "other-kernel", f"{kernel['file']}: {type(error).__name__}: {error}"
            ) from error
        # It is named `triton_` unless PyTorch was told to use unique kernel names.
        run = getattr(
            getattr(module, kernel["name"], getattr(module, "triton_", None)), "run", None
        )
        if run is None:
            raise BindError("other-kernel", f"{kernel['file']} has no kernel {kernel['name']!r}")
        values = msgspec.json.decode(arguments, type=list)
        tensors = [isinstance(value, dict) for value in values]
        bound = BoundCall(run_kernel)
        bound.arguments = [run, lambda: self._stream(self._device), self._options(kernel["grid"])]
        for value, is_tensor in zip(values, tensors, strict=True):
            if is_tensor:
                bound.places.append(((len(bound.arguments),), value["tensor"]))
            bound.arguments.append(None if is_tensor else value)
        return bound

    def _imported(self, directory: Path, kernel: Mapping[str, str]) -> ModuleType:
        """Imports the module of a source, which Triton must be able to read as a file."""
        directory.mkdir(exist_ok=True)
        path = directory / kernel["file"]
        path.write_bytes(kernel["source"].encode())
        spec = importlib.util.spec_from_file_location(f"traceloom_kernel_{kernel['sha256']}", path)
        assert spec is not None
        assert spec.loader is not None
        module = self._modules[kernel["sha256"]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _options(self, grid: str | None) -> dict[str, Any]:
        """Returns the grid, if PyTorch passed it with the arguments: itself, or a function of the
        block size.
        """
        if grid is None or not (match := _GRID.fullmatch(grid)):
            return {}
        numbers = tuple(int(number) for number in re.findall(r"\d+", match[2]))
        if not match[1]:
            return {"grid": numbers}
        from torch._inductor.runtime import triton_heuristics

        function = getattr(triton_heuristics, match[1], None) if match[1] in _GRIDS else None
        if function is None:
            raise BindError(
                "other-kernel", f"its grid is {grid}, and this PyTorch has no such function"
            )
        return {"grid": function(*numbers)}
