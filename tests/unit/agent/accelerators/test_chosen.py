"""Back ends are entry points: ours, and those of others that are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.devices import values
from traceloom.agent.accelerators.backend import (
    BUILTIN_BACKENDS,
    ENTRY_POINT_GROUP,
    create_backends,
)
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.config import Accelerators, Config
from traceloom.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODULE = """
from traceloom.agent.accelerators.backend import Device, DeviceProcess
from traceloom.agent.metrics import Reading

class Asic:
    name = "asic"
    def __init__(self, config): self.host = config.host_name
    def devices(self): return [Device(uuid="ASIC-" + self.host, index="0", vendor="acme", model="A1")]
    def capabilities(self): return {"gpu_busy_ratio": ""}
    def sample(self): return [Reading("gpu_busy_ratio", ("ASIC-" + self.host,), 0.25)]
    def processes(self): return [DeviceProcess(device="ASIC-" + self.host, pid=42)]
    def events(self): return []
    def pause(self, seconds): return False
    def resume(self): return False
    def close(self): pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_asic.py").write_text(MODULE, encoding="utf-8")
    information = tmp_path / "acme_asic-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-asic\nVersion: 1.0\n", encoding="utf-8"
    )
    (information / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\nasic = acme_asic:Asic\nbroken = acme_missing:Asic\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_ours_are_declared_for_others_to_see() -> None:
    project = tomllib.loads(
        (Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert project["project"]["entry-points"][ENTRY_POINT_GROUP] == BUILTIN_BACKENDS


def test_those_that_need_a_setting_run_where_it_is_set() -> None:
    assert [each.name for each in create_backends(Config())] == ["nvml", "amd"]
    settings = Accelerators(
        scrape=("http://127.0.0.1:9400/metrics",), simulated=2, recorded="samples.jsonl"
    )
    assert [each.name for each in create_backends(Config(accelerators=settings))] == list(
        BUILTIN_BACKENDS
    )


def test_those_named_run_in_their_order() -> None:
    settings = Accelerators(backends=("simulated", "nvml"))
    assert [each.name for each in create_backends(Config(accelerators=settings))] == [
        "simulated",
        "nvml",
    ]


def test_a_name_that_is_not_installed_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean `simulated`") as raised:
        create_backends(Config(accelerators=Accelerators(backends=("simulate",))))
    assert raised.value.slug == "wrong-config"


@pytest.mark.usefixtures("installed")
def test_a_back_end_of_others_is_sampled() -> None:
    collector = AcceleratorCollector(
        Config(host="h1", accelerators=Accelerators(backends=("asic",)))
    )
    readings = collector.collect()
    assert values(readings, "gpu_busy_ratio") == {("ASIC-h1",): 0.25}
    assert collector.devices["ASIC-h1"].vendor == "acme"
    assert [process.pid for process in collector.device_processes] == [42]
    collector.close()


@pytest.mark.usefixtures("installed")
def test_a_back_end_that_cannot_be_imported_is_a_trouble_not_a_crash() -> None:
    settings = Accelerators(backends=("broken", "simulated"), simulated=1)
    collector = AcceleratorCollector(Config(accelerators=settings))
    collector.collect()
    assert len(collector.devices) == 1
    assert collector.list_problems() == [
        "broken: it failed: ModuleNotFoundError: No module named 'acme_missing'"
    ]
    collector.close()
