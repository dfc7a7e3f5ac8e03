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


if __name__ == "__main__":
    schema = with_sections(json.loads(SCHEMA.read_text(encoding="utf-8")))
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")
