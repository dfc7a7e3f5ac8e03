"""Words of findings by the vendor of the devices: the advice of one is of no use on another."""

from collections.abc import Iterable

import polars as pl

from traceloom.trace import vocabulary as vocab
from traceloom.trace.trace import Trace

CUDA, ROCM, OTHER = "cuda", "rocm", "other"
_CALL_PATTERNS = {CUDA: r"^(cuda|cu)[A-Z]", ROCM: r"^hip[A-Z]", OTHER: r"^(ze|ur|pi)[A-Z]"}
_DEVICE_PATTERNS = {
    ROCM: r"(?i)\bamd\b|instinct|radeon|\bMI\d{2,3}|gfx\d",
    CUDA: r"(?i)nvidia|tesla|geforce|quadro|\b(?:GH|GB|RTX |[ABHLVT])\d{1,4}\b",
}
# As rules write them, then on ROCm, then on other devices and where the vendor is unknown.
_WORDS = (
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    (", or load at the start: CUDA_MODULE_LOADING=EAGER", "", ""),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING", "the allocator's caching"),
    ("cudaFree", "hipFree", "giving memory back"),
    (
        "CUDA graphs (torch.cuda.graphs, ",
        "HIP graphs (torch.cuda.graphs, ",
        "graphs (torch.compile, ",
    ),
    ("a CUDA graph", "a HIP graph", "a graph"),
    (
        "fewer SMs (NCCL_MAX_CTAS, NCCL_MIN_CTAS)",
        "fewer compute units (NCCL_MAX_NCHANNELS)",
        "fewer units",
    ),
    (
        "nvidia-smi topo -m, nvidia-smi nvlink -s",
        "amd-smi topology, amd-smi xgmi",
        "the vendor's tools",
    ),
    ("NCCL takes (NCCL_DEBUG=INFO)", "RCCL takes (NCCL_DEBUG=INFO)", "its library takes"),
    ("torch.backends.cudnn.benchmark=False", "MIOPEN_FIND_MODE=FAST", "no search for kernels"),
    ("torch.autocast('cuda'", "torch.autocast('cuda'", "torch.autocast(device"),
    ("tensor cores", "matrix cores", "matrix units"),
)


def find_vendor(traces: Iterable[Trace]) -> str:
    """Returns whose devices the traces are of, by the calls of the runtime, else by the names."""
    for trace in traces:
        calls = trace.events.lazy().filter(pl.col("category").is_in(vocab.LAUNCHES)).select("name")
        for names, patterns in (
            (calls.unique().collect()["name"].cast(pl.String), _CALL_PATTERNS),
            (trace.devices["name"].drop_nulls().cast(pl.String), _DEVICE_PATTERNS),
        ):
            for vendor, pattern in patterns.items():
                if names.str.contains(pattern).any():
                    return vendor
    return OTHER


def translate(text: str, vendor: str) -> str:
    """Returns the words of a rule for devices of a vendor."""
    for own, on_rocm, elsewhere in () if vendor == CUDA else _WORDS:
        text = text.replace(own, on_rocm if vendor == ROCM else elsewhere)
    return text
