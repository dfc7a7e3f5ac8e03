"""Simulated devices, and samples that were recorded and are played again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.devices import values
from traceloom.agent.accelerators.backend import (
    BackendUnavailable,
    DeviceProcess,
    TimeLimitedBackend,
)
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.accelerators.simulated import (
    RECORDING_ENDED,
    DeviceLoad,
    RecordedAccelerator,
    SampleWriter,
    SimulatedAccelerator,
    read_samples,
)
from traceloom.agent.config import Accelerators, Config
from traceloom.agent.snapshot import Snapshot
from traceloom.errors import InputError

EIGHT = Config(host="h", accelerators=Accelerators(simulated=8))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_load_depends_on_the_time_alone() -> None:
    clocks = Clock(), Clock()
    first, second = (SimulatedAccelerator(EIGHT, clock) for clock in clocks)
    assert (first.devices(), first.sample()) == (second.devices(), second.sample())
    clocks[0].now += 10
    assert first.sample() != second.sample()
    other = SimulatedAccelerator(Config(host="g", accelerators=Accelerators(simulated=8)))
    assert not {device.uuid for device in first.devices()} & {
        device.uuid for device in other.devices()
    }


def test_all_of_it_can_be_put_on_the_board_and_is_plausible() -> None:
    clock = Clock()
    back_end = SimulatedAccelerator(EIGHT, clock)
    for _ in range(30):
        clock.now += 10
        readings = back_end.sample()
        Snapshot().put("accelerators", readings, 1)
        assert all(
            0 <= reading.value <= 1 for reading in readings if reading.metric.endswith("_ratio")
        )
        used, free, reserved, limit = (
            sum(values(readings, f"gpu_memory_{part}_bytes").values())
            for part in ("used", "free", "reserved", "limit")
        )
        assert used + free + reserved == limit
    assert len(readings) / 8 >= 35, "a benchmark of 400 series needs as many"


def test_energy_is_power_over_time() -> None:
    clock = Clock()
    back_end = SimulatedAccelerator(EIGHT, clock)
    back_end.overrides[0] = DeviceLoad(busy=1.0, pipes={}, power_watts=500.0)
    back_end.sample()
    clock.now += 4
    energy = values(back_end.sample(), "gpu_energy_joules_total")
    assert energy[back_end.uuid(0),] == 2000.0


def test_a_planted_load_is_what_is_read() -> None:
    back_end = SimulatedAccelerator(EIGHT)
    process = DeviceProcess(device="", pid=5, busy_ratio=0.5)
    back_end.overrides[3] = DeviceLoad(
        busy=0.25, pipes={"hmma": 0.5}, power_watts=321.0, processes=[process]
    )
    readings = back_end.sample()
    uuid = back_end.uuid(3)
    assert values(readings, "gpu_busy_ratio")[uuid,] == 0.25
    assert values(readings, "gpu_pipe_active_ratio")[uuid, "hmma"] == 0.5
    assert values(readings, "gpu_pipe_active_ratio")[uuid, "fp64"] == 0.0
    assert values(readings, "gpu_power_watts")[uuid,] == 321.0
    assert back_end.processes() == [DeviceProcess(device=uuid, pid=5, busy_ratio=0.5)]
    back_end.overrides[3].stale = "fallen off the bus"
    assert back_end.devices()[3].stale == "fallen off the bus"
    assert (uuid,) not in values(back_end.sample(), "gpu_busy_ratio")
    assert back_end.processes() == []


def test_an_estimate_that_one_device_has_is_not_missed_in_another() -> None:
    watched = TimeLimitedBackend("simulated", lambda: back_end, 30.0)
    back_end = SimulatedAccelerator(EIGHT)
    collector = AcceleratorCollector(EIGHT, [watched])
    collector.collect()
    assert not any("gpu_flops" in line for line in collector.list_problems())
    back_end.pause(1e9)
    collector.collect()
    assert "gpu_flops: the activity of the pipes is not known" in "\n".join(
        collector.list_problems()
    )
    back_end.pause(0.0)
    unknown = back_end.devices()
    unknown[3] = msgspec.structs.replace(unknown[3], architecture="")
    back_end.devices = lambda: unknown  # type: ignore[method-assign]
    readings = collector.collect()
    assert len(values(readings, "gpu_flops")) == 7 * 2
    assert not any("gpu_flops" in line for line in collector.list_problems())
    collector.close()


def test_pipes_rest_while_paused() -> None:
    clock = Clock()
    back_end = SimulatedAccelerator(EIGHT, clock)
    back_end.pause(5.0)
    assert not values(back_end.sample(), "gpu_pipe_active_ratio")
    assert values(back_end.sample(), "gpu_busy_ratio")
    clock.now += 6
    assert values(back_end.sample(), "gpu_pipe_active_ratio")


def test_none_are_simulated_by_default() -> None:
    with pytest.raises(BackendUnavailable, match="simulated = 8"):
        SimulatedAccelerator(Config())
    with pytest.raises(BackendUnavailable, match="recorded = FILE"):
        RecordedAccelerator(Config())


def _record(path: Path, times: tuple[float, ...]) -> None:
    writer = SampleWriter(path)
    for second in times:
        clock = Clock()
        clock.now = second
        back_end = SimulatedAccelerator(EIGHT, clock)
        back_end.overrides[0] = DeviceLoad(busy=second / 100, pipes={}, power_watts=1.0)
        from traceloom.agent.accelerators.backend import DeviceEvent, Sample

        writer.write(
            Sample(
                at_ns=int(second * 1e9),
                devices=back_end.devices(),
                readings=back_end.sample(),
                processes=[DeviceProcess(device=back_end.uuid(0), pid=int(second))],
                events=[
                    DeviceEvent(
                        at_ns=int(second * 1e9), device=back_end.uuid(0), kind="xid", code=79
                    )
                ],
                capabilities={"gpu_busy_ratio": ""},
            )
        )
    writer.close()


def test_samples_come_back_as_far_apart_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    _record(path, (10.0, 20.0, 25.0))
    config = Config(host="h", accelerators=Accelerators(recorded=str(path)))
    clock = Clock()
    played = RecordedAccelerator(config, clock)
    uuid = SimulatedAccelerator(EIGHT).uuid(0)
    seen = {}
    for later in (0.0, 9.0, 10.5, 15.0, 19.0, 21.0):
        clock.now = 1000.0 + later
        devices = played.devices()
        busy = values(played.sample(), "gpu_busy_ratio").get((uuid,))
        seen[later] = (
            busy,
            devices[0].stale,
            [event.code for event in played.events()],
            len(played.processes()),
        )
    assert seen == {
        0.0: (0.1, "", [79], 1),
        9.0: (0.1, "", [], 1),
        10.5: (0.2, "", [79], 1),
        15.0: (0.25, "", [79], 1),
        19.0: (0.25, "", [], 1),
        21.0: (None, RECORDING_ENDED, [], 0),
    }
    played.close()


def test_a_running_agent_is_recorded_and_played(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    recorder = AcceleratorCollector(EIGHT)
    recorder.record(path)
    recorder.collect()
    recorder.close()
    player = AcceleratorCollector(
        Config(host="other", accelerators=Accelerators(recorded=str(path), backends=("recorded",)))
    )
    player.collect()
    assert player.devices == recorder.devices
    player.close()


def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    collector = AcceleratorCollector(EIGHT)
    collector.record("/dev/full")
    for _ in range(2):
        assert values(collector.collect(), "gpu_busy_ratio")
    assert any("the recording of devices ended: " in line for line in collector.list_problems())
    collector.close()


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    _record(path, (10.0, 20.0))
    path.write_bytes(path.read_bytes()[:-5])
    assert [sample.at_ns for sample in read_samples(path)] == [10_000_000_000]


@pytest.mark.parametrize("text", [b"", b"{}\n", b'{"format":"x","version":1}\n'])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(text)
    with pytest.raises(InputError) as raised:
        list(read_samples(path))
    assert raised.value.slug == "wrong-recording"


def test_a_recording_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"format":"traceloom-accelerators","version":9}\n')
    with pytest.raises(InputError) as raised:
        list(read_samples(path))
    assert raised.value.slug == "other-version"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    _record(path, (10.0, 20.0))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"{broken\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match="line 2"):
        list(read_samples(path))
