"""Errors say what, where and what to do, and survive the way between processes."""

from __future__ import annotations

import pickle

from traceloom.errors import InputError, UsageError


def test_an_error_reads_as_one_sentence_with_place_and_remedy() -> None:
    error = InputError(
        "expected a number, got x",
        slug="bad-number",
        where="rank3.json.gz, byte 7",
        hint="record it again",
    )
    assert str(error) == "expected a number, got x (rank3.json.gz, byte 7); record it again"


def test_an_error_keeps_its_fields_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(InputError("no", slug="s", where="w", hint="h")))
    assert (type(error), error.to_dict()) == (
        InputError,
        {"slug": "s", "message": "no", "where": "w", "hint": "h"},
    )


def test_a_usage_error_is_a_value_error_too() -> None:
    assert isinstance(UsageError("no", slug="s"), ValueError)
    assert (UsageError.exit_code, InputError.exit_code) == (2, 3)
