"""Writes docs/images: what terminals and pages show, of the demo run and of a made job for what
takes GPUs.

    make pictures      # records the demo first

Terminals become SVG, pages PNG; Chromium takes them. Run it after any change of a view.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

from support.jobs import Change, LateHost, ParallelRecipe, SlowRank, parallel_job

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
_COLUMNS = 100
_MOST_LINES = 60
_WIDTH, _HEIGHT = 1280, 800


@dataclass(frozen=True)
class Page:
    """A picture of a page.

    Attributes:
        command: What writes it, without `-o`.
        place: The view that is shown, as in its address; empty for the first.
    """

    command: str
    place: str = ""


TERMINALS = {
    "terminal-report": "report demo",
    "terminal-gpu": "report gpu",
    "terminal-findings": "report gpu --only findings",
    "terminal-across-ranks": "report gpu --only across_ranks",
    "terminal-idle": "report gpu --only idle_gaps --top 5",
    "terminal-diff": "diff gpu-fixed gpu --top 5",
    "terminal-verdict": "diff gpu-fixed gpu --fail-if 'step_time > 3%'",
    "terminal-whatif": "whatif gpu --set 'rank 3 delay remove'",
    "terminal-memory": "memory demo",
    "terminal-link": "link demo",
    "terminal-explain": "explain data-starved",
}
PAGES = {
    "report": Page("report demo"),
    "report-gpu": Page("report gpu"),
    "timeline": Page("report gpu", "#timeline"),
    "diff": Page("diff gpu-fixed gpu"),
    "whatif": Page("whatif gpu --set 'rank 3 delay remove'"),
    "memory": Page("memory demo"),
    "workload": Page("show gpu.graph"),
}


def terminal(command: str, folder: Path, target: Path) -> None:
    """Run a command as on a terminal and draw what it prints."""
    env = os.environ | {
        "COLUMNS": str(_COLUMNS),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "PYTHONIOENCODING": "utf-8",
    }
    words = [sys.executable, "-m", "traceloom", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in {0, 5}:
        raise SystemExit(f"traceloom {command}: {done.stderr}")
    lines = done.stdout.rstrip().splitlines()
    shown = lines[:_MOST_LINES] + (["…"] if len(lines) > _MOST_LINES else [])
    console = Console(record=True, width=_COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: PTH123, SIM115
    console.print(Text.from_ansi("\n".join(shown)))
    drawn = console.export_svg(title=f"traceloom {command}", unique_id=target.stem)
    without_fonts = re.sub(
        r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL
    )  # which come from elsewhere
    target.write_text(without_fonts, encoding="utf-8")


def page(picture: Page, folder: Path, browser: Any, target: Path) -> None:
    """Write a page and take its picture."""
    file = folder / f"{target.stem}.html"
    words = [
        sys.executable,
        "-m",
        "traceloom",
        *shlex.split(picture.command),
        "-q",
        "--force",
        "-o",
        str(file),
    ]
    subprocess.run(words, cwd=folder, check=True)
    tab = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
    tab.goto(f"{file.as_uri()}{picture.place}")
    tab.wait_for_timeout(1500)
    tab.screenshot(path=target)
    tab.close()


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser that is installed."""
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


def made(folder: Path) -> None:
    """A job on four GPUs in which rank 3 computes slowly and rank 1 waits for its data; and the
    same without both.
    """
    faults = (SlowRank(3, 1.4), LateHost(1, us=3000, steps=(2, 3), by="data"))
    job = parallel_job(ParallelRecipe(data=4, microbatches=2, steps=6, stacks=True, faults=faults))
    job.run().write(folder / "gpu", host=True)
    job.run(Change(without=frozenset(fault.label for fault in faults))).write(
        folder / "gpu-fixed", host=True
    )


def main() -> int:
    """Take all pictures, or those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--demo", type=Path, default=ROOT / "demo" / "run", help="the recorded demo run"
    )
    parser.add_argument("names", nargs="*", help="only these pictures")
    args = parser.parse_args()
    wanted = set(args.names) or {*TERMINALS, *PAGES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "demo").symlink_to(args.demo.resolve())
        made(folder)
        subprocess.run(
            [sys.executable, "-m", "traceloom", "link", "gpu", "-q", "-o", "gpu.graph"],
            cwd=folder,
            check=True,
        )
        for name in sorted(TERMINALS.keys() & wanted):
            terminal(TERMINALS[name], folder, IMAGES / f"{name}.svg")
        with chromium() as browser:
            for name in sorted(PAGES.keys() & wanted):
                page(PAGES[name], folder, browser, IMAGES / f"{name}.png")
    sys.stdout.write(f"Wrote {len(wanted)} pictures to {IMAGES}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
