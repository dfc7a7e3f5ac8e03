"""What lies beside a host trace: found by PyTorch's names, never through links, never more than fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traceloom.testing.host_trace_builder import HostTraceBuilder
from traceloom.workload.replay.inputs import Resources
from traceloom.workload.replay.planning import make_plan
from traceloom.workload.replay.values import RecordedGeometry, RecordedTensor

EMBEDDING = (
    "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, "
    "bool sparse=False) -> Tensor"
)


def integers(
    *shape: int,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    device: str = "cuda:0",
    of: str = "int64",
) -> RecordedTensor:
    size = np.dtype(of).itemsize
    elements = int(np.prod(shape))
    span = (
        elements
        if strides is None
        else sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    )
    return RecordedTensor(
        9, 8, 8, offset, elements, size, device, RecordedGeometry(shape, strides, of, span), 0
    )


def beside(folder: Path, name: str = "a_resources", **files: bytes) -> Resources:
    directory = folder / name
    directory.mkdir(exist_ok=True)
    for stem, data in files.items():
        (directory / f"{stem}.dat").write_bytes(data)
    return Resources(folder / "a.json")


@pytest.mark.parametrize(
    ("trace", "directory"),
    [
        ("a.json", "a_resources"),
        ("a.json.gz", "a.json_resources"),
        ("a.json.gz", "a_resources"),
        ("a.et.json", "a.et_resources"),
    ],
)
def test_the_directory_is_where_pytorch_makes_it(
    trace: str, directory: str, tmp_path: Path
) -> None:
    beside(tmp_path, directory, nid_4_tid_1=b"", nid_4_tid_12=b"", nid_5=b"")
    assert Resources(tmp_path / trace).dumps == {4: {1: "nid_4_tid_1.dat", 12: "nid_4_tid_12.dat"}}
    assert Resources(tmp_path / "b.json").dumps == {}


def test_links_lead_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(8))
    (beside(tmp_path).directory or tmp_path).joinpath("nid_1_tid_0.dat").symlink_to(secret)
    assert Resources(tmp_path / "a.json").dumps == {}
    assert Resources(tmp_path / "a.json").read("nid_1_tid_0.dat", 8) is None
    assert Resources(tmp_path / "a.json").read("../secret", 8) is None
    (tmp_path / "b_resources").symlink_to(tmp_path / "a_resources")
    assert Resources(tmp_path / "b.json").directory is None


def test_a_file_is_read_up_to_what_it_may_have(tmp_path: Path) -> None:
    resources = beside(tmp_path, nid_1_tid_0=bytes(9))
    assert resources.read("nid_1_tid_0.dat", 8) is None
    assert resources.read("nid_1_tid_0.dat", 9) == bytes(9)


def test_dumped_values_are_in_the_order_of_the_memory(tmp_path: Path) -> None:
    resources = beside(tmp_path, nid_1_tid_0=np.arange(6).tobytes())
    dumped = resources.dumped("nid_1_tid_0.dat", integers(2, 3))
    assert dumped is not None
    assert dumped.tolist() == [[0, 1, 2], [3, 4, 5]]
    transposed = resources.dumped("nid_1_tid_0.dat", integers(2, 3, strides=(1, 2)))
    assert transposed is not None
    assert transposed.tolist() == [[0, 2, 4], [1, 3, 5]]
    as_bytes = resources.dumped("nid_1_tid_0.dat", integers(48, offset=3, device="cpu", of="uint8"))
    assert as_bytes is not None
    assert as_bytes[8] == 1


@pytest.mark.parametrize(
    "tensor",
    [
        integers(7),
        integers(5),
        integers(6, of="int32"),
        integers(6, of="float64"),
        integers(2, 3, strides=(6, 1)),  # with gaps: the file has those instead of the end
        integers(6, offset=1, device="cpu"),  # PyTorch takes the offset for one in bytes
    ],
)
def test_what_is_not_the_tensor_is_left_out(tensor: RecordedTensor, tmp_path: Path) -> None:
    assert (
        beside(tmp_path, nid_1_tid_0=np.arange(6).tobytes()).dumped("nid_1_tid_0.dat", tensor)
        is None
    )


@pytest.mark.parametrize(("size", "content"), [(3, "data"), (4, "integers")])
def test_a_plan_takes_what_was_dumped(size: int, content: str, tmp_path: Path) -> None:
    made = HostTraceBuilder()
    table, found = (
        ([1, 10, 0, 20, 4, "cpu"], [5, 4], "Tensor(float)"),
        ([3, 30, 0, 12, 4, "cpu"], [3, 4], "Tensor(float)"),
    )
    indices = ([2, 20, 0, 3, 8, "cpu"], [3], "Tensor(long int)")
    numbers = [(-1, [], "Int"), (False, [], "Bool"), (False, [], "Bool")]
    node = made.op(
        "aten::embedding", schema=EMBEDDING, inputs=[table, indices, *numbers], outputs=[found]
    )
    (tmp_path / "a.json").write_text(made.text(), encoding="utf-8")
    beside(tmp_path, **{f"nid_{node}_tid_1": np.arange(size).tobytes()})
    plan = make_plan(tmp_path / "a.json")
    row = plan.ranks[0].storages.row(1, named=True)
    assert (row["content"], row["evidence"]) == (
        content,
        "data" if content == "data" else "consumer",
    )
    unfit = [notice for notice in plan.notices if notice.slug == "unfit-dumps"]
    assert [notice.count for notice in unfit] == ([] if content == "data" else [1])
    plan.save(tmp_path / "a.plan")
    assert make_plan(tmp_path / "a.plan").ranks[0].data.equals(plan.ranks[0].data)
