"""What users and programs see of Traceloom, compared with the snapshot in tests/surfaces.

    python scripts/surfaces             # all of it; the exit code is 5 where something differs
    python scripts/surfaces --static    # only what can be read without running anything: some seconds
    python scripts/surfaces --update    # write it anew
    python scripts/surfaces report link # some parts
    python scripts/surfaces --texts DIR # keep there what digests stand for: `diff` those of two runs

A change of a surface is meant, and said in the commit that changes the snapshot, or it is a fault.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "tests" / "surfaces"
STATIC, AGENT, FLEET = "static", "agent", "fleet"
PARTS: dict[str, tuple[str, ...]] = {
    FLEET: (),
    "anonymize": ("anonymize",),
    "replay": ("replay",),
    "report": ("report",),
    "simulate": ("simulate",),
    "record": ("record",),
    AGENT: (),
    "graphs": ("link", "convert", "whatif", "validate", "show", "generate", "calibrate"),
    "compared": ("diff", "baseline", "memory"),
    "messages": ("explain", "completion", "usage"),
    STATIC: (),
}
"""Part -> the verbs that it calls; each part is a process, those that take longest first.

Other verbs are a failure.
"""

_SHOWN = 400  # lines of differences
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "TMPDIR", "SURFACES_TEXTS")
"""Others are not of the snapshot: answers name jobs, threads, proxies and CI by them."""
CHECK_FAILED = 5


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--static", action="store_true", help="only what can be read without running anything"
    )
    parser.add_argument("--update", action="store_true", help="write the snapshot anew")
    parser.add_argument(
        "--texts", type=Path, metavar="FOLDER", help="keep there what each digest stands for"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.part:
        return _made(args.part)
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.texts:
        args.texts.mkdir(parents=True, exist_ok=True)
        os.environ["SURFACES_TEXTS"] = str(args.texts.resolve())
    parts = [STATIC] if args.static else args.parts or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="traceloom-surfaces-") as folder:
        home = Path(folder)
        ended = [_process("inputs", home)] if set(parts) - {STATIC} else []
        with ThreadPoolExecutor(args.jobs) as pool:
            ended += pool.map(lambda part: _process(part, home), parts)
        made = {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted((home / "made").iterdir())
        }
    sys.stdout.write("".join(text for _, text in ended))
    if any(code for code, _ in ended):
        return 1
    whole = not args.static and not args.parts
    code = _update(made, whole=whole) if args.update else _compare(made, parts)
    return code or CHECK_FAILED * any(text for _, text in ended)


def _process(part: str, home: Path) -> tuple[int, str]:
    """Make a part in a process of its own; its exit code, and what is wrong."""
    began = time.monotonic()
    own = home / part
    own.mkdir()
    (home / "made").mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment = {
        **kept,
        "HOME": str(own),
        "XDG_CONFIG_HOME": str(own),
        "XDG_DATA_HOME": str(own),
        "TRACELOOM_CACHE_DIR": str(own / "cache"),
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "POLARS_MAX_THREADS": "2",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    command = [sys.executable, str(Path(__file__).parent), "--part", part]
    ran = subprocess.run(
        command, cwd=own, env=environment, capture_output=True, text=True, check=False
    )
    sys.stderr.write(f"{part}: {time.monotonic() - began:.0f} s\n")
    return ran.returncode, ran.stdout + (ran.stderr if ran.returncode else "")


def _made(part: str) -> int:
    """Make a part, in a folder that is the current one; its files lie in `made` beside it."""
    here = Path.cwd()
    into = here.parent / "made"
    if part == STATIC:
        return _static(into)
    import answers
    import commands

    if part == "inputs":
        commands.inputs(here)
        return 0
    folder = here / "work"
    shutil.copytree(here.parent / "inputs", folder)
    os.chdir(folder)
    if part in (AGENT, FLEET):
        service = importlib.import_module(part)
        describer = answers.Describer(answers.Masker(folder, service.MASKS, service.KEYS))
        made = service.describe(folder, describer)
        for name, lines in made.items():
            (into / name).write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
        return 0
    for verb in PARTS[part]:
        describer = answers.Describer(answers.Masker(folder), measured=verb in commands.MEASURED)
        caller = commands.Caller(folder, describer)
        lines = [line for call in commands.calls(commands.CASES[verb]) for line in caller(call)]
        text = "\n".join([*lines, *describer.shapes.lines()]).rstrip() + "\n"
        (into / f"commands-{verb}.txt").write_text(text, encoding="utf-8")
    return 0


def _static(into: Path) -> int:
    """What needs no call; and that no option, route or verb lacks its case."""
    import agent
    import commands
    import fleet
    import static

    for name, text_of in static.PARTS.items():
        (into / name).write_text(text_of(), encoding="utf-8")
    every = [
        call.words
        for verb, text in commands.CASES.items()
        if verb != "usage"
        for call in commands.calls(text)
    ]
    uncovered = [
        *commands.uncovered([*every, *agent.calls(), *fleet.calls()]),
        *agent.uncovered(),
        *fleet.uncovered(),
    ]
    called = {verb for verbs in PARTS.values() for verb in verbs}
    uncovered += [
        f"no part calls the verb: {verb}" for verb in commands.CASES if verb not in called
    ]
    sys.stdout.write("".join(f"{line}\n" for line in uncovered))
    return 0


def _compare(made: dict[str, str], parts: Sequence[str]) -> int:
    """Print what differs from the snapshot; the exit code."""
    kept = {path.name: path.read_text(encoding="utf-8") for path in sorted(SNAPSHOT.glob("*.t?*"))}
    if set(parts) != set(PARTS):  # what was not made is not compared
        kept = {name: text for name, text in kept.items() if name in made}
    lines: list[str] = []
    for name in sorted({*kept, *made}):
        before, now = kept.get(name, "").splitlines(), made.get(name, "").splitlines()
        if before != now:
            lines += [f"{name}: differs from the snapshot", *_differences(before, now), ""]
    if not lines:
        sys.stdout.write(f"{len(made)} files of surfaces are as in the snapshot.\n")
        return 0
    more = f"... and {len(lines) - _SHOWN} lines more\n" if len(lines) > _SHOWN else ""
    last = "Where that is meant: make surfaces UPDATE=1, and say in the commit what changed.\n"
    sys.stdout.write("\n".join(lines[:_SHOWN]) + f"\n{more}{last}")
    return CHECK_FAILED


def _differences(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Lines that went and came, each below the headline that it stands under."""
    shown: list[str] = []
    for tag, from_0, to_0, from_1, to_1 in difflib.SequenceMatcher(
        None, before, now, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            continue
        above = next((line for line in reversed(now[: from_1 + 1]) if re.match(r"==|--", line)), "")
        if above and above not in shown:
            shown.append(above)
        shown += [f"  - {line}" for line in before[from_0:to_0]] + [
            f"  + {line}" for line in now[from_1:to_1]
        ]
    return shown


def _update(made: dict[str, str], *, whole: bool) -> int:
    """Write the snapshot; of the whole nothing else stays there."""
    SNAPSHOT.mkdir(exist_ok=True)
    for path in SNAPSHOT.glob("*.t?*") if whole else ():
        path.unlink()
    for name, text in made.items():
        (SNAPSHOT / name).write_text(text, encoding="utf-8")
    sys.stdout.write(
        f"Wrote {len(made)} files of {sum(map(len, made.values())) / 1e3:.0f} kB into {SNAPSHOT}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
