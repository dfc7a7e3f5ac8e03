"""How things look on a terminal: colours and fill patterns with a fixed meaning.

Every kind of time has a colour and a pattern, so that a bar can be read without colour too. Colours are told apart by
people with any common colour blindness and on light and dark backgrounds.
"""

from __future__ import annotations

FILLS = {
    "compute": ("█", "#3b82d6"),
    "communication": ("▞", "#e08a00"),
    "memory": ("▒", "#c2578f"),
    "idle": ("·", "bright_black"),
    "loading": ("░", "#c2578f"),
    "forward": ("█", "#3b82d6"),
    "backward": ("▓", "#7a5fc9"),
    "optimizer": ("▒", "#009e73"),
    "other": ("·", "bright_black"),
    "op": ("█", "#3b82d6"),
    "launch": ("▓", "#7a5fc9"),
    "blocking": ("▒", "#d55e00"),
    "python": ("░", "#009e73"),
}
"""Pattern and colour of each colour group of `report.parts`."""

SLOWER, FASTER = "#d55e00", "#3b82d6"  # of differences
CURVE = "#c2578f"  # of curves of memory
SEVERITY = {"error": ("✖", "bold red"), "warning": ("▲", "yellow"), "info": ("•", "bright_black")}
DIM = "bright_black"

# What an output that knows no Unicode shows instead.
ASCII = str.maketrans(
    {
        "█": "#", "▓": "=", "▒": "%", "░": ":", "▞": "/", "·": ".", "µ": "u", "\u202f": " ", "…": "~", "✖": "x",
        "▲": "!", "•": "-", "→": ">", "│": "|", "▕": "|",
        "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "─": "-", "–": "-", "×": "x",
        "▏": "|", "▎": "|", "▍": "|", "▌": "|", "▋": "|", "▊": "|", "▉": "#",
    }
)  # fmt: skip
