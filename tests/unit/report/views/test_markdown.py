"""Names of strangers stay names in Markdown."""

from __future__ import annotations

import pytest

from traceloom.report.views.markdown import escape_markdown, format_code_span


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("aten::mm", "`aten::mm`"),
        ("a|b", "`a\\|b`"),
        ("`rm`", "`` `rm` ``"),
        ("``", "``` `` ```"),
        ("<script>", "`<script>`"),
        ("two\nlines", "`two\\x0alines`"),
        ("", "`  `"),
    ],
)
def test_a_name_cannot_leave_its_code_span(name: str, shown: str) -> None:
    assert format_code_span(name) == shown


def test_words_have_no_markup_no_html_and_mention_nobody() -> None:
    assert escape_markdown("*a* [x](y) <b> @user | `c` #1") == (
        "\\*a\\* \\[x\\](y) &lt;b&gt; &#64;user \\| \\`c\\` \\#1"
    )
