from __future__ import annotations

import pytest

from traceloom.workload.replay.schema import CHOICES, NAMESPACES, find_refusal, parse_schema

# Namespaces that PyTorch itself brings besides; each only where a user asks for it.
OF_PYTORCH = {
    "quantized",
    "_quantized",
    "mkldnn",
    "onednn",
    "mkl",
    "sparse",
    "inductor",
    "symm_mem",
    "c10d",
}
# What an argument's name says where its text reaches out of the process.
REACHES_OUT = {
    "file",
    "filename",
    "path",
    "dir",
    "url",
    "command",
    "cmd",
    "module",
    "library",
    "code",
    "host",
    "group",
}


def test_what_computes_on_tensors_is_allowed() -> None:
    for text in (
        "aten::mm(Tensor self, Tensor mat2) -> Tensor",
        'aten::gelu(Tensor self, *, str approximate="none") -> Tensor',
        "aten::set_.source_Storage(Tensor(a!) self, Storage source) -> Tensor(a!)",
        "aten::_foreach_add_.Scalar(Tensor(a!)[] self, Scalar scalar) -> ()",
    ):
        assert find_refusal(parse_schema(text)) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("aten::from_file(str filename, bool? shared=None) -> Tensor", "'filename'"),
        ("aten::save(t item, str filename) -> ()", "no plain data: t"),
        ("aten::manual_seed(int seed) -> ()", "no tensor"),
        ("aten::einsum.sublist(Tensor a, ...) -> Tensor", "no plain data: anything"),
        ("aten::wait(Future(t) self) -> t", "Future"),
        ("prim::PythonOp(...) -> ...", "--import"),
        ("fbgemm::dense(Tensor a) -> Tensor", "--import"),
        (
            "aten::fbgemm_linear_fp16_weight(Tensor input, Tensor packed_weight, Tensor bias) -> Tensor",
            "addresses",
        ),
    ],
)
def test_what_reaches_out_of_tensors_is_refused(text: str, says: str) -> None:
    assert says in find_refusal(parse_schema(text)).text  # type: ignore[union-attr]


def test_a_namespace_is_allowed_at_wish_and_its_texts_are_not() -> None:
    further = frozenset({"fbgemm"})
    assert find_refusal(parse_schema("fbgemm::dense(Tensor a) -> Tensor"), further) is None
    assert "filename" in str(
        find_refusal(parse_schema("fbgemm::read(Tensor a, str filename) -> Tensor"), further)
    )


@pytest.mark.torch
def test_no_registered_op_that_is_allowed_takes_a_text_that_reaches_out() -> None:
    torch = pytest.importorskip("torch")
    schemas = [parse_schema(str(schema)) for schema in torch._C._jit_get_all_schemas()]
    allowed = [schema for schema in schemas if find_refusal(schema, frozenset(OF_PYTORCH)) is None]
    assert len({schema.qualified for schema in allowed if schema.namespace in NAMESPACES}) > 3000
    texts = set()
    for schema in allowed:
        texts |= {argument.name for argument in schema.arguments if "str" in argument.type.bases}
    assert texts <= CHOICES
    assert not [name for name in texts if REACHES_OUT & set(name.lower().split("_"))]
    names = {f"{schema.namespace}::{schema.name}" for schema in allowed}
    for refused in (
        "aten::from_file",
        "aten::save",
        "aten::warn",
        "aten::set_grad_enabled",
        "aten::_assert_async.msg",
    ):
        assert refused not in names
    # Reviewed: PyTorch's own ops with a text, all of which choose. A new one is to be looked at before it is allowed.
    choosing = {
        s.name
        for s in allowed
        if s.namespace == "aten" and any("str" in a.type.bases for a in s.arguments)
    }
    assert choosing <= {
        "__interpolate",
        "__upsample",
        "_convolution_mode",
        "_linalg_eigh",
        "_linalg_svd",
        "_mixed_dtypes_linear",
        "_segment_reduce_backward",
        "_sparse_mm",
        "_sparse_mm_reduce_impl",
        "_sparse_mm_reduce_impl_backward",
        "_sparse_semi_structured_linear",
        "_sparse_semi_structured_tile",
        "conv1d",
        "conv2d",
        "conv3d",
        "div",
        "div_",
        "divide",
        "divide_",
        "einsum",
        "fft_fft",
        "fft_fft2",
        "fft_fftn",
        "fft_hfft",
        "fft_hfft2",
        "fft_hfftn",
        "fft_ifft",
        "fft_ifft2",
        "fft_ifftn",
        "fft_ihfft",
        "fft_ihfft2",
        "fft_ihfftn",
        "fft_irfft",
        "fft_irfft2",
        "fft_irfftn",
        "fft_rfft",
        "fft_rfft2",
        "fft_rfftn",
        "gelu",
        "gelu_",
        "gelu_backward",
        "index_reduce",
        "index_reduce_",
        "linalg_cond",
        "linalg_eigh",
        "linalg_eigvalsh",
        "linalg_lstsq",
        "linalg_matrix_norm",
        "linalg_norm",
        "linalg_qr",
        "linalg_svd",
        "linalg_svdvals",
        "meshgrid",
        "nanquantile",
        "pad",
        "pad_sequence",
        "quantile",
        "scatter",
        "scatter_",
        "scatter_reduce",
        "scatter_reduce_",
        "searchsorted",
        "segment_reduce",
        "stft",
    }
