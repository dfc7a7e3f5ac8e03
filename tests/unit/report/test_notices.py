"""Notices as people read them."""

from __future__ import annotations

from traceloom.report.labels import merge_notices, merge_rank_notices
from traceloom.trace.notice import Notice


def sentences(*notices: Notice) -> list[str]:
    return [
        said.sentence for said in merge_notices([notice.to_dict() for notice in notices], ranks=1)
    ]


def test_a_place_that_the_message_names_is_not_said_again() -> None:
    told = Notice("cut-file", "error", "the file ends in the middle (at byte 16)", where="byte 16")
    assert sentences(told) == ["the file ends in the middle (at byte 16)"]


def test_a_place_that_the_message_leaves_out_follows_it() -> None:
    assert sentences(Notice("cut-file", "error", "the file ends early", where="a.json")) == [
        "the file ends early (a.json)"
    ]


def test_what_ranks_share_is_said_once_with_their_names() -> None:
    def sentences(*notices: Notice) -> list[str]:
        return [
            sentence for _, sentence in merge_rank_notices([notice.to_dict() for notice in notices])
        ]

    same = [Notice("guessed-groups", "warning", "3 collectives", 3, rank) for rank in (0, 1, 2, 5)]
    assert sentences(*same) == ["3 collectives (ranks 0-2, 5)"]
    assert sentences(same[0], Notice("guessed-groups", "warning", "4 collectives", 4, 1)) == [
        "3 collectives (rank 0; the like on 1)"
    ]
    assert sentences(same[3]) == ["3 collectives"]
    assert sentences(
        Notice("a", "info", "one"), Notice("a", "info", "other"), Notice("a", "info", "one")
    ) == ["one", "other"]
