"""The page of agent.toml is an agent.toml: every key with its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

from traceloom.agent.config import AnyRule, Config, load

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "agent-config.md"


def test_the_page_shows_every_key_with_its_default(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    path = tmp_path / "agent.toml"
    path.write_text(block[1], encoding="utf-8")
    assert load(path) == Config()
    written = set(re.findall(r"^(?:# )?(\w+) =", block[1], re.MULTILINE))
    fields = {
        field.name
        for section in (
            Config,
            *(
                type(value)
                for value in msgspec.structs.astuple(Config())
                if isinstance(value, msgspec.Struct)
            ),
        )
        for field in msgspec.structs.fields(section)
        if not (isinstance(field.type, type) and issubclass(field.type, msgspec.Struct))
    } - {"tokens", "triggers"}
    assert fields <= written
    of_rules = {
        field.encode_name for kind in get_args(AnyRule) for field in msgspec.structs.fields(kind)
    }
    assert of_rules <= set(re.findall(r"(\w+) =", block[1]))
