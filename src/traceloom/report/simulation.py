"""A simulation as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from traceloom import __version__
from traceloom.model import units
from traceloom.model.frames import rows
from traceloom.report.views.jsonfile import encode
from traceloom.simulate.simulation import Simulation

if TYPE_CHECKING:
    from traceloom.report.documents import SimulationDocument

FORMAT = "traceloom-simulation"
VERSION = 1


def build(answer: Simulation) -> SimulationDocument:
    """The document: the answer, how far it can be trusted, and its tables but that of the nodes."""
    device: Any = None if answer.device is None else answer.device.to_dict()
    return {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "sentence": sentence(answer),
        "mode": answer.mode,
        "name": answer.name,
        "machine": answer.machine,
        "step": answer.step,
        "measured_ns": answer.measured_ns,
        "identity_ns": answer.identity_ns,
        "identity_error": answer.identity_error,
        "before_ns": answer.before_ns,
        "after_ns": answer.after_ns,
        "ranks": rows(answer.ranks),
        "low_ns": answer.low_ns,
        "high_ns": answer.high_ns,
        "collectives": rows(answer.collectives),
        "links": rows(answer.links),
        "path": rows(answer.path),
        "became_critical": rows(answer.became_critical),
        "notices": [notice.to_dict() for notice in answer.notices],
        "identity": answer.identity,
        "trusted": answer.trusted,
        "device": device,
    }


def write_json(answer: Simulation, handle: BinaryIO) -> None:
    """The document as JSON."""
    handle.write(encode(build(answer)))


def sentence(answer: Simulation) -> str:
    """The answer in words."""
    scope = "The window" if answer.step is None else f"Step {answer.step}"
    after = units.duration(answer.after_ns)
    if answer.before_ns is None:
        return f"{scope} takes {after} on {answer.machine}."
    unmeasured = answer.measured_ns is None
    if not answer.machine:
        return f"{scope} takes {after} {'by its own durations' if unmeasured else 'on the recorded machine'}."
    interval = ""
    if answer.low_ns is not None and answer.high_ns is not None and answer.low_ns < answer.high_ns:
        interval = f" ({units.duration(answer.low_ns)} to {units.duration(answer.high_ns)})"
    error = "" if answer.identity_error is None else f", give or take {units.share(abs(answer.identity_error), 1)}"
    change = f" ({(answer.after_ns / answer.before_ns - 1) * 100:+.1f} %)" if answer.before_ns else ""
    return (
        f"{scope} would take {after}{interval} on {answer.machine}{error}; "
        f"{'by its own durations it takes' if unmeasured else 'it took'} {units.duration(answer.before_ns)}{change}."
    )
