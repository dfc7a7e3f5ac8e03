"""A simulation as a document."""

from __future__ import annotations

from dataclasses import replace
from typing import BinaryIO

from traceloom import __version__
from traceloom.model import units
from traceloom.report.table import Row
from traceloom.report.views.jsonfile import encode
from traceloom.simulate.simulation import Simulation

FORMAT = "traceloom-simulation"
VERSION = 1


def build(answer: Simulation) -> Row:
    """The document: the answer, how far it can be trusted, and its tables but that of the nodes."""
    plain = replace(answer, nodes=answer.nodes.clear()).to_dict()
    head = {"format": FORMAT, "version": VERSION, "traceloom": __version__, "sentence": sentence(answer)}
    return {**head, **{key: value for key, value in plain.items() if key != "nodes"}}


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
