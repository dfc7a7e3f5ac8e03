"""The package as a whole: what importing it costs, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import traceloom
from traceloom import errors

SOURCE = Path(traceloom.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# Imports only point to the right (a package may import those after it).
LAYERS = [
    "cli", "demo", "portal", "collect", "fleet", "store", "agent", "report", "findings", "anonymize", "replay", "simulate", "analyze", "link", "retime", "read", "chakra", "schedules", "model", "storage",
]  # fmt: skip
STORES = {"read", "model"}  # the others see arrays and frames, wherever their data lie
ALONE = {"capture"}  # runs in the user's process: the standard library and the user's torch
TOP = {
    "allowed_texts",
    "array_types",
    "errors",
    "files",
    "garbage",
    "harmless",
    "lazy",
    "leaving",
    "one_core",
    "packed",
    "plain_text",
    "service_address",
    "workers",
    "__version__",
}  # anybody may import these


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> set[str]:
    """Second parts of `traceloom.X...` imports in a module."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "traceloom":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("traceloom.")}
    return found


def _package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def test_imports_point_one_way() -> None:
    for path in MODULES:
        if path.parent == SOURCE:
            continue
        package, where = _package(path), path.relative_to(SOURCE)
        used = _imports(path) - TOP - {package}
        if package in ALONE:
            assert used == set(), f"{where} stands alone, but imports {used}"
        elif package == "testing":
            tries_verbs = {"cli"} if "fuzzing" in path.parts else set()
            assert used <= {"read", "chakra", "model"} | tries_verbs, f"{where} imports {used}"
        else:
            allowed = {*LAYERS[LAYERS.index(package) + 1 :], *(ALONE if package == "cli" else ())}
            allowed |= {"testing"} if package == "demo" else set()  # what it shows is made
            allowed -= set() if package in STORES else {"storage"}
            assert used <= allowed, f"{where} may import {sorted(allowed)}, but imports {sorted(used - allowed)}"


def test_a_view_draws_any_section_and_imports_none() -> None:
    contract = {"traceloom.report.sections", "traceloom.report.sections.section"}
    for path in (SOURCE / "report" / "views").rglob("*.py"):
        modules = {node.module or "" for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom)}
        sections = {name for name in modules if name.startswith("traceloom.report.sections")}
        assert sections <= contract, f"{path.relative_to(SOURCE)} imports {sections - contract}"


def test_what_computes_does_not_read() -> None:
    """Except `traceloom.formats.arguments`: arguments of few events that no column holds are read again from the file.

    A simulation takes whatever holds a workload; the module that opens it computes nothing.
    """
    opens = {SOURCE / "simulate" / "native" / "inputs.py"}
    for path in MODULES:
        if _package(path) in {"analyze", "findings", "retime", "simulate"} and path not in opens:
            froms = {node.module for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom) and node.module}
            read = {module for module in froms if module.startswith("traceloom.read")}
            assert read <= {"traceloom.formats.arguments"}, path


def test_only_capture_and_replay_name_torch() -> None:
    """And replay does so only where it runs something: nothing of it that is imported imports torch."""
    sent = SOURCE / "agent" / "attach" / "payload.py"  # its text runs in the program that is attached to
    for path in MODULES:
        tree = _tree(path)
        nodes = list(ast.walk(tree))
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert "traceloom.agent.attach.payload" not in imported, path
        if path == sent:
            continue
        if _package(path) == "replay":
            guarded = [part for part in tree.body if isinstance(part, ast.If)]  # for the checker of types
            nodes = [node for node in tree.body if node not in guarded]
        if _package(path) != "capture":
            named = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
            named |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
            assert "torch" not in named, path


@pytest.mark.parametrize("statement", ["import traceloom", "import traceloom.capture", "from traceloom import record"])
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
    real = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TraceloomError)]
    for kind in real:
        line = next((row for row in drawn.splitlines() if f" {kind.__name__} " in f"{row} "), None)
        assert line is not None, f"{kind.__name__} is not drawn"
        if kind is not errors.TraceloomError:
            assert line.rstrip().endswith(f"exit {kind.exit_code}")
