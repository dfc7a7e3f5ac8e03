"""The report on a terminal: the answer first, then where the time goes, then the tables, then what to do next."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from traceloom.harmless import steering
from traceloom.lazy import lazy
from traceloom.report.options import ReportOptions
from traceloom.report.views.terminal.columns import fitted
from traceloom.report.views.terminal.look import ASCII

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.graph import GraphDocument
    from traceloom.report.documents.short import ShortReport
    from traceloom.report.views.terminal.rendered import in_short as in_short
    from traceloom.report.views.terminal.rendered import render as render

_NARROWEST, _WIDEST = 60, 140
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")

__all__ = ["put", "show", "show_graph", "show_short"]
# who shows a graph or a comparison does not load the lines of a report
lazy(__name__, {"in_short": ".rendered", "render": ".rendered"})


def show(document: ReportDocument, options: ReportOptions, stream: TextIO) -> None:
    """Write the report to a stream: with colours where it is a terminal that wants them, in ASCII where it must be."""
    from traceloom.report.views.terminal.rendered import render

    put(partial(render, document, options), stream)


def show_short(document: ShortReport, stream: TextIO) -> None:
    """Write the short report of a document that was kept, as `show` does."""
    from traceloom.report.views.terminal.rendered import render_short

    put(partial(render_short, document), stream)


def show_graph(document: GraphDocument, stream: TextIO) -> None:
    """Write the summary of a graph (`report.graph_document`) to a stream, as `show` does."""
    from traceloom.report.views.terminal import graph

    put(partial(graph.render, document), stream)


class _SteeredConsole(Console):
    """A console that leaves it to the command line what a reader who stops reading means; Rich would end with 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704  (Rich calls this while it handles the BrokenPipeError)


def put(rendered: Callable[[int], Iterable[Text]], stream: TextIO) -> None:
    """Write the lines that `rendered` gives for the stream's width; where it is too narrow for them, say so first."""
    stream.flush()  # what went through another layer comes first
    # In a notebook Rich would show every line as an output of its own, and write nothing to the stream.
    console = _SteeredConsole(
        file=steering(stream), highlight=False, markup=False, emoji=False, soft_wrap=False, force_jupyter=False
    )
    width = max(_NARROWEST, min(console.width, _WIDEST))
    plain = not (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    if console.width < width:
        warning = f"This needs {width} columns, the terminal has {console.width}: lines run on."
        for part in textwrap.wrap(warning, max(console.width, 1)):
            console.print(part, no_wrap=True, overflow="ignore", crop=False)
    for line in fitted(rendered(width), width):
        shown = line.copy()
        if plain:
            shown.plain = shown.plain.translate(ASCII).encode("ascii", "replace").decode()
        # Styles are ours, letters are not; those that are spelled out keep the width of the line.
        shown.plain = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", shown.plain)
        console.print(shown, no_wrap=True, overflow="ignore", crop=False)
