"""Names in any case: what lower case finds is what the expression finds."""

from __future__ import annotations

import json
from importlib.resources import files

import polars as pl
import pytest

from traceloom.trace.frames import contains, contains_any, lower_ascii

NAMES = pl.Series(
    [
        "void cutlass::Kernel2<Gemm>",
        "ampere_SGEMM_128x64",
        "Memcpy HtoD",
        "conv2D_nhwc",
        "a\\W",
        "step_9",
        "ABC-def",
        "",
    ]
)


def patterns() -> list[str]:
    found = []
    for table in ("kernel_rules.json", "kind_rules.json", "matrix_rules.json"):
        rows = json.loads((files("traceloom.analyze") / table).read_text(encoding="utf-8"))
        found += [row[key] for row in rows for key in ("pattern", "op", "under") if row.get(key)]
    return found


def examples() -> pl.Series:
    found = []
    for table in ("kernel_rules.json", "kind_rules.json", "matrix_rules.json"):
        rows = json.loads((files("traceloom.analyze") / table).read_text(encoding="utf-8"))
        found += [value for row in rows for key, value in row.items() if key.startswith("example")]
    return pl.concat([NAMES, pl.Series(found), pl.Series(found).str.to_uppercase()])


def test_the_tables_find_the_same_names_by_lower_case() -> None:
    names = examples()
    for pattern, found in zip(
        patterns(), contains_any(names, [f"(?i){pattern}" for pattern in patterns()]), strict=True
    ):
        assert lower_ascii(pattern) is not None, pattern
        assert found.to_list() == names.str.contains(f"(?i){pattern}").to_list(), pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"\W",
        r"\pL",
        r"\x41",
        "(?P<Name>a)",
        "(?-i)Gemm",
        "[[:upper:]]",
        "[A-c]",
        "[+-Z]",
        r"\D",
        "é",
        r"\u0041",
    ],
)
def test_what_lower_case_would_change_is_asked_as_it_stands(pattern: str) -> None:
    assert lower_ascii(pattern) is None
    assert (
        contains_any(NAMES, [f"(?i){pattern}"])[0].to_list()
        == NAMES.str.contains(f"(?i){pattern}").to_list()
    )


def test_only_what_asks_for_any_case_gets_it() -> None:
    assert contains(NAMES, "gemm").to_list() == NAMES.str.contains("gemm").to_list()
    assert contains(NAMES, "(?i)gemm").to_list() == [True, True, *[False] * 6]
