"""All pages, in the order of the menu."""

from __future__ import annotations

from typing import Any

from traceloom.portal.page import Page
from traceloom.portal.pages import (
    audit,
    capture,
    captures,
    host,
    hosts,
    job,
    jobs,
    overview,
    request,
    requests,
    tokens,
    triggers,
    webhooks,
)
from traceloom.portal.pages.questions import QUESTION_PAGES

PAGES: tuple[Page[Any], ...] = (
    overview.PAGE,
    jobs.PAGE,
    job.PAGE,
    hosts.PAGE,
    host.PAGE,
    requests.PAGE,
    request.PAGE,
    captures.PAGE,
    capture.PAGE,
    triggers.PAGE,
    *QUESTION_PAGES,
    tokens.PAGE,
    webhooks.PAGE,
    audit.PAGE,
)
"""A page is added here, with its module beside this one; those of one part of the menu stand together."""
