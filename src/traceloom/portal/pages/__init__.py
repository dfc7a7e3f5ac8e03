"""All pages, in the order of the menu."""

from __future__ import annotations

from typing import Any

from traceloom.portal.page import Page
from traceloom.portal.pages import jobs, overview

PAGES: tuple[Page[Any], ...] = (overview.PAGE, jobs.PAGE)
"""A page is added here, with its module beside this one."""
