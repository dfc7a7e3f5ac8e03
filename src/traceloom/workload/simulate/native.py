"""The native engine: simulates a workload on a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import changed_graph
from traceloom.errors import UsageError
from traceloom.graph import Plan, graph as graph_schema, law
from traceloom.graph.graph import Graph
from traceloom.system import units
from traceloom.trace.notice import Notice
from traceloom.workload.simulate.device import DeviceChange, rescale
from traceloom.workload.simulate.evaluation import build_plan, evaluate_on_network
from traceloom.workload.simulate.inputs import AnyWorkload, SimulationInput, open_input
from traceloom.workload.simulate.machine import Machine
from traceloom.workload.simulate.machine_file import apply_overrides, presets, read_machine
from traceloom.workload.simulate.result import Simulation, assemble_simulation
from traceloom.workload.simulate.transfers import (
    compute_recorded_transfers,
    compute_transfers,
    find_operations,
    list_transfer_notices,
)

StatusCallback = Callable[[str], None]


def run(
    workload: AnyWorkload,
    machine: Machine | str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    device: str | None = None,
    host_factor: float = 1.0,
    recorded_device: str | None = None,
    groups: str | Path | None = None,
    only: str | None = None,
    step: int | None = None,
    cache: bool = True,
    progress: StatusCallback | None = None,
) -> Simulation:
    """Simulate a workload on a machine.

    Args:
        workload: A recorded run, a `.graph`, a directory of `.et` files, or the object read from
            one.
        machine: A machine, a `machine.toml` or the name of a preset; None for the recorded machine.
        overrides: Changes of the machine, such as `network.0.bandwidth=100`.
        device: The device of every rank, by name or peaks; None for that of the machine.
        host_factor: Factor on the durations of host work.
        recorded_device: The recorded device, if the traces do not name one with known peaks.
        groups: The file with the ranks of each group, for `.et` files; None for the one next to
            them.
        only: `communication` or `compute`: the other side takes no time.
        step: One step of a recorded run.
        cache: Use the cache of parsed traces, and fill it.
        progress: Called with a status message.

    Raises:
        UsageError: As `open_input`, `read_machine` and `rescale` raise; slug `machine-size`: the
            machine has another number of ranks.
        InputError: As `open_input` and `read_machine` raise.
        CheckError: slug `deadlock`: ranks wait for each other.

    Example:
        >>> from traceloom.workload.simulate.native import run
        >>> run("run", "dgx-h100").after_ns  # doctest: +SKIP
    """
    if overrides and machine is None:
        raise UsageError(
            "--set is of a machine", slug="wrong-usage", hint="name one with --machine"
        )
    on_status: StatusCallback = progress or (lambda _: None)
    on_status("reading")
    source = open_input(workload, groups=groups, only=only, step=step, cache=cache)
    on_status("evaluating")
    plan = build_plan(source.graph)
    checked = _compare_with_recording(source, plan)
    before = evaluate_on_network(
        source.graph, find_operations(source.graph), plan=plan, serial=source.serial
    )
    target = None if machine is None else _Target.of(machine, overrides, source.graph)
    cases = build_device_cases(
        source, target.machine if target else None, device, host_factor, recorded_device
    )
    evaluations = []
    for graph in cases.graphs:
        operations = find_operations(graph)
        transfers = None  # keep those of the workload, if any
        if target is not None and source.only != "compute":
            transfers = compute_transfers(
                target.machine,
                operations.table,
                compute_recorded_transfers(graph, operations),
                target.measured_on,
            )
        same = plan if plan.graph is graph else None
        evaluations.append(
            evaluate_on_network(graph, operations, transfers, plan=same, serial=source.serial)
        )
    after, *interval = evaluations
    names = [target.name] if target else []
    names += [cases.account.device] if cases.account and device is not None else []
    return assemble_simulation(
        source.name,
        before,
        after,
        find_operations(source.graph),
        interval=interval,
        machine=" with ".join(names) or ("" if host_factor == 1 else "a host of another speed"),
        step=step,
        notices=(
            *source.graph.notices,
            *cases.notices,
            *(list_transfer_notices(after.transfers.flags) if after.transfers else ()),
        ),
        device=cases.account,
        **checked,
    )


def _compare_with_recording(source: SimulationInput, plan: Plan) -> dict[str, Any]:
    """Simulates the workload on its own machine, and returns the result and its deviation from the
    measurement.
    """
    if not source.measured:
        identity_text = (
            "Nothing here was measured: the times follow from the durations in the files."
            if source.only is None
            else f"Nobody measured {source.only} alone: no time can come back."
        )
        return {
            "measured_ns": None,
            "identity_ns": None,
            "identity_error": None,
            "identity": identity_text,
        }
    conservation = law(source.graph, plan)
    simulated = conservation.window_ns + conservation.honest_error_ns
    identity_text = (
        f"Simulated on the recorded machine, the measured {units.format_duration(conservation.window_ns)} come back as "
        f"{units.format_duration(simulated)} ({conservation.honest_error * 100:+.2f} %)."
    )
    return {
        "measured_ns": conservation.window_ns,
        "identity_ns": simulated,
        "identity_error": conservation.honest_error,
        "identity": identity_text,
        "trusted": conservation.holds,
    }


@dataclass(frozen=True)
class _Target:
    """The machine, and the one on which its transfers were measured if its network was changed
    since.
    """

    machine: Machine
    name: str
    measured_on: Machine | None

    @classmethod
    def of(cls, machine: Machine | str | Path, overrides: Sequence[str], graph: Graph) -> _Target:
        """Reads the machine and checks that it fits the workload.

        A preset gets as many complete hosts as the workload needs.
        """
        if isinstance(machine, Machine):
            unchanged, name = machine, machine.name or "the machine"
        else:
            unchanged = read_machine(machine)
            name = unchanged.name or str(machine)
        described = apply_overrides(unchanged, overrides)
        world = graph.job_size
        if isinstance(machine, str) and machine in presets() and not Path(machine).exists():
            host = math.prod(part.size for part in described.dimensions[:-1])
            world = world if world <= host else -(-world // host) * host
            described, unchanged = described.for_ranks(world), unchanged.for_ranks(world)
        elif world > 1:
            described.check(world)
        name += f" with {', '.join(overrides)}" if overrides else ""
        return cls(described, name, unchanged if overrides and described.transfers else None)


@dataclass(frozen=True)
class DeviceCases:
    """A graph on the devices of a machine.

    Attributes:
        graphs: The expected case; if the rules have an interval, also the min and max cases.
        account: What was scaled by which rule; None on the recorded devices.
        notices: Notices about the result.
    """

    graphs: tuple[Graph, ...]
    account: DeviceChange | None = None
    notices: tuple[Notice, ...] = field(default=())


def build_device_cases(
    source: SimulationInput,
    machine: Machine | None,
    device: str | None,
    host_factor: float,
    recorded: str | None,
) -> DeviceCases:
    """Returns the work of the ranks on other devices, including slow ranks of a machine.

    Args:
        source: The workload.
        machine: The machine whose devices are used if no other is given; None for the recorded
            ones.
        device: The device, by name or peaks.
        host_factor: Factor on the durations of host work.
        recorded: The recorded device, if the traces do not name it.

    Raises:
        UsageError: As `rescale` raises.
    """
    cases = DeviceCases((source.graph,))
    machine_device = machine.device if machine and not source.serial else None
    if device is not None or machine_device is not None or host_factor != 1:
        notices: tuple[Notice, ...] = ()
        try:
            scaled = rescale(
                source.graph,
                source.session,
                machine_device if device is None else device,
                host_factor=host_factor,
                recorded=recorded,
            )
        except UsageError as error:
            if (
                device is not None
                or machine_device is None
                or error.slug not in {"no-recorded-device", "bad-peak", "no-device-work"}
            ):
                raise
            text = f"work of the device takes as long as recorded, not as on {machine_device.name}: {error.message}"
            notices = (Notice("device-kept", "warning", text),)
            scaled = rescale(source.graph, source.session, None, host_factor=host_factor)
        cases = DeviceCases((scaled.graph, scaled.low, scaled.high), scaled.account, notices)
    if machine is None or (machine.device_speeds() == 1).all():
        return cases
    slowed = []
    for graph in cases.graphs:
        scenario = Scenario.of(graph).copy()
        rank = graph.nodes["rank"].cast(pl.Int64).fill_null(0).to_numpy()
        is_device_work = scenario.nodes(graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)
        speed = machine.device_speeds()[np.minimum(rank, machine.ranks - 1)]
        scenario.work_ns = np.where(
            is_device_work, np.rint(scenario.work_ns / speed), scenario.work_ns
        ).astype(np.int64)
        slowed.append(changed_graph(graph, scenario, scenario.times(Plan(graph))))
    return replace(cases, graphs=tuple(slowed))
