"""Runs in a process of its own: samples NVML after each step that stands on the standard input, as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from traceloom.agent.accelerators.backend import TimeLimitedBackend
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.accelerators.nvml import NvmlAccelerator
from traceloom.agent.config import Config
from traceloom.agent.topline import MatrixTypes


def main() -> None:
    now = 0.0
    config = Config()
    watched = TimeLimitedBackend(
        "nvml",
        lambda: NvmlAccelerator(config, lambda: time.monotonic() + now),
        30.0,
        clock=lambda: now,
    )
    collector = AcceleratorCollector(config, [watched])
    script = Path(os.environ["NVML_SCRIPT"])
    answers: list[dict[str, Any]] = []
    for step in json.load(sys.stdin):
        if "script" in step:
            script.with_suffix(".new").write_text(step["script"], encoding="utf-8")
            script.with_suffix(".new").replace(script)
        now += step.get("later", 0.0)
        watched._limit_s = step.get("limit", 30.0)
        collector.element_types = {
            uuid: [MatrixTypes(shares, "declared") for shares in mixes]
            for uuid, mixes in step.get("types", {}).items()
        }
        answer: dict[str, Any] = {"readings": []}
        if "pause" in step:
            answer["done"] = collector.pause(step["pause"])
        else:
            answer["readings"] = collector.collect()
        states = [script.with_name(f"{script.name}.g{number}") for number in range(2)]
        answer |= {
            "devices": msgspec.to_builtins(collector.devices),
            "processes": msgspec.to_builtins(collector.device_processes),
            "events": [(event.device, event.kind, event.code) for event in collector.events],
            "capabilities": collector.capabilities(),
            "last_error": collector.list_problems(),
            "streaming": [
                state.read_text(encoding="utf-8") if state.exists() else "" for state in states
            ],
        }
        answers.append(answer)
    sys.stdout.write(json.dumps(answers))
    sys.stdout.flush()
    collector.close()
    os._exit(0)  # a thread may hang in the library for longer than the test should take


main()
