"""Files with rules of the user's: models of operators (Python), and kinds of kernels (JSON)."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Iterable
from pathlib import Path

from traceloom.analyze.kind_rules import KindRule, read_kind_rules
from traceloom.errors import InputError, UsageError


def load_rules(paths: Iterable[str | Path]) -> tuple[KindRule, ...]:
    """Read files of rules.

    A `.py` file is run as a program is: it is expected to register models of operators (see `analyze.flops`), which
    stay registered as long as the process lives. A `.json` file is a list of rules for kinds of kernels.

    Args:
        paths: The files, in the order in which they count.

    Returns:
        The rules for kinds of kernels, of all `.json` files.

    Raises:
        InputError: slugs `rules-failed` (a `.py` file cannot be read, or fails), `kernel-rules-unreadable`.
        UsageError: slugs `no-such-rules` (any other ending), `bad-kernel-rule`.
    """
    rules: list[KindRule] = []
    for path in map(Path, paths):
        if path.suffix == ".json":
            rules += read_kind_rules(path)
        elif path.suffix == ".py":
            try:
                runpy.run_path(str(path))
            except (Exception, SystemExit) as error:
                # Whatever a program of the user's raises is said of that program.
                frames = traceback.extract_tb(error.__traceback__)
                lines = [frame.lineno for frame in frames if frame.filename == str(path)]
                where = f"{path}, line {lines[-1]}" if lines else str(path)
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                message = f"the rules cannot be loaded: {reason}"
                raise InputError(message, slug="rules-failed", where=where) from error
        else:
            raise UsageError(
                f"`{path}` is no file of rules: its ending is neither .py nor .json",
                slug="no-such-rules",
                hint="write models of operators in Python, rules for kinds of kernels as JSON",
            )
    return tuple(rules)
