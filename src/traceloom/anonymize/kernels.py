"""Names of GPU work: by category (gemm, attention, norm, elementwise, copy, communication ...) and ten letters."""

from __future__ import annotations

import re

from traceloom.analyze.classify import built_in_rules
from traceloom.analyze.collective_names import KERNEL_KINDS
from traceloom.anonymize.names import Pseudonyms
from traceloom.anonymize.policy import COLLAPSE, KEEP, Policy
from traceloom.model.copies import copy_kind, memory_kinds

# A word by which each rule of kernel_rules.json knows its kernels again; the rest of the name is gone.
MARKS = {
    "nccl": "nccl",
    "rccl": "rccl",
    "hccl": "hccl",
    "oneccl": "oneccl",
    "mscclpp": "msccl",
    "nvshmem": "nvshmem",
    "deep-ep": "ep::",
    "custom-all-reduce": "cross_device_reduce",
    "symmetric-memory": "multimem_",
    "one-two-shot": "one_shot_all_reduce",
    "fused-all-reduce": "lamport_style",
    "quick-reduce": "quick_reduce::",
    "aiter": "aiter::all_gather",
    "rocm-copy": "__amd_rocclr_copy",
    "rocm-fill": "__amd_rocclr_fill",
}
_RULES = tuple((rule.name, re.compile(rule.pattern, re.IGNORECASE)) for rule in built_in_rules())
_KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in KERNEL_KINDS)

# What a kernel computes, by the families that libraries name; the first that fits.
_FAMILIES = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        ("attention", r"flash|fmha|attention|attn|sdpa|\bmha|paged_|_pa_|mla_"),
        ("convolution", r"conv|winograd|fprop|dgrad|wgrad|igemm|implicit_gemm|cudnn::cnn"),
        (
            "gemm",
            r"gemm|gemv|matmul|cijk_|nvjet|cublas|cutlass|splitk|_mm_|\bmm\b|triton_tem|wgmma|ck::.*Gemm|scaled_mm",
        ),
        ("norm", r"norm|bn_fw|bn_bw|welford|GammaBeta"),
        ("softmax", r"softmax|log_sum_exp|cross_entropy|nll_loss"),
        ("embedding", r"embedding|split_embedding|lookup|rotary|rope"),
        ("optimizer", r"multi_tensor|adam|sgd_|adagrad|lamb_"),
        ("random", r"dropout|philox|distribution|random|curand|bernoulli"),
        ("sort", r"sort|topk|scan|cub::|thrust::|unique|histogram"),
        ("reduction", r"reduce|triton_(red|per)|argm(ax|in)|pool|sum_functor|prod_functor"),
        (
            "copy",
            r"copy|memcpy|CatArray|transpose|permute|nchw|nhwc|gather|scatter|index|slice|pad|tril|triu|memset|fill",
        ),
        (
            "elementwise",
            r"elementwise|functor|vectorized|unrolled|triton_poi|relu|gelu|silu|sigmoid|tanh|quant|cast|act",
        ),
    )
)
FAMILIES = tuple(family for family, _ in _FAMILIES)
_KINDS_OF_MEMORY = r"(Pageable|Pinned|Device|Host|Array|Managed|Unknown|Peer)"
_COPY = re.compile(rf"Mem(cpy|set)( [HDPM]to[HDPM])?( \({_KINDS_OF_MEMORY}( -> {_KINDS_OF_MEMORY})?\))?")
_MEMORY = frozenset(("pageable", "pinned", "device", "host", "array", "managed", "unknown", "peer"))


class KernelNames:
    """What the names of kernels, copies and fills become."""

    def __init__(self, names: Pseudonyms, policy: Policy) -> None:
        self._names = names
        self._policy = policy

    def kernel(self, name: str) -> str:
        """A kernel: the mark of its rule, what it does, ten letters."""
        return self._names.shown("kernel", name, self._kernel)

    def _kernel(self, name: str) -> str:
        if self._policy.kernels == KEEP:
            return self._names.keep(name)
        letters = "" if self._policy.structure == COLLAPSE else self._names.letters(name)
        rule = next((rule for rule, pattern in _RULES if pattern.search(name)), None)
        if rule in ("rocm-copy", "rocm-fill"):
            return _joined(MARKS[rule], "", letters)
        if rule is not None:
            lower = name.lower()
            kind = next((kind for kind, pattern in _KINDS if pattern.search(lower)), "")
            return _joined(MARKS[rule], kind, letters)
        family = next((family for family, pattern in _FAMILIES if pattern.search(name)), "kernel")
        return _joined(family, "", letters)

    def copy(self, name: str) -> str:
        """A copy or fill: its direction and the kinds of memory."""
        return self._names.shown("copy", name, self._copy)

    @staticmethod
    def _copy(name: str) -> str:
        if _COPY.fullmatch(name):
            return name
        kind = copy_kind(name)
        if kind == "fill":
            return "Memset"
        source, target = memory_kinds(name)
        arrow = ""
        if source in _MEMORY and target in _MEMORY:
            arrow = f" ({source.title()} -> {target.title()})"
        return f"Memcpy{'' if kind == 'unknown' else f' {kind}'}{arrow}"


_DEEP_EP = {"layout": "get_dispatch_layout"}  # kinds that its kernels spell in another way


def _joined(mark: str, kind: str, letters: str) -> str:
    """`nccl_all_reduce_letters`: the mark in front, so that the same rule finds it, then the kind."""
    if mark == "ep::":
        return f"ep::{_joined(_DEEP_EP.get(kind or '', kind or 'kernel'), '', letters)}"
    if kind == "reduce":
        return f"{mark}kernel_reduce_{letters}"
    return "_".join(part for part in (mark, kind, letters) if part)
