"""Names inside functions are the field's words (scripts/measure_code.py)."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_code.py"


def test_hardly_any_function_has_an_odd_name() -> None:
    spec = importlib.util.spec_from_file_location("measure_code", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    measure = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = measure
    spec.loader.exec_module(measure)
    modules = [measure.Module.read(path) for path in sorted((measure.ROOT / "src").rglob("*.py"))]
    functions = sum(len(re.findall(r"^ *(?:async )?def ", module.text, re.MULTILINE)) for module in modules)
    assert functions > 1000
    places = measure.odd_names(modules)
    assert len(places) <= 0.005 * functions, "\n".join(places)
