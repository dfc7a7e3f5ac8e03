"""Write docs/reference/modelled-operators.md from the registry of models; `--check` says whether it
is up to date.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from made_page import write_or_check

from traceloom.analyze import flops

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "modelled-operators.md"
HEAD = """\
# Modelled operators

Operators whose FLOPs and bytes Traceloom knows, by family; `*` stands for anything, and `(_)` for the form that works
in place. Conventions and limits: [roofline](../concepts/roofline.md). Your own:
[how to model an operator](../how-to/own-operator.md). This page is written by `scripts/modelled_operators.py`.
"""
TAIL = """\
## Not modelled, and why

Operators that launch GPU work in public traces and have no model:

| operators | why |
|---|---|
"""
WITHOUT = {
    "`record_param_comms`, `c10d::*`, `nccl:*`": "communication has [its own analysis](../concepts/communication.md)",
    "`aten::_local_scalar_dense`, copies between host and device, between devices": (
        "the link bounds them, and its peak is not a property of the device"
    ),
    "`aten::index` without recorded shapes of its indices, `aten::_index_put_impl_`, `aten::nonzero`, "
    "`aten::masked_select`, `aten::repeat_interleave`, `aten::bucketize`, `aten::unique*`": (
        "the size of the result depends on the data, or on inputs that are not recorded"
    ),
    "`fbgemm::split_embedding_codegen_lookup_*`, `fbgemm::dense_embedding_codegen_lookup_function`, "
    "`torch::autograd::CppNode<SplitLookupFunction_*>`": (
        "the width of each table is not recorded, only the size of all together"
    ),
    "`fbgemm::permute_sparse_features`, `fb::to_dense_representation`, `fb::lengths_range_w_truncation_size`, "
    "`fb::fast_gather`, `fb::convex_sum`": "how many values come out depends on the data",
    "`CompiledFunction`, `CompiledFunctionBackward`": (
        "a whole graph; the kernels that Inductor records inside are modelled"
    ),
    "`vllm::moe_forward`, mixtures of experts with packed weights (int4, mxfp4)": (
        "the weights, or how they are packed, are not among the recorded inputs"
    ),
    "autograd functions in Python (`DropoutAddLayerNormFn`, `LinearWithGradAccumulationFP8`, "
    "`RopeLoraFlashAttnVarlenFunc`, `MatmulToFP32`), TransformerEngine 2": (
        "what they compute is not told by their inputs; register a model of your own"
    ),
    "FlashInfer's attention, `flash_attn_3::*`": "lengths are in tensors whose values are not recorded",
    "kernels of CUDA and HIP graphs": "a replay records no operators; give a [recording of their capture]"
    "(../concepts/roofline.md#kernels-of-graphs)",
}


def page() -> str:
    """The whole page."""
    families: dict[str, list[str]] = {}
    for name, family in flops.MODELS.names().items():
        families.setdefault(family, []).append(name)
    parts = [HEAD]
    for family, names in families.items():
        parts.append(f"## {family.capitalize()}\n\n| operator | counted |\n|---|---|\n")
        counted: dict[str, list[str]] = {}
        for name in names:
            if not (name.endswith("_") and name[:-1] in names):
                place = "(_)" if f"{name}_" in names else ""
                counted.setdefault(_counted(name), []).append(f"`{name}{place}`")
        parts[-1] += "".join(
            f"| {', '.join(sorted(names))} | {how} |\n" for how, names in counted.items()
        )
    rows = "".join(f"| {operators} | {why} |\n" for operators, why in WITHOUT.items())
    return "\n".join([*parts, TAIL + rows])


def _counted(name: str) -> str:
    """What the model says of itself, else its module."""
    model = flops.MODELS.find(name)
    assert model is not None
    text = inspect.getdoc(model) or inspect.getdoc(inspect.getmodule(model)) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
