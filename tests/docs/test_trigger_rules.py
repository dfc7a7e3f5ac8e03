"""The rules that the how-to shows, and that the agent shows where there are none, are rules of agent.toml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

from traceloom.agent.config import AnyRule, Config, HangRule, TriggerBudget, load
from traceloom.cli.agent_views import EXAMPLE_RULES
from traceloom.fleet.rules import AnyFleetRule, FleetBudget, FleetRules

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGE = (HOW_TO / "triggers.md").read_text(encoding="utf-8")


def _load(directory: Path, text: str) -> Config:
    path = directory / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def test_the_page_has_a_rule_of_every_kind_and_names_every_key(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    config = _load(tmp_path, "\n".join(blocks))
    assert {type(rule) for rule in config.triggers} == set(get_args(AnyRule)) - {HangRule}
    assert config.trigger_budget == TriggerBudget()
    keys = {
        field.encode_name for kind in get_args(AnyRule) for field in msgspec.structs.fields(kind)
    }
    written = set(re.findall(r"^(\w+) = ", "\n".join(blocks), re.MULTILINE)) | set(
        re.findall(r"`(\w+)`", PAGE)
    )
    assert keys <= written


def test_the_rule_that_is_shown_where_there_are_none(tmp_path: Path) -> None:
    (rule,) = _load(tmp_path, EXAMPLE_RULES).triggers
    assert rule.name == "loader-waits"


def test_the_page_of_the_fleet_has_a_rule_of_every_kind_and_names_every_key() -> None:
    page = (HOW_TO / "fleet-triggers.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    rules = FleetRules.of(block)
    assert {type(rule) for rule in rules.triggers} == set(get_args(AnyFleetRule))
    assert rules.budget == FleetBudget()
    keys = {
        field.encode_name
        for kind in get_args(AnyFleetRule)
        for field in msgspec.structs.fields(kind)
    }
    assert keys <= set(re.findall(r"^(\w+) = ", block, re.MULTILINE)) | set(
        re.findall(r"`(\w+)`", page)
    )
