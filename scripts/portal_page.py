"""Writes docs/reference/pages.md from the pages of the service; with --check, says whether it is up
to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from made_page import write_or_check

from traceloom.fleet.portal.app import PAGES
from traceloom.fleet.portal.tables import ROWS_PER_PAGE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "pages.md"
_TEXT = f"""\
# Pages

<!-- Written by scripts/portal_page.py from src/traceloom/fleet/portal; do not edit. -->

The pages of `traceloom serve`, at the address that it prints. [Traces on a page](../tutorials/portal.md) goes through
them; [Keep captures of a fleet](../how-to/serve.md#pages) says who may sign in. Which page shows what one may want to
know [stands beside the commands](../concepts/fleet.md#what-one-may-want-to-know). A page asks the same routes as
`traceloom fleet` (`/api/v1/openapi.json`), so it refuses what they refuse.

{{table}}

Live pages show each change within about a second. They work without JavaScript too, as they were when they were opened.

## Tables

What a table shows stands in the address, so that it can be sent to others. For a table `hosts`:

| parameter | what it does |
|---|---|
| `hosts.q=node7 lost` | only rows that have all of these words |
| `hosts.sort=-devices` | sorted by this column; `-`: the largest first |
| `hosts.leaf=2` | the second {ROWS_PER_PAGE} rows |
| `table=hosts&as=csv` | all rows that the filter leaves, with exact values; `as=json`: a list of objects |

## Keys

`/` goes to the filter, `t` switches between light and dark.
"""


def page() -> str:
    """The whole page."""
    lines = ["| page | address | role | | what it is for |", "|---|---|---|---|---|"]
    for each in PAGES:
        address = each.path.replace(":path}", "}")
        lines.append(
            f"| {each.title} | `{address}` | {each.role} | {'live' if each.live else ''} | {each.about} |"
        )
    return _TEXT.replace("{table}", "\n".join(lines))


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
