"""Writes public_names.txt of traceloom.workload.anonymize: names that everybody may know, since
they are PyTorch's own.

Needs an installed torch; run it when a new version is supported. Names of earlier versions stay in
the file.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

PAGE = (
    Path(__file__).resolve().parents[1]
    / "src"
    / "traceloom"
    / "workload"
    / "anonymize"
    / "public_names.txt"
)
_WORD = re.compile(r"[A-Za-z_]\w*|\d+")


def found() -> dict[str, set[str]]:
    """Section -> names of the installed PyTorch."""
    schemas = torch._C._jit_get_all_schemas()  # noqa: SLF001
    header = (
        Path(torch.__file__).parent
        / "include"
        / "torch"
        / "csrc"
        / "autograd"
        / "generated"
        / "Functions.h"
    )
    nodes = (
        re.findall(r"struct TORCH_API (\w+)", header.read_text(encoding="utf-8"))
        if header.exists()
        else []
    )
    return {
        "ops": {
            schema.name for schema in schemas if not schema.name.startswith(("_test", "prim::"))
        },
        "nodes": set(nodes),
        "modules": _classes(torch.nn),
        "optimizers": _classes(torch.optim),
        "words": {
            word for schema in schemas for word in _WORD.findall(str(schema).split("(", 1)[1])
        }
        | {schema.overload_name for schema in schemas if schema.overload_name},
    }


def _classes(package: object) -> set[str]:
    return {
        name
        for name, thing in vars(package).items()
        if inspect.isclass(thing) and not name.startswith("_")
    }


def known() -> dict[str, set[str]]:
    """Section -> names that the file has already."""
    sections: dict[str, set[str]] = {}
    if PAGE.exists():
        for line in PAGE.read_text(encoding="utf-8").splitlines():
            if line.startswith("=== "):
                into = sections.setdefault(line[4:], set())
            elif line and sections:
                into.add(line)
    return sections


def merged(sections: Iterable[dict[str, set[str]]]) -> dict[str, set[str]]:
    """All names of all, by section."""
    whole: dict[str, set[str]] = {}
    for part in sections:
        for name, names in part.items():
            whole.setdefault(name, set()).update(names)
    return whole


def main() -> int:
    """Write the file."""
    whole = merged([known(), found()])
    lines = [
        "# Public vocabulary; names of PyTorch are added by scripts/public_names.py, the rest by hand."
    ]
    for section, names in whole.items():
        lines += ["", f"=== {section}", *sorted(names)]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write(
        f"Wrote {PAGE}: {', '.join(f'{len(names)} {name}' for name, names in whole.items())}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
