"""Colours can be told apart with any kind of colour vision (simulated after Machado et al. 2009, CIE76 distances)."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

VISION = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
SETS = {
    "kinds of GPU time": ("compute", "communication", "memory", "idle"),
    "causes of idle time": (
        "compute",
        "communication",
        "memory",
        "idle",
        *(f"idle-{k}" for k in range(1, 6)),
    ),
    "changes": ("accent", "bad", "c-idle"),
    "phases": ("loading", "forward", "backward", "optimizer", "communication", "other"),
}


def palettes() -> dict[str, dict[str, str]]:
    source = (
        files("traceloom.report.views")
        .joinpath("assets", "colours.css")
        .read_text(encoding="utf-8")
    )
    light, dark, _ = re.findall(r"\{([^{}]*--paper:[^{}]*)\}", source)
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for name, block in (("light", light), ("dark", dark))
    }


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    bright, dim = sorted((float(TO_XYZ[1] @ linear(c)) for c in (a, b)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("vision", VISION)
def test_colours_of_one_picture_can_be_told_apart(theme: str, kind: str, vision: str) -> None:
    palette = palettes()[theme]
    seen = {
        name: lab(np.array(VISION[vision]) @ linear(palette.get(name) or palette[f"c-{name}"]))
        for name in SETS[kind]
    }
    nearest = min(
        (float(np.linalg.norm(seen[a] - seen[b])), a, b) for a, b in combinations(seen, 2)
    )
    assert nearest[0] > 12, nearest


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_the_contrast_that_wcag_asks_for(theme: str) -> None:
    palette = palettes()[theme]
    for change in ("bad", "accent"):  # boxes of what changed, at their strongest
        colour, paper = (
            np.array([int(palette[name][at : at + 2], 16) for at in (1, 3, 5)])
            for name in (change, "paper")
        )
        box = "#" + "".join(f"{round(value):02x}" for value in 0.55 * colour + 0.45 * paper)
        assert contrast(palette["ink"], box) >= 4.5, change
    for text, ground in (
        ("ink", "paper"),
        ("muted", "paper"),
        ("muted", "panel"),
        ("accent", "panel"),
        ("accent", "accent-soft"),
        ("ink", "panel"),
        ("accent", "paper"),
        ("bad", "paper"),
        ("warn", "paper"),
    ):
        assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
