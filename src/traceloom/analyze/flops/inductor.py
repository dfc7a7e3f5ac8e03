"""Kernels that the compiler made (Inductor's Triton): what their names and recorded inputs tell."""

from __future__ import annotations

import re

from traceloom.analyze.flops.call import Call, Unknown
from traceloom.analyze.flops.registry import MODELS, Work

_NAME = re.compile(r"^triton_(?P<kind>poi|red|per|tem)_fused_(?P<ops>.*?)_?\d*$")
_NO_ARITHMETIC = {
    "to", "copy", "clone", "view", "permute", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "cat",
    "stack", "constant", "pad", "nd", "reshape", "unsafe", "split", "zeros", "ones", "full", "fill", "empty", "like",
    "embedding", "index", "gather", "scatter", "arange", "t", "detach", "alias", "lift", "fresh", "backward", "native",
    "new", "scalar", "tensor", "", "prims", "convert", "element", "type", "dtype", "with", "inplace", "put", "as",
    "strided", "moe", "forward", "where", "unbind", "repeat", "dropout", "layer", "norm",
}  # fmt: skip
_SEVERAL = {"softmax": 5, "native_layer_norm": 8, "addcmul": 3, "addcdiv": 3, "lerp": 3}


@MODELS.register("triton_poi_fused_*", "triton_red_fused_*", "triton_per_fused_*", family="compiled kernel")
def fused(call: Call) -> Work:
    """Each tensor once, and no more elements of it than the kernel has (a larger one is only looked up in).

    One operation per element for every operator in the kernel's name that computes. The name lists each operator once,
    so a chain that repeats one is counted low; such kernels are bound by memory.
    """
    match = _NAME.match(call.name)
    tensors = call.tensors()
    if match is None or not tensors:
        raise Unknown("no input is recorded as a tensor")
    numbers = [call.integer(at) for at, kind in enumerate(call.types) if kind == "Scalar" and call.text(at)]
    elements = 1
    for number in numbers or [max(tensor.numel for tensor in tensors)]:
        elements *= max(number, 1)
    moved = sum(min(tensor.bytes, elements * tensor.size) for tensor in tensors)
    names = match["ops"]  # of operators, joined by underscores; those of `_SEVERAL` may hold some themselves
    operations = sum(count for name, count in _SEVERAL.items() if name in names)
    for name in _SEVERAL:
        names = names.replace(name, "")
    operations += sum(word not in _NO_ARITHMETIC for word in names.split("_"))
    floats = {tensor.dtype for tensor in tensors if tensor.dtype.startswith(("fp", "bf"))}
    # compiled kernels compute 16-bit floats in 32 bits
    dtype = "fp64" if "fp64" in floats else "fp32" if floats else tensors[0].dtype
    return Work(operations * elements, moved, dtype)


@MODELS.register("triton_tem_fused_*", family="compiled kernel")
def template(call: Call) -> Work:
    """A matrix product from a template: (M, K), (K, N) and (M, N) must be the only matrices that fit each other."""
    matrices = [tensor for tensor in call.tensors() if len(tensor.shape) == 2]
    if not re.search(r"_(?:add)?mm(?:_|$)", call.name) or len(matrices) != 3:
        raise Unknown("which inputs are multiplied cannot be determined from what is recorded")
    a, b, out = matrices
    if (a.shape[1], a.shape[0], b.shape[1]) != (b.shape[0], out.shape[0], out.shape[1]):
        raise Unknown("which inputs are multiplied cannot be determined from what is recorded")
    moved = sum(tensor.bytes for tensor in call.tensors())
    return Work(2 * a.shape[0] * a.shape[1] * b.shape[1], moved, a.dtype, matrix=True)
