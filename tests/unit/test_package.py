"""The package as a whole: what importing it costs, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import traceloom
from traceloom import errors

SOURCE = Path(traceloom.__file__).parent
FILES = {
    ".".join(("traceloom", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SOURCE.rglob("*.py"))
}

# From below. A module imports from its own room and from those before it. `capture` stands beside `trace`: it runs in
# the user's process, with the standard library and the user's torch.
ROOMS = (
    "errors",
    "system",
    "trace",
    "formats",
    "testing",
    "graph",
    "analyze",
    "changes",
    "findings",
    "workload",
    "report",
    "server",
    "agent",
    "fleet",
    "cli",
)
FOR_CAPTURE = {
    "traceloom.errors",
    "traceloom.system.elf",
    "traceloom.system.lazy_import",
    "traceloom.system.process",
    "traceloom.system.python_frames",
    "traceloom.system.sanitize",
    "traceloom.system.service_address",
}  # imported into the user's process: the standard library alone
LAZY_CYCLES = (
    {"traceloom.cli", "traceloom.cli.outputs"},
    {
        "traceloom.capture.attach",
        "traceloom.capture.exits",
        "traceloom.capture.in_code",
        "traceloom.capture.output",
        "traceloom.capture.recorder",
    },
)  # modules that need each other, where one imports inside a function


class Import(NamedTuple):
    """An import of a module of ours: where it stands, and whether it runs when the module is loaded."""

    target: str
    line: int
    on_load: bool
    typing: bool


def _targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        yield from (name for name in names if name.split(".")[0] == "traceloom")
    elif node.module and node.module.split(".")[0] == "traceloom":
        for name in names:
            inner = f"{node.module}.{name}"
            yield inner if inner in FILES else node.module


@cache
def _imports(module: str) -> tuple[Import, ...]:
    found = []

    def visit(node: ast.AST, on_load: bool, typing: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.extend(Import(target, node.lineno, on_load, typing) for target in _targets(node))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                visit(child, on_load, typing=True)
            return
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, on_load and not inside, typing)

    visit(ast.parse(FILES[module].read_text(encoding="utf-8")), on_load=True, typing=False)
    return tuple(found)


def _room(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_every_room_has_its_place() -> None:
    rooms = {_room(module) for module in FILES} - {"", "__main__"}
    assert rooms == {*ROOMS, "capture"}


def test_imports_point_one_way() -> None:
    level = {room: number for number, room in enumerate(ROOMS)}
    level["capture"] = level["trace"]
    up = [
        f"{module}:{found.line} imports {found.target}"
        for module in FILES
        if _room(module) not in {"", "__main__"}
        for found in _imports(module)
        if level.get(_room(found.target), -1) > level[_room(module)]
    ]
    assert up == []


def test_the_recorder_stands_alone() -> None:
    for module in FILES:
        if _room(module) == "capture":
            for found in _imports(module):
                alone = (
                    found.target in FOR_CAPTURE
                    or _room(found.target) in {"", "capture"}
                    or found.typing
                )
                assert alone, f"{module}:{found.line} imports {found.target}"


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    on_load = {
        module: {i.target for i in _imports(module) if i.on_load and not i.typing}
        for module in FILES
    }
    assert _cycle({module: targets - {module} for module, targets in on_load.items()}) == []
    # A function that imports hides a cycle from Python, not from the reader.
    used = {
        module: {i.target for i in _imports(module) if not i.typing} - {module} for module in FILES
    }
    for group in LAZY_CYCLES:
        assert _cycle({module: used[module] & group for module in group}), (
            f"{group} import each other no more"
        )
        for module in group:
            used[module] -= group - on_load[module]
    assert _cycle(used) == []


def test_a_view_draws_any_section_and_imports_none() -> None:
    contract = {"traceloom.report.sections", "traceloom.report.sections.section"}
    for module in FILES:
        if module.startswith("traceloom.report.views"):
            sections = {
                i.target
                for i in _imports(module)
                if i.target.startswith("traceloom.report.sections")
            }
            assert sections <= contract, f"{module} imports {sections - contract}"


def test_what_computes_does_not_read() -> None:
    """Except for `formats.arguments`: arguments of few events that no column holds are read again from the file."""
    for module in FILES:
        if _room(module) in {"analyze", "changes", "findings"}:
            read = {
                i.target for i in _imports(module) if _room(i.target) == "formats" and not i.typing
            }
            assert read <= {"traceloom.formats.arguments"}, f"{module} imports {read}"


def test_only_capture_and_replay_name_torch() -> None:
    """And replay does so only where it runs something: nothing of it that is imported imports torch."""
    for module, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert "traceloom.agent.attach.payload" not in {i.target for i in _imports(module)}, module
        if module == "traceloom.agent.attach.payload" or _room(module) == "capture":
            continue  # the text of the first runs in the program that is attached to
        nodes = list(ast.walk(tree))
        if module.startswith("traceloom.workload.replay"):
            guarded = [
                part for part in tree.body if isinstance(part, ast.If)
            ]  # for the type checker
            nodes = [node for node in tree.body if node not in guarded]
        named = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
        named |= {
            n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module
        }
        assert "torch" not in named, module


@pytest.mark.parametrize(
    "statement", ["import traceloom", "import traceloom.capture", "from traceloom import record"]
)
def test_importing_the_recording_half_brings_only_the_standard_library(statement: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); {statement}\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names) - {'traceloom'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_reading_does_not_import_torch() -> None:
    code = "import sys, traceloom; traceloom.load, traceloom.Session\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_public_name_can_be_loaded() -> None:
    for name in traceloom.__all__:
        assert getattr(traceloom, name) is not None
    assert dir(traceloom) == sorted(traceloom.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = traceloom.no_such_name


def test_the_drawn_error_tree_is_the_real_one() -> None:
    drawn = errors.__doc__ or ""
    real = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.TraceloomError)
    ]
    for kind in real:
        line = next((row for row in drawn.splitlines() if f" {kind.__name__} " in f"{row} "), None)
        assert line is not None, f"{kind.__name__} is not drawn"
        if kind is not errors.TraceloomError:
            assert line.rstrip().endswith(f"exit {kind.exit_code}")
