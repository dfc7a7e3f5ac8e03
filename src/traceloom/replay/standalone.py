"""What every script that a replay writes has in it: copied there as it stands, so each part needs torch alone.

Scripts have `import torch` at their top; the imports within the functions are left out of the copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def on_storage(
    tensor: torch.Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Another look at the memory of a tensor; offset and strides in elements."""
    import torch

    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), offset, shape, strides)


def stand_in(nanoseconds: int, *tensors: tuple[Sequence[int], Sequence[int], torch.dtype, str]) -> list[Any]:
    """Take the time of an op that cannot be run here, and give tensors of zeros for its own, each on its device."""
    import torch

    end = time.perf_counter_ns() + nanoseconds
    made = [
        torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
        for shape, strides, dtype, device in tensors
    ]
    while time.perf_counter_ns() < end:
        pass
    return made


def flat(values: Any) -> Iterator[Any]:
    """What an op returns, lists within it taken apart."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)
    else:
        yield values


def as_recorded(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor, or zeros of the recorded shape where the contents led to another one."""
    import torch

    if tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype:
        return tensor
    return torch.empty_strided(shape, strides, dtype=dtype, device=tensor.device).zero_()


class Awaited(list[Any]):
    """What several collectives that are one started."""

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self:
            work.wait()


def timed(call: Callable[[], Any], runs: int, device: str) -> list[int]:
    """Nanoseconds of each run; of as many as half a second takes, 5 to 200, where `runs` is 0."""
    import torch

    def wait() -> None:
        if not device.startswith("cpu"):
            getattr(torch, device.partition(":")[0]).synchronize()

    call()
    times: list[int] = []
    began = time.perf_counter()
    while len(times) < (runs or 5) or (not runs and len(times) < 200 and time.perf_counter() - began < 0.5):
        wait()
        start = time.perf_counter_ns()
        call()
        wait()
        times.append(time.perf_counter_ns() - start)
    return times


def by_name(call: Callable[[], Any]) -> dict[str, float]:
    """Nanoseconds of the host, in one run, in each op that no other op called; of GPU work that is its launch."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    times: dict[str, float] = {}
    for event in profile.events():
        if event.cpu_parent is None:
            times[event.name] = times.get(event.name, 0.0) + 1000 * event.cpu_time_total
    return times


def compared(recorded: Mapping[str, tuple[int, int]], here: Mapping[str, float]) -> Iterator[str]:
    """What the calls of each op took together, recorded and here, as lines."""
    yield f"{'recorded':>13} {'here':>13} {'ratio':>7}  calls of (time of the host)"
    for name, (calls, nanoseconds) in recorded.items():
        now = here.get(name)
        ratio = f"{now / nanoseconds:7.2f}" if now is not None and nanoseconds else f"{'-':>7}"
        shown = f"{now / 1e6:10.3f} ms" if now is not None else f"{'-':>13}"
        yield f"{nanoseconds / 1e6:10.3f} ms {shown} {ratio}  {calls} {name}"


def summary(times: Sequence[int], recorded: int | None = None) -> str:
    """The median in words, beside what was recorded."""
    median = statistics.median(times)
    beside = f"; recorded: {recorded / 1e6:.3f} ms, {median / recorded:.2f} times that" if recorded else ""
    return f"median of {len(times)}: {median / 1e6:.3f} ms{beside}"
