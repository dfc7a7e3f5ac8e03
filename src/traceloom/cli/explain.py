"""`traceloom explain SLUG`: explains an error, a notice, a finding or a validation rule, with its
remedy.

The texts are pages of the documentation: a wheel has them in `traceloom/docs`, a checkout in
`docs`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from traceloom.cli import options as types
from traceloom.errors import DOCUMENTATION, UsageError, nearest

if TYPE_CHECKING:
    from rich.text import Text

_PAGE_KINDS = {
    "reference/messages.md": "message",
    "reference/validation-rules.md": "rule of traceloom validate",
}
_MAX_WIDTH = 100
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
DESCRIPTION = (
    "Say what an error, a notice, a finding or a rule of validation means, and what to do about it. "
    "Without a name: list all of them."
)
EXAMPLES = """\
examples:
  traceloom explain data-starved     a finding
  traceloom explain no-traces        an error or a notice
  traceloom explain                  all there is
"""


class Explanation(NamedTuple):
    """The documentation of one slug.

    Attributes:
        slug: The name; `broken-*` stands for all names with this prefix.
        kind: The kind of thing that the slug names.
        text: Markdown without its heading; links are URLs.
        url: Its URL in the documentation.
    """

    slug: str
    kind: str
    text: str
    url: str

    @property
    def first_sentence(self) -> str:
        paragraph = " ".join(re.split(r"\n\n|\n#", self.text.strip())[0].split())
        return re.sub(r"[`*]|\]\([^)]*\)|\[", "", re.split(r"(?<=[.:;]) ", paragraph)[0])


def load_explanations() -> list[Explanation]:
    """Returns all explanations: findings first, in alphabetical order, then in the order of the
    pages.
    """
    package = Path(__file__).resolve().parents[1]
    home = next(home for home in (package / "docs", package.parents[1] / "docs") if home.is_dir())
    out = []
    for path in sorted((home / "findings").glob("*.md")):
        heading, _, text = path.read_text(encoding="utf-8").partition("\n")
        slug, colon, title = heading.removeprefix("# ").partition(": ")
        if colon:
            url = f"{DOCUMENTATION}/findings/{slug}/"
            out.append(
                Explanation(
                    slug,
                    "finding",
                    f"{title[:1].upper()}{title[1:]}.\n{_resolve_links(text, url)}",
                    url,
                )
            )
    for page, kind in _PAGE_KINDS.items():
        url = f"{DOCUMENTATION}/{page.removesuffix('.md')}/"
        parts = re.split(
            r"^### `?([^`\n]+)`?\n", (home / page).read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        for slug, text in zip(parts[1::2], parts[2::2], strict=True):
            introduction = re.split(r"^## ", text, flags=re.MULTILINE)[0]
            out.append(Explanation(slug, kind, _resolve_links(introduction, url), f"{url}#{slug}"))
    return out


def _resolve_links(text: str, url: str) -> str:
    """Replaces links to other pages of the documentation by absolute URLs."""
    from urllib.parse import urljoin

    def address(match: re.Match[str]) -> str:
        page = re.sub(r"(index)?\.md$", "", match[2])
        page_url = url if not match[2] else f"{urljoin(url.rstrip('/'), page).rstrip('/')}/"
        return f"[{match[1]}]({page_url}{match[3] or ''})"

    return _LINK.sub(address, text)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "slug", nargs="?", metavar="NAME", help="the name that a message, report or page shows"
    )
    types.add_verbosity_options(parser, "no address of the page behind the text")


def run(args: argparse.Namespace) -> int:
    """Prints the text; returns the exit code.

    Raises:
        UsageError: slug `no-such-name`.
    """
    from traceloom.report.views import terminal

    explanations = load_explanations()
    selected = [
        entry for entry in explanations if args.slug is not None and fnmatch(args.slug, entry.slug)
    ]
    if args.slug is not None and not selected:
        raise UsageError(
            f"nothing is called `{args.slug}`",
            slug="no-such-name",
            hint=(
                nearest(args.slug, [entry.slug for entry in explanations])
                + "traceloom explain lists all names"
            ),
        )
    if selected:
        terminal.print_lines(
            lambda width: _render_explanations(selected, width, quiet=args.quiet), sys.stdout
        )
    else:
        terminal.print_lines(lambda width: _render_list(explanations, width), sys.stdout)
    return 0


def _render_explanations(
    explanations: list[Explanation], width: int, *, quiet: bool
) -> Iterator[Text]:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.text import Text

    console = Console(width=min(width, _MAX_WIDTH))
    for entry in explanations:
        yield Text.assemble((entry.slug, "bold"), f"  {entry.kind}\n")
        for line in console.render_lines(Markdown(entry.text, hyperlinks=False), pad=False):
            yield Text.assemble(*((segment.text, segment.style or "") for segment in line))
        yield Text("" if quiet else f"\n{entry.url}", "dim")


def _render_list(explanations: list[Explanation], width: int) -> Iterator[Text]:
    from rich.text import Text

    widest = max(len(entry.slug) for entry in explanations)
    for kind in dict.fromkeys(entry.kind for entry in explanations):
        yield Text(f"{kind}s" if " " not in kind else f"{kind.replace(' ', 's ', 1)}", "bold")
        for entry in explanations:
            if entry.kind == kind:
                line = Text.assemble(f"  {entry.slug:<{widest}}  ", (entry.first_sentence, "dim"))
                line.truncate(width, overflow="ellipsis")
                yield line
        yield Text("")
