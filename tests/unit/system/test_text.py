"""Texts for encoders and for people."""

from __future__ import annotations

import pytest

from traceloom.system.text import hide_paths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[Errno 2] No such file or directory: '/srv/fleet/store/c1/rank0.json'",
            "No such file or directory: 'rank0.json'",
        ),
        (
            "`/tmp/traceloom-x/a.json` is damaged (/tmp/traceloom-x/a.json)",
            "`a.json` is damaged (a.json)",
        ),
        (
            "https://host/a/b and s3://bucket/c/d, 3/4/5 GB",
            "https://host/a/b and s3://bucket/c/d, 3/4/5 GB",
        ),
    ],
)
def test_places_of_this_host_are_left_out(text: str, expected: str) -> None:
    assert hide_paths(text) == expected
