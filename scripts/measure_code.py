"""Measure how the code reads: names, small helpers, comments, tests.

python scripts/measure_code.py                  a table for the package
python scripts/measure_code.py --list odd-names where they are (or: single-use, class-names)
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from symtable import SymbolTable, symtable

ROOT = Path(__file__).resolve().parents[1]
ODD_NAMES = frozenset(
    (
        "found",
        "one",
        "told",
        "said",
        "mine",
        "theirs",
        "known",
        "place",
        "given",
        "looks",
        "ask",
        "ground",
        "lot",
        "doings",
    )
)
"""Names that do not say what they hold."""

SMALL = 8  # lines of a helper that may only shorten its caller
_ANY = re.compile(r"\bAny\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One parsed file."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Module:
        """Read a file of the project."""
        return cls(path.relative_to(ROOT), path.read_text(encoding="utf-8"))

    @cached_property
    def tree(self) -> ast.Module:
        """What Python parses it to."""
        return ast.parse(self.text)

    def functions(self) -> Iterator[Function]:
        """All functions and methods, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def code_lines(self) -> int:
        """Lines that are neither empty nor a comment."""
        return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in self.text.splitlines())

    def comments(self) -> int:
        """Lines that hold a comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def scopes(table: SymbolTable) -> Iterator[SymbolTable]:
    """All scopes below one: functions, classes, lambdas and comprehensions."""
    for scope in table.get_children():
        yield scope
        yield from scopes(scope)


def local_names(scope: SymbolTable) -> set[str]:
    """Parameters and variables of a function, not those of functions and classes inside it, nor what it imports."""
    return {s.get_name() for s in scope.get_symbols() if s.is_local() and not (s.is_namespace() or s.is_imported())}


def odd_names(modules: list[Module]) -> list[str]:
    """Where each odd name is."""
    return [
        f"{module.path}:{scope.get_lineno()} {scope.get_name()}: {name}"
        for module in modules
        for scope in scopes(symtable(module.text, str(module.path), "exec"))
        if scope.get_type() == "function"
        for name in sorted(local_names(scope) & ODD_NAMES)
    ]


def single_use(modules: list[Module]) -> list[str]:
    """Small private functions of modules that their module names once."""
    out = []
    for module in modules:
        uses = Counter(re.findall(r"\b_\w+", module.text))
        out += [
            f"{module.path}:{node.lineno} {node.name}"
            for node in module.tree.body
            if isinstance(node, Function)
            and is_private(node.name)
            and not node.decorator_list
            and uses[node.name] == 2
            and (node.end_lineno or node.lineno) - node.lineno < SMALL
        ]
    return out


def repeated_classes(modules: list[Module]) -> list[str]:
    """Names of classes that more than one class has, with their modules."""
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{module.path}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def figures(modules: list[Module]) -> dict[str, str]:
    """What is measured, by its name."""
    functions = [function for module in modules for function in module.functions()]
    lines = sum(module.code_lines() for module in modules)
    tests = sum(Module.read(path).code_lines() for path in (ROOT / "tests").rglob("*.py"))
    private = sum(is_private(function.name) for function in functions)
    return {
        "modules": f"{len(modules):,}",
        "lines of code": f"{lines:,}",
        "odd local names per 100 functions": f"{100 * len(odd_names(modules)) / len(functions):.1f}",
        "private functions per 1,000 lines": f"{1000 * private / lines:.1f}",
        "small helpers with a single use": f"{len(single_use(modules)):,}",
        "class names used more than once": f"{len(repeated_classes(modules)):,}",
        "lines with comments": f"{sum(module.comments() for module in modules) / lines:.1%}",
        "Any": f"{sum(len(_ANY.findall(module.text)) for module in modules):,}",
        "lines of tests per line of code": f"{tests / lines:.2f}",
    }


LISTS = {"odd-names": odd_names, "single-use": single_use, "class-names": repeated_classes}


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=sorted(LISTS), help="places instead of figures")
    arguments = parser.parse_args()
    modules = [Module.read(path) for path in sorted((ROOT / "src").rglob("*.py"))]
    if arguments.list:
        sys.stdout.write("\n".join([*LISTS[arguments.list](modules), ""]))
        return
    for name, value in figures(modules).items():
        sys.stdout.write(f"{name:38} {value:>8}\n")


if __name__ == "__main__":
    main()
