"""Measure the package by what no layout changes: modules, statements, tokens, functions, classes,
imports, names.

python scripts/measure_code.py                  a table: every package below src/traceloom, and all of it
python scripts/measure_code.py --against TAG    the same, with the differences from a revision of git

Statements are nodes of the syntax tree; tokens are names, operators and numbers. Strings are not
counted as tokens: one may hold a word or a page, and versions of Python split f-strings
differently. Docstrings (also of attributes) and imports are given as shares of the statements. A
generated module (`*_pb2.py`) counts as a module and for nothing else.

Value types are classes that derive from `msgspec.Struct`, `NamedTuple` or `TypedDict`, or are
decorated as dataclasses, also through classes of the project; enumerations are a column of their
own. A module has one importer if exactly one other module imports it or a name that it defines,
directly or from a package that exports it; packages do not count.

A function's name should begin with a verb (VERBS; `count_steps`, not `count_of`). Left out of that
share are names that somebody else chose or that stand for a value: dunder methods, properties,
methods that a base class in the project or in the standard library defines or that are marked
`@override`, and functions that the `__init__` of a package exports, as `analyze.gpu_time`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "traceloom"
LONG = 100  # columns

VERBS = frozenset(
    """
    abandon abort accept acquire act add adjust advance align allocate allow analyse analyze announce anonymise
    anonymize append apply approve arrange assemble assert assign attach authenticate authorise authorize await
    begin bind break build calculate calibrate call can cancel capture cast change check choose classify clean clear
    clip clone close collapse collect combine commit compact compare compile complete compress compute concatenate
    configure confirm connect consume contain contains continue convert copy correct count create cut decide declare
    decode decompress decrease deduplicate defer define delete deliver derive describe detach detect determine
    disable discard disconnect discover dispatch display divide do does download draw drop dump emit enable encode
    encrypt end enforce enlarge enrich enrol ensure enter enumerate erase escape establish estimate evaluate evict
    examine exclude execute exit expand expect explain export expose extend extract fail fetch fill filter finalise
    finalize find finish fit fix flatten flush fold follow forget format forward free freeze gather generate get
    give go grow guard handle has hash hide hold identify ignore import include increase increment infer inherit
    initialise initialize inject insert inspect install instantiate interpolate interpret intersect invalidate
    invert invoke is iterate join keep kill learn leave link list listen load locate lock log look lower make map
    mark mask match measure merge migrate monitor mount move multiply must need needs normalise normalize notify
    observe obtain omit open overlap override pack pad parse partition pass patch pause peek perform pick poll pop
    populate prefetch prepare preserve prevent print produce propagate prove provide prune publish pull purge push
    put raise read rebuild receive recognise recognize reconnect record recover redirect reduce refresh refuse
    register reject release reload remember remove rename render renew reorder repair repeat replace replay reply
    report require rescale reserve reset reshape resolve respond restart restore restrict resume retrieve retry
    return reuse reverse revoke rewrite roll run save scale scan search seek select send separate serialise
    serialize serve set settle shift should show shrink shuffle sign simplify simulate skip sleep slice sort spawn
    split start stop store strip submit subtract summarise summarize supports suspend swap switch sync synchronise
    synchronize take track transform translate transmit transpose traverse trim truncate try unescape unlock unpack
    unquote unregister unwrap update upload use validate verify visit wait wake walk warn watch wrap write yield
    """.split()  # noqa: SIM905
)

VALUES = {
    "msgspec.Struct": "Struct",
    "typing.NamedTuple": "NamedTuple",
    "typing.TypedDict": "TypedDict",
    **{f"enum.{name}": "Enum" for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")},
}
SHARES = {
    "docstring %": ("docstrings", "statements"),
    "import %": ("imports", "statements"),
    "verb %": ("verbs", "free names"),
}  # of one count in another
COLUMNS = [
    "modules", "1 importer", "statements", "docstring %", "import %", "imports", "tokens", "functions", "verb %",
    "classes", "Struct", "dataclass", "NamedTuple", "TypedDict", "Enum",
]  # fmt: skip
LAYOUT = ["fmt: skip", "long lines", "lines"]
COUNTED_TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
FSTRING_STARTS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")} - {
    None
}
FSTRING_ENDS = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")} - {None}


@dataclass
class ClassFacts:
    """What one class statement says: its bases and decorators as dotted names, and its methods."""

    bases: list[str]
    decorators: list[str] = field(default_factory=list)
    methods: set[str] = field(default_factory=set)


@dataclass
class FunctionFacts:
    """What one function statement says."""

    name: str
    scope: str  # the classes and functions around it
    in_class: bool
    decorators: list[str]


@dataclass
class Module:
    """What one module says, without knowledge of the others."""

    name: str
    is_package: bool
    counts: Counter[str] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)  # that imports bind -> where they come from
    imported: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    classes: dict[str, ClassFacts] = field(default_factory=dict)
    functions: list[FunctionFacts] = field(default_factory=list)

    def expand(self, expression: ast.expr) -> str:
        """The dotted name of an expression, from the module that its first part is imported from."""
        while isinstance(expression, ast.Call | ast.Subscript):
            expression = expression.func if isinstance(expression, ast.Call) else expression.value
        if isinstance(expression, ast.Attribute):
            return f"{self.expand(expression.value)}.{expression.attr}"
        name = getattr(expression, "id", "")
        return self.names.get(name) or f"{self.name if name in self.classes else 'builtins'}.{name}"


def read_module(path: str, text: str) -> Module:
    """Parse one file, whose path begins below `src`."""
    parts = path.removesuffix(".py").split("/")
    is_package = parts[-1] == "__init__"
    module = Module(".".join(parts[:-1] if is_package else parts), is_package)
    module.counts["modules"] = 1
    if path.endswith("_pb2.py"):
        return module
    lines = text.splitlines()
    module.counts["lines"] = len(lines)
    module.counts["long lines"] = sum(len(line) > LONG for line in lines)
    count_tokens(text, module.counts)
    statements = list(walk_statements(ast.parse(text).body))
    module.counts["statements"] = len(statements)
    for statement, _, _ in statements:  # names first, wherever they are bound
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.counts["imports"] += 1
            bind_import(module, statement)
        elif isinstance(statement, ast.Assign | ast.Expr):
            read_exports(module, statement)
    for statement, scope, in_class in statements:
        read_definition(module, statement, scope, in_class)
    return module


def count_tokens(text: str, counts: Counter[str]) -> None:
    """Count names, operators and numbers outside of strings, and `fmt: skip`."""
    depth = 0
    for kind, string, *_ in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += (kind in FSTRING_STARTS) - (kind in FSTRING_ENDS)
        if kind in COUNTED_TOKENS and not depth:
            counts["tokens"] += 1
        elif kind == tokenize.COMMENT and "fmt: skip" in string:
            counts["fmt: skip"] += 1


def walk_statements(
    body: Iterable[ast.stmt], scope: str = "", in_class: bool = False
) -> Iterator[tuple[ast.stmt, str, bool]]:
    """Yield every statement with the classes and functions around it, and whether the innermost of
    them is a class.
    """
    for statement in body:
        yield statement, scope, in_class
        inner, is_class = scope, in_class
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner, is_class = join_names(scope, statement.name), isinstance(statement, ast.ClassDef)
        for part in (
            statement,
            *getattr(statement, "handlers", ()),
            *getattr(statement, "cases", ()),
        ):
            for block in ("body", "orelse", "finalbody"):
                yield from walk_statements(getattr(part, block, ()), inner, is_class)


def join_names(scope: str, name: str) -> str:
    """Join a name to the one that it stands in."""
    return f"{scope}.{name}" if scope else name


def bind_import(module: Module, statement: ast.Import | ast.ImportFrom) -> None:
    """Note what an import names and binds."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            module.imported.add(alias.name)
            root = alias.name.split(".")[0]
            module.names[alias.asname or root] = alias.name if alias.asname else root
        return
    home = statement.module or ""
    if statement.level:
        above = module.name.split(".")
        above = above[: len(above) - statement.level + module.is_package]
        home = ".".join([*above, home] if home else above)
    for alias in statement.names:
        module.names[alias.asname or alias.name] = f"{home}.{alias.name}"
        if module.is_package and alias.asname == alias.name:
            module.exported.add(alias.name)
        else:
            module.imported.add(f"{home}.{alias.name}")


def read_exports(module: Module, statement: ast.Assign | ast.Expr) -> None:
    """Count a docstring; note `__all__` and the table of names that a package gives to `lazy`."""
    value = statement.value
    if (
        isinstance(statement, ast.Expr)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
    ):
        module.counts["docstrings"] += 1
    if not module.is_package:
        return
    if isinstance(statement, ast.Assign) and [
        ast.unparse(target) for target in statement.targets
    ] == ["__all__"]:
        module.exported.update(re.findall(r"\w+", " ".join(find_strings(value))))
    elif (
        isinstance(value, ast.Call)
        and ast.unparse(value.func) == "lazy"
        and isinstance(value.args[1], ast.Dict)
    ):
        for name, home in zip(find_strings(value.args[1].keys), value.args[1].values, strict=True):
            module.exported.add(name)
            if isinstance(home, ast.Constant):
                where = str(home.value or "")
                where = where if where and not where.startswith(".") else module.name + where
                module.names.setdefault(name, f"{where}.{name}")


def find_strings(value: ast.expr | Iterable[ast.expr | None]) -> list[str]:
    """The strings of a list or tuple."""
    elements = getattr(value, "elts", ()) if isinstance(value, ast.expr) else value
    return [str(element.value) for element in elements if isinstance(element, ast.Constant)]


def read_definition(module: Module, statement: ast.stmt, scope: str, in_class: bool) -> None:
    """Note a function or a class, also one that a call such as `TypedDict("Row", {...})` makes."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = [module.expand(decorator) for decorator in statement.decorator_list]
        module.functions.append(FunctionFacts(statement.name, scope, in_class, decorators))
        if in_class:
            module.classes[scope].methods.add(statement.name)
    elif isinstance(statement, ast.ClassDef):
        bases = [module.expand(base) for base in statement.bases]
        decorators = [module.expand(decorator) for decorator in statement.decorator_list]
        module.classes.setdefault(join_names(scope, statement.name), ClassFacts(bases, decorators))
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        made_by, target = module.expand(statement.value), statement.targets[0]
        if made_by in VALUES and isinstance(target, ast.Name):
            module.classes.setdefault(join_names(scope, target.id), ClassFacts([made_by]))


class Tree:
    """All modules of one revision, by name."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.exported = {
            self.resolve(f"{module.name}.{name}")
            for module in self.modules.values()
            for name in module.exported
        }

    def split(self, dotted: str) -> tuple[str, str]:
        """Split a dotted name into the module of the project that it begins with ("" if there is
        none) and the rest.
        """
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            if (home := ".".join(parts[:end])) in self.modules:
                return home, ".".join(parts[end:])
        return "", dotted

    def resolve(self, dotted: str) -> str:
        """Follow a name through imports to where it is defined."""
        for _ in range(10):
            home, rest = self.split(dotted)
            first, dot, after = rest.partition(".")
            target = self.modules[home].names.get(first) if home else None
            if target is None or first in self.modules[home].classes:
                break
            dotted = target + dot + after
        return dotted

    def find_class(self, dotted: str) -> ClassFacts | None:
        """Find a class of the project."""
        home, rest = self.split(self.resolve(dotted))
        return self.modules[home].classes.get(rest) if home else None

    def classify(self, facts: ClassFacts) -> str | None:
        """Say which kind of value a class is, if it is one."""
        if "dataclasses.dataclass" in facts.decorators:
            return "dataclass"
        for base in facts.bases:
            inherited = self.find_class(base)
            kind = VALUES.get(base) if inherited is None else self.classify(inherited)
            if kind is not None:
                return kind
        return None

    def inherits(self, facts: ClassFacts, method: str) -> bool:
        """Whether a base of a class defines a method, in the project or in the standard library."""
        for base in facts.bases:
            inherited = self.find_class(base)
            if inherited is None:
                is_defined = hasattr(load_standard(base), method)
            else:
                is_defined = method in inherited.methods or self.inherits(inherited, method)
            if is_defined:
                return True
        return False

    def is_named_freely(self, module: Module, function: FunctionFacts) -> bool:
        """Whether a function's name had to be chosen, and names no value."""
        name = function.name
        if name.startswith("__") and name.endswith("__"):
            return False
        kinds = {decorator.rpartition(".")[2] for decorator in function.decorators}
        if kinds & {"property", "cached_property", "setter", "deleter", "override"}:
            return False
        if function.in_class:
            return not self.inherits(module.classes[function.scope], name)
        return bool(function.scope) or f"{module.name}.{name}" not in self.exported

    def count_importers(self) -> dict[str, int]:
        """How many other modules import each module."""
        importers: dict[str, set[str]] = {name: set() for name in self.modules}
        for module in self.modules.values():
            for dotted in module.imported:
                home, _ = self.split(self.resolve(dotted))
                if home and home != module.name:
                    importers[home].add(module.name)
        return {name: len(others) for name, others in importers.items()}

    def count(self) -> dict[str, Counter[str]]:
        """Count everything, by room: the packages below the root package, "." for the modules
        beside them.
        """
        importers = self.count_importers()
        rooms: dict[str, Counter[str]] = {}
        for module in self.modules.values():
            parts = module.name.split(".")
            counts = rooms.setdefault(
                parts[1] if len(parts) > 1 + (not module.is_package) else ".", Counter()
            )
            counts.update(module.counts)
            counts["functions"] += len(module.functions)
            counts["classes"] += len(module.classes)
            counts["1 importer"] += not module.is_package and importers[module.name] == 1
            for facts in module.classes.values():
                if kind := self.classify(facts):
                    counts[kind] += 1
            for function in module.functions:
                if self.is_named_freely(module, function):
                    counts["free names"] += 1
                    counts["verbs"] += begins_with_verb(function.name)
        return dict(sorted(rooms.items()))


def load_standard(dotted: str) -> object:
    """Load a class of the standard library; None for any other name."""
    home, _, name = dotted.rpartition(".")
    if home.split(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        return getattr(importlib.import_module(home), name, None)
    except ImportError:  # a class in a class, or another platform's module
        return None


def begins_with_verb(name: str) -> bool:
    """Whether the first word of a name is a verb: `count_steps`, not `count_of`."""
    words = re.match(r"_*([A-Z]?[a-z]+)(_of(?:_|$))?", name)
    return words is not None and words[1].lower() in VERBS and words[2] is None


def read_files(root: Path) -> dict[str, str]:
    """Read the package as it is now: paths below `src`, and texts."""
    source = root / "src"
    return {
        path.relative_to(source).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((source / PACKAGE).rglob("*.py"))
    }


def read_revision(root: Path, revision: str) -> dict[str, str]:
    """Read the package as it was in a revision, without a checkout."""
    command = ["git", "-C", str(root), "archive", "--format=tar", revision, f"src/{PACKAGE}"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"git cannot read {revision}: {done.stderr.decode(errors='replace').strip()}"
        )
    files = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                files[member.name.removeprefix("src/")] = content.read().decode()
    return files


def measure(*trees: Mapping[str, str]) -> list[dict[str, Counter[str]]]:
    """Count some trees of files; files that are equal in several of them are parsed once."""
    files = list(dict.fromkeys(item for tree in trees for item in tree.items()))
    with ProcessPoolExecutor() as pool:
        modules = dict(
            zip(files, pool.map(read_module, *zip(*files, strict=True), chunksize=20), strict=True)
        )
    return [Tree(modules[item] for item in tree.items()).count() for tree in trees]


def value_of(column: str, counts: Mapping[str, int]) -> float | None:
    """A count, or a share in per cent; None of nothing."""
    if column not in SHARES:
        return counts[column]
    part, whole = (counts[name] for name in SHARES[column])
    return 100 * part / whole if whole else None


def write_row(
    name: str, columns: Iterable[str], counts: Mapping[str, int], before: Mapping[str, int] | None
) -> str:
    """Write one line of the table: counts, or their differences from others."""
    cells = []
    for column in columns:
        value = value_of(column, counts)
        if before is not None:
            old = value_of(column, before)
            value = None if value is None or old is None else round(value - old, 1)
        places, sign = "1" if column in SHARES else "0", "" if before is None else "+"
        is_empty = value is None or (before is not None and not value)
        cells.append(f"{'' if is_empty else f'{value:{sign},.{places}f}':>{max(len(column), 9)}}")
    return f"{name:<12}" + " ".join(cells).rstrip() + "\n"


def write_table(
    now: dict[str, Counter[str]], before: dict[str, Counter[str]] | None, revision: str
) -> str:
    """Write counts of all rooms and of the whole, each with its differences from a revision, if
    there is one.
    """
    out = [f"{'':<12}" + " ".join(f"{column:>9}" for column in COLUMNS) + "\n"]
    for room in sorted({*now, *(before or {})}):
        counts, old = now.get(room, Counter()), (before or {}).get(room, Counter())
        out.append(write_row(room, COLUMNS, counts, None))
        if before is not None and counts != old:
            out.append(write_row("", COLUMNS, counts, old))
    total = sum_counts(now)
    for columns in (COLUMNS, LAYOUT):
        if columns is LAYOUT:
            out.append(f"\n{'layout':<12}" + " ".join(f"{column:>9}" for column in columns) + "\n")
        out.append(write_row("all", columns, total, None))
        if before is not None:
            out.append(write_row(revision[:11], columns, sum_counts(before), None))
            out.append(write_row("difference", columns, total, sum_counts(before)))
    return "".join(out)


def sum_counts(rooms: Mapping[str, Counter[str]]) -> Counter[str]:
    """Add up all rooms."""
    total: Counter[str] = Counter()
    for counts in rooms.values():
        total.update(counts)
    return total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against", metavar="TAG", help="a revision of git to show differences from"
    )
    arguments = parser.parse_args()
    trees = [read_files(ROOT)]
    if arguments.against:
        trees.append(read_revision(ROOT, arguments.against))
    now, *before = measure(*trees)
    sys.stdout.write(write_table(now, before[0] if before else None, arguments.against or ""))


if __name__ == "__main__":
    main()
