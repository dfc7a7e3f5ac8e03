"""From activity to a job's FLOP/s and its error: a simulated device that does what a trace of the job counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.devices import values
from traceloom.agent.accelerators.backend import DeviceProcess, TimeLimitedBackend
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.accelerators.simulated import DeviceLoad, SimulatedAccelerator
from traceloom.agent.config import Accelerators, Config
from traceloom.agent.ownership.model import compute_shares
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.topline import (
    JobAccounting,
    JobTick,
    TracedFacts,
    collect_matrix_types,
    load_traced_facts,
)
from traceloom.testing import TraceBuilder

SIZE, STEPS_PER_SECOND, CLOCK = 8192, 100.0, 1.5e9
FLOPS = 2 * SIZE**3  # of a step, all in BF16: 1.1 TFLOP


def _capture(path: Path) -> Path:
    made = TraceBuilder(device_name="NVIDIA H100 80GB HBM3")
    for step in range(4):
        at = 10_000 * step
        made.step(step, at, 10_000)
        made.op("aten::mm", at + 10, 8, shapes=[[SIZE, SIZE]] * 2, types=["c10::BFloat16"] * 2)
        made.launch("cudaLaunchKernel", at + 12, 1, correlation=step + 1)
        made.kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", at + 30, 2000, correlation=step + 1)
    return made.write(path)


@pytest.mark.parametrize("surplus", [0.0, 0.08, -0.3])
def test_the_error_of_the_estimate_is_what_was_planted(tmp_path: Path, surplus: float) -> None:
    """The matrix pipe is active as long as the counted FLOPs need in BF16, and by so much longer."""
    facts = msgspec.convert(load_traced_facts(str(_capture(tmp_path / "trace.json"))), TracedFacts)
    active = FLOPS * STEPS_PER_SECOND / (132 * CLOCK * 4096) * (1 + surplus)
    config = Config(accelerators=Accelerators(simulated=1))
    back_end = SimulatedAccelerator(config)
    back_end.overrides[0] = DeviceLoad(
        busy=0.5,
        pipes={"hmma": active, "tensor": active},
        power_watts=400.0,
        clock_hz=CLOCK,
        processes=[DeviceProcess(device="", pid=7)],
    )
    job = JobTick(
        job="j",
        processes=("7@1",),
        devices=(back_end.uuid(0),),
        steps=1000,
        steps_per_second=STEPS_PER_SECOND,
        facts=facts,
    )
    collector = AcceleratorCollector(
        config, [TimeLimitedBackend("simulated", lambda: back_end, 30.0)]
    )
    collector.element_types = collect_matrix_types([job])
    host_snapshot = Snapshot()
    host_snapshot.put("accelerators", collector.collect(), 1)
    host_snapshot.devices = collector.devices
    divided = compute_shares(collector.device_processes, {7: "7@1"})
    readings = JobAccounting(config.accelerators.reference).readings(
        host_snapshot, 10.0, divided, [job]
    )
    collector.close()
    assert values(readings, "job_flops")["j", "trace", "low"] == pytest.approx(
        FLOPS * STEPS_PER_SECOND * (1 + surplus)
    )
    assert values(readings, "job_flops_error_ratio")["j",] == pytest.approx(surplus, abs=1e-12)
