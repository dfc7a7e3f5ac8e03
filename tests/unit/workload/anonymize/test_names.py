"""Pseudonyms: what an analysis reads out of a pseudonym is what it read out of the name."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import polars as pl
import pytest
from hypothesis import given, strategies as st

from traceloom.analyze import host_events
from traceloom.analyze.collective_names import derive_collective_kinds
from traceloom.analyze.host_events import BLOCKING_CALL_PATTERN
from traceloom.analyze.kernel_rules import assign_categories
from traceloom.formats.links import classify_collective
from traceloom.trace.vocabulary import copy_kind
from traceloom.workload.anonymize.names import MARKS, KernelNames, Pseudonyms
from traceloom.workload.anonymize.policy import ALPHABET, LETTERS, Key, Policy

RULES = json.loads(
    files("traceloom.analyze").joinpath("kernel_rules.json").read_text(encoding="utf-8")
)
LETTER = re.compile(rf"[{ALPHABET}]{{{LETTERS}}}")


def names(**policy: str) -> Pseudonyms:
    return Pseudonyms(Key(b"a key that only tests have"), Policy(**policy))


def kernels(**policy: str) -> KernelNames:
    return KernelNames(names(**policy), Policy(**policy))


def _number(table: tuple[tuple[int, str], ...], name: str) -> int:
    return next((number for number, pattern in table if re.search(pattern, name)), -1)


def _words(name: str) -> int:
    hits = [
        number for number, pattern in host_events.WORD_PHASE_PATTERNS if re.search(pattern, name)
    ]
    return hits[0] if len(hits) == 1 else -1


def meaning_on_host(name: str) -> tuple[object, ...]:
    span = _number(host_events.SPAN_PHASE_PATTERNS, name)
    backend = re.match(r"(nccl|rccl|gloo|mpi|ucc|hccl|xccl):\s*(.+)$", name)
    kind = classify_collective(backend[2]) if backend else ""
    known = kind in {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "barrier",
        "send",
        "recv",
    }
    return (
        span,
        _words(name) if span < 0 else -1,
        bool(re.search(host_events.TRACELOOM_ANNOTATION_PATTERN, name)),
        bool(re.search(host_events.STEP_MARK_PATTERN, name)),
        bool(re.match(r"^(?:nccl|gloo|mpi|ucc|hccl):|^\[|^PyTorch Profiler", name)),
        name.startswith("autograd::engine::evaluate_function: "),
        kind if known else "",
    )


def meaning_in_python(name: str) -> tuple[object, ...]:
    return (
        _number(host_events.PYTHON_PHASE_PATTERNS, name),
        bool(re.search(host_events.BLOCKING_PYTHON_PATTERN, name)),
        name.startswith("nn.Module: "),
        name.startswith("<built-in method run_backward"),
        bool(re.search(r"(^|/)torch/utils/data/dataloader\.py\(\d+\): __next__$", name)),
    )


def meaning_of_call(name: str) -> tuple[object, ...]:
    blocking = bool(re.search(BLOCKING_CALL_PATTERN, name)) and "Async" not in name
    return (
        blocking or bool(re.search(host_events.BLOCKING_RUNTIME_PATTERN, name)),
        "StreamWaitEvent" in name,
        "EventRecord" in name,
    )


HOST = [
    "my_library::op",
    "step[DECODE bs=32]",
    "## forward ##",
    "## load_batch ##",
    "forward and backward",
    "train loop",
    "[param|net|0|measure|forward]",
    "nccl:all_reduce",
    "nccl:my_all_reduce",
    "gloo:send 0->1",
    "nccl:secret",
    "Optimizer.step#Adam.step",
    "Optimizer.step#Mine.step",
    "Optimizer.zero_grad#Mine.zero_grad",
    "Optimizer.Mine",
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "enumerate(MyDataLoader)#x",
    "_BaseDataLoaderIter x",
    "autograd::engine::evaluate_function: MyFunctionBackward",
    "autograd::engine::evaluate_function: AddmmBackward0",
    "autograd::engine::other",
    "c10d::mine",
    "_c10d_functional::mine",
    "c10d_functional::mine",
    "record_param_comms",
    "torch.distributed.ddp.reducer::mine",
    "traceloom.scope:a.b",
    "traceloom.step#3",
    "traceloom.other",
    "ProfilerStep#12",
    "ProfilerStepMine",
    "PyTorch Profiler mine",
    "nn.Module: Mine_3",
    "DistributedDataParallel.forward",
    "zero_grad",
    "my optimizer_step",
    "aten::mm",
    "aten::not_an_operator",
    "",
]
PYTHON = [
    "train.py(3): main",
    "torch/optim/adam.py(3): step",
    "/home/me/torch/optim/mine.py(3): step",
    "nn.Module: Linear_3",
    "nn.Module: Mine_3",
    "/x/torch/_tensor.py(500): backward",
    "torch/autograd/graph.py(7): _engine_run_backward",
    "/x/torch/utils/data/dataloader.py(630): __next__",
    "torch/utils/data/mine.py(3): x",
    "<built-in method run_backward of x>",
    "<built-in method acquire of lock at 0x7f>",
    "<built-in function sleep>",
    "<built-in function mine>",
    "torch/distributed/distributed_c10d.py(3): all_reduce",
    "<built-in function collect>",
    "Python GC",
]
CALLS = [
    "cudaLaunchKernel",
    "cudaSecretLaunch",
    "myMemcpy",
    "myMemcpyAsync",
    "hipMineSynchronize",
    "urEventsWait",
    "mySynchronizeAsync",
    "cuMineStreamWaitEvent",
    "cuMineEventRecord",
    "synchronizeStream",
    "mineMalloc",
    "mine",
    "zeFenceHostSynchronize",
    "piQueueFinish",
    "cudaMineEventWait",
]


@pytest.mark.parametrize("name", HOST)
def test_a_name_of_the_host_keeps_its_meaning(name: str) -> None:
    assert meaning_on_host(names().host(name)) == meaning_on_host(name)


@given(
    st.lists(
        st.sampled_from([*HOST, " ", "_", "forward", "c10d::", "#3", "nccl:"]),
        min_size=1,
        max_size=3,
    )
)
def test_so_does_any_mixture_of_names(parts: list[str]) -> None:
    name = "".join(parts)
    assert meaning_on_host(names().host(name)) == meaning_on_host(name)


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_frame_keeps_its_meaning(name: str) -> None:
    assert meaning_in_python(names().python(name)) == meaning_in_python(name)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_keeps_its_meaning(name: str) -> None:
    assert meaning_of_call(names().call(name)) == meaning_of_call(name)


def test_every_rule_has_a_mark_and_finds_its_kernels_again() -> None:
    assert set(MARKS) == {rule["rule"] for rule in RULES}
    for structure in ("keep", "collapse"):
        shown = [kernels(structure=structure).kernel(rule["example"]) for rule in RULES]
        frame = assign_categories(pl.DataFrame({"name": shown, "kind": ["kernel"] * len(shown)}))
        assert frame["rule"].to_list() == [rule["rule"] for rule in RULES]
        assert not any(
            rule["example"][:20] in name for rule, name in zip(RULES, shown, strict=True)
        )


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum",
        "ncclKernel_Reduce_x",
        "ncclDevKernel_SendRecv",
        "x ep::dispatch<8>",
        "ep::combine",
        "ncclDevKernel_ReduceScatter",
        "nccl_AllGather",
        "void ep::internode::notify_dispatch<1>",
        "nccl_all2all",
    ],
)
def test_a_kernel_of_a_collective_keeps_its_kind(name: str) -> None:
    first, second = derive_collective_kinds((name, kernels().kernel(name)))["kind"]
    assert first == second is not None


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("volta_sgemm_128x64_nn", "gemm"),
        ("flash_fwd_kernel<x>", "attention"),
        ("vectorized_layer_norm", "norm"),
        ("vectorized_elementwise_kernel<4, mine>", "elementwise"),
        ("CatArrayBatchedCopy", "copy"),
        ("mine", "kernel"),
        ("triton_poi_fused_add_secret_0", "elementwise"),
        ("triton_red_fused_secret", "reduction"),
    ],
)
def test_a_kernel_is_told_by_what_it_does(name: str, family: str) -> None:
    assert re.fullmatch(rf"{family}_{LETTER.pattern}", kernels().kernel(name))
    assert kernels(structure="collapse").kernel(name) == family


@pytest.mark.parametrize(
    "name",
    [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy my HtoD (Mine -> Device)",
        "MEMORY_COPY_DEVICE_TO_HOST",
        "mine",
    ],
)
def test_a_copy_keeps_its_direction(name: str) -> None:
    shown = kernels().copy(name)
    assert copy_kind(shown) == copy_kind(name)
    assert "mine" not in shown.lower()


def test_public_names_stay_and_only_they() -> None:
    assert names().host("aten::addmm") == "aten::addmm"
    assert names().host("AddmmBackward0") == "AddmmBackward0"
    assert names().host("aten::quokka").startswith("op_")
    assert names(public_names="pseudonym").host("aten::addmm").startswith("op_")
    assert names().call("cudaLaunchKernel") == "cudaLaunchKernel"


def test_names_that_differ_in_digits_only_are_told_to_be_alike() -> None:
    one, other, third = (
        names().host(name) for name in ("step 17 of net", "step 18 of net", "step 17 of mesh")
    )
    assert one != other
    assert one.split("#")[0] == other.split("#")[0] != third.split("#")[0]
    assert re.sub(r"\d+", "#", one) == re.sub(r"\d+", "#", other)


def test_pseudonyms_depend_on_the_key_alone() -> None:
    again, other = (
        Pseudonyms(Key(b"a key that only tests have"), Policy()),
        Pseudonyms(Key(b"another key of tests"), Policy()),
    )
    assert names().host("mine") == again.host("mine") != other.host("mine")
    assert names().process(77) == again.process(77) != other.process(77)


def test_kept_names_are_listed() -> None:
    made = Pseudonyms(Key(b"a key that only tests have"), Policy(keep_names=("my_.*",)))
    assert made.host("my_op") == "my_op"
    assert made.host("not my_op") != "not my_op"
    assert made.kept == {"my_op"}


def test_groups_of_short_numbers_stay_and_longer_ones_stay_numbers() -> None:
    assert names().group("12") == "12"
    assert names().group("123456789").isdigit()
    assert names().group("123456789") != "123456789"
    assert names().group("tensor_parallel").startswith("group_")


def test_the_way_back_leads_to_the_names() -> None:
    made = names()
    shown = [made.host(name) for name in HOST]
    assert all(
        made.originals[new] == name for new, name in zip(shown, HOST, strict=True) if new != name
    )
