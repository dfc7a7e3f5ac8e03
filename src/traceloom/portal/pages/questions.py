"""The pages that ask questions, in the order of the menu."""

from __future__ import annotations

from typing import Any

from traceloom.portal.page import Page
from traceloom.portal.pages import (
    attribution,
    characterise,
    comparison,
    invest,
    kernel,
    kernels,
    outliers,
    owners,
    prices,
    regression,
    regressions,
    topline,
)

QUESTION_PAGES: tuple[Page[Any], ...] = (
    regressions.PAGE, regression.PAGE, kernels.PAGE, kernel.PAGE, characterise.PAGE, outliers.PAGE, comparison.PAGE,
    attribution.PAGE, topline.PAGE, invest.PAGE, owners.PAGE,
    prices.PAGE,
)  # fmt: skip
