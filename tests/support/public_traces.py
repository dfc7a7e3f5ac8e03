"""The public traces beside the checkout, where they are, and what was counted in them by other programs."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from traceloom.formats import load
from traceloom.trace.trace import Trace

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_GPU_TIME = DATA / "golden" / "gpu_time.json"
GPU_TIME: dict[str, Any] = json.loads(_GPU_TIME.read_text()) if _GPU_TIME.is_file() else {}
"""Times on devices and hosts by the path of the trace."""
TRACES = tuple(sorted(GPU_TIME))
"""Paths of traces of all vendors and versions."""
# It counts no work of command processors: see tests/unit/formats/test_accelerators.py.
GPU_TIME.pop("kineto/mtia_inference.json.gz", None)

GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
"""Categories of GPU work, as the files spell them: those with a capital are of 2021."""
KERNELS = frozenset({"kernel", "Kernel"})
CALLS = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
"""Categories of calls of the runtime and the driver."""
OPERATORS = frozenset({"cpu_op", "Operator"})

NAMES = (
    "a100_cupti_counters",
    "a100_ddp_nccl",
    "cpu_only_gloo_rank34",
    "h100_bert_small",
    "h100_owlv2",
    "h100_qwen_0.5b",
    "h800_deepseek_train",
    "mi210_gpu_only",
    "mi250_minitoy",
    "mi300_bert_small",
    "mi300_qwen_0.5b",
    "mi300_sglang_decode_graphs",
    "mi300_vllm_piecewise_graphs",
    "mtia_inference",
    "triton_example",
    "v100_ns_resolution",
)
"""Files of `kineto/`, without their endings, that together hold all that traces can hold."""

NEEDS_TRACES = [
    pytest.mark.data,
    pytest.mark.skipif(
        not TRACES, reason="the public traces (../shared/data) are not on this machine"
    ),
]


@lru_cache(maxsize=1)
def trace_of(path: str) -> Trace:
    """The trace of a path in `DATA`; tests of one trace follow each other."""
    return load(DATA / path).traces[0]
