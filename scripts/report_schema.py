"""Write the shapes of the report's sections into docs/reference/report.schema.json; a test looks that it was done."""

from __future__ import annotations

import json
from pathlib import Path

from traceloom.report.sections import every

SCHEMA = Path(__file__).parents[1] / "docs" / "reference" / "report.schema.json"


def with_sections(schema: dict[str, object]) -> dict[str, object]:
    """The schema with a property for each section; null where `--only` leaves it out."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    kept = {key: shape for key, shape in properties.items() if "x-section" not in shape}
    added = {s.key: {"x-section": s.title, "anyOf": [s.schema, {"type": "null"}]} for s in every()}
    return {**schema, "properties": {**kept, **added}}


def compact(schema: dict[str, object]) -> str:
    """The schema as JSON text with a line for each property and each definition."""
    lines = []
    for key, shape in schema.items():
        text = json.dumps(shape)
        if key in {"properties", "$defs"} and isinstance(shape, dict):
            entries = [f"    {json.dumps(name)}: {json.dumps(inner)}" for name, inner in shape.items()]
            text = "{\n" + ",\n".join(entries) + "\n  }"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    schema = with_sections(json.loads(SCHEMA.read_text(encoding="utf-8")))
    SCHEMA.write_text(compact(schema), encoding="utf-8")
