"""Addresses of pages, made of names of strangers."""

from __future__ import annotations

from urllib.parse import quote


def to_job(job: str) -> str:
    """Of a job."""
    return f"/jobs/{quote(job)}"


def to_host(host: str) -> str:
    """Of a host."""
    return f"/hosts/{quote(host, safe='')}"


def to_request(request: str) -> str:
    """Of a request."""
    return f"/requests/{quote(request, safe='')}"


def to_capture(capture: str) -> str:
    """Of a capture."""
    return f"/captures/{quote(capture, safe='')}"
