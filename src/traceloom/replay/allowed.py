"""Which ops a trace may have run: a stranger wrote it, and what it names is executed.

Allowed is what computes on tensors, and nothing else. An op is refused unless its namespace is allowed, its types are
those of plain data, it takes or gives a tensor, each text that it takes is a choice (`reduction="mean"`), and it is
not among the few that follow addresses in their arguments. Whatever PyTorch adds is thereby refused where it takes a
file's name, an object, or a function. How much memory an op may use is looked at where the plan is run.

A schema in a trace is the stranger's word too: before an op runs, the same is looked up in PyTorch's own schema of it.
"""

from __future__ import annotations

from typing import NamedTuple

from traceloom.replay.schema import OperatorSchema

NAMESPACES = frozenset({"aten", "prims"})

# What values may be. Dictionaries, classes, futures, streams, enumerations and values of any type are not data.
_DATA = frozenset({
    "Tensor", "int", "SymInt", "float", "SymFloat", "bool", "SymBool", "Scalar", "number", "complex", "str",
    "ScalarType", "Layout", "MemoryFormat", "Device", "Generator", "QScheme", "Storage",
})  # fmt: skip
# Arguments whose text chooses among ways to compute.
CHOICES = frozenset({
    "UPLO", "activation", "algorithm", "approximate", "attr", "binary_attr", "driver", "equation", "indexing",
    "interpolation", "mode", "norm", "ord", "p", "pad_mode", "padding", "padding_mode", "padding_side", "reduce",
    "rounding_mode", "side", "unary_algorithm", "unary_attr",
})  # fmt: skip
# Their tensors hold the address of an object, or indices and offsets that nobody checks: with other contents they read
# and write memory that is not theirs.
_UNSAFE = frozenset({
    "aten::_nested_view_from_buffer", "aten::_nested_view_from_buffer_copy", "aten::_sparse_bsc_tensor_unsafe",
    "aten::_sparse_bsr_tensor_unsafe", "aten::_sparse_compressed_tensor_unsafe", "aten::_sparse_coo_tensor_unsafe",
    "aten::_sparse_csc_tensor_unsafe", "aten::_sparse_csr_tensor_unsafe", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_unsafe_masked_index", "aten::_unsafe_masked_index_put_accumulate",
    "aten::_wrapped_quantized_linear_prepacked",
    "aten::fbgemm_linear_fp16_weight", "aten::fbgemm_linear_fp16_weight_fp32_activation",
    "aten::fbgemm_linear_int8_weight", "aten::fbgemm_linear_int8_weight_fp32_activation",
    "aten::quantized_gru_cell", "aten::quantized_lstm_cell", "aten::quantized_rnn_relu_cell",
    "aten::quantized_rnn_tanh_cell",
})  # fmt: skip


NEVER_GIVEN = frozenset({"pin_memory", "unsafe"})
"""Arguments that are left to their defaults: pinning is of one device alone, and indices are always checked."""


class Refusal(NamedTuple):
    """Why an op is not run: `custom-op` where the user may allow its namespace, `refused-op` where nobody may."""

    slug: str
    text: str


def refusal(schema: OperatorSchema, further: frozenset[str] = frozenset()) -> Refusal | None:
    """Why an op must not be run; None where it may.

    Args:
        schema: The op.
        further: Namespaces that the user allows besides `NAMESPACES`: those of modules that were imported at wish.
    """
    if schema.namespace not in NAMESPACES | further:
        text = f"ops of the namespace {schema.namespace!r} run only with --import and the module that brings them"
        return Refusal("custom-op", text)
    name = f"{schema.namespace}::{schema.name}"
    if name in _UNSAFE:
        return Refusal("refused-op", f"{name} follows addresses or indices that it does not check")
    types = [argument.type for argument in schema.arguments] + [value.type for value in schema.returns]
    bases = {base for kind in types for base in kind.bases}
    if schema.varargs or bases - _DATA:
        return Refusal(
            "refused-op",
            f"{name} takes or gives what is no plain data: {', '.join(sorted(bases - _DATA)) or 'anything'}",
        )
    if "Tensor" not in bases:
        return Refusal("refused-op", f"{name} computes on no tensor")
    for argument in schema.arguments:
        if "str" in argument.type.bases and argument.name not in CHOICES:
            return Refusal("refused-op", f"{name} takes a text that is no choice: {argument.name!r}")
    return None
