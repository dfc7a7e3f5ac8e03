"""How things look on a terminal: colours and fill patterns with a fixed meaning.

Every kind of time has a colour and a pattern, so that a bar can be read without colour too. Colours are told apart by
people with any common colour blindness and on light and dark backgrounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of time: its key in the document, its heading, pattern and colour."""

    key: str
    label: str
    fill: str
    color: str

    @property
    def style(self) -> Style:
        """The style of its bar segments."""
        return Style(color=self.color)

    @property
    def heading(self) -> Text:
        """The pattern and the label: the legend of the bar beside it."""
        return Text.assemble((self.fill, self.style), " ", (self.label, "bold"))


DEVICE = (
    Kind("compute_ns", "compute", "█", "#3b82d6"),
    Kind("exposed_communication_ns", "comm.", "▓", "#e08a00"),
    Kind("exposed_memory_ns", "memory", "▒", "#c2578f"),
    Kind("idle_ns", "idle", "·", "bright_black"),
)
CATEGORY = {"compute": DEVICE[0], "communication": DEVICE[1], "memory": DEVICE[2]}
PHASES = (
    Kind("loading", "loading", "░", "#c2578f"),
    Kind("forward", "forward", "█", "#3b82d6"),
    Kind("backward", "backward", "▓", "#7a5fc9"),
    Kind("optimizer", "optim.", "▒", "#009e73"),
    Kind("communication", "comm.", "▞", "#e08a00"),
    Kind("other", "other", "·", "bright_black"),
)
ACTIVITIES = (
    Kind("op", "op", "█", "#3b82d6"),
    Kind("launch", "launch", "▓", "#7a5fc9"),
    Kind("blocking_call", "blocked", "▒", "#d55e00"),
    Kind("python", "Python", "░", "#009e73"),
    Kind("unobserved", "unseen", "·", "bright_black"),
)
SEVERITY = {"error": ("✖", "bold red"), "warning": ("▲", "yellow"), "info": ("•", "bright_black")}
DIM = "bright_black"

# What an output that knows no Unicode shows instead.
ASCII = str.maketrans(
    {
        "█": "#", "▓": "=", "▒": "%", "░": ":", "▞": "/", "·": ".", "µ": "u", "\u202f": " ", "…": "~", "✖": "x",
        "▲": "!", "•": "-", "→": ">",
        "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "─": "-", "–": "-", "×": "x",
        "▏": "|", "▎": "|", "▍": "|", "▌": "|", "▋": "|", "▊": "|", "▉": "#",
    }
)  # fmt: skip
