"""Notices as people read them."""

from __future__ import annotations

from traceloom.model import Notice
from traceloom.report.notices import said_once


def sentences(*notices: Notice) -> list[str]:
    return [said.sentence for said in said_once([notice.to_dict() for notice in notices], ranks=1)]


def test_a_place_that_the_message_names_is_not_said_again() -> None:
    told = Notice("cut-file", "error", "the file ends in the middle (at byte 16)", where="byte 16")
    assert sentences(told) == ["the file ends in the middle (at byte 16)"]


def test_a_place_that_the_message_leaves_out_follows_it() -> None:
    assert sentences(Notice("cut-file", "error", "the file ends early", where="a.json")) == [
        "the file ends early (a.json)"
    ]
