"""Public host traces of every schema plan, and give on tensors without content what was recorded, op by op."""

from __future__ import annotations

import pytest

from support.public_traces import DATA, NEEDS_TRACES

pytest.importorskip("torch")

from traceloom.workload.replay.dry_run import dry_run
from traceloom.workload.replay.planning import make_plan

pytestmark = [*NEEDS_TRACES, pytest.mark.torch]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "ops", "custom"),
    [
        ("host/small_1.0.2.json.gz", 90, 0),
        ("host/resnet_1gpu_1.0.3.json.gz", 3738, 0),
        ("host/resnet_2gpu_1.1.0.json.gz", 3738, 0),
        ("pairs/linear.host.json.gz", 321, 0),
        ("multirank/dlrm_rank0.host.json.gz", 653, 7),
    ],
)
def test_a_public_host_trace_is_as_recorded(path: str, ops: int, custom: int) -> None:
    (dry,) = dry_run(make_plan(DATA / path)).values()
    assert (dry.ops, dry.covered) == (ops, ops - custom)
    assert dry.wrong == ()
    assert {left.reason for left in dry.left} <= {"data-dependent", "custom-op"}
    assert all(left.name.startswith("fbgemm::") for left in dry.left if left.reason == "custom-op")
