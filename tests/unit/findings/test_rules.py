"""Each rule on small traces: found where it should be, silent where all is well, abstaining where it cannot know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from traceloom.findings import RULES, Context, rank
from traceloom.findings.rule import Candidate, MemoryCandidate, Remark
from traceloom.testing import TraceBuilder
from traceloom.trace.notice import Abstention
from traceloom.trace.session import Session

KERNEL = "void at::native::elementwise_kernel<4>(int)"
NORM = ("aten::pow", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul", "aten::mul")
BY_SLUG = {rule.slug: rule for rule in RULES}


def grounded(*builders: TraceBuilder) -> Context:
    return Context.of(Session(tuple(builder.build() for builder in builders), "made"))


def said(slug: str, *builders: TraceBuilder) -> list[object]:
    return list(BY_SLUG[slug].evaluate(grounded(*builders)))


class Made:
    """A trace of one step, written op by op."""

    def __init__(self, **more: object) -> None:
        self.trace = TraceBuilder(**more)  # type: ignore[arg-type]
        self.now, self.device, self.number = 10.0, 0.0, 0

    def op(
        self,
        name: str = "aten::add",
        kernel: str = KERNEL,
        kernel_us: float = 20,
        host_us: float = 10,
        **more: object,
    ) -> Made:
        self.number += 1
        self.trace.op(name, self.now, host_us, **more)  # type: ignore[arg-type]
        self.trace.launch("cudaLaunchKernel", self.now + 1, 4, correlation=self.number)
        self.device = max(self.device, self.now + 8)
        self.trace.kernel(kernel, self.device, kernel_us, correlation=self.number)
        self.device += kernel_us + 1
        self.now += host_us + 1
        return self

    def pause(self, us: float) -> Made:
        self.now += us
        return self

    def inside(self, name: str, us: float, *, python: bool = False) -> Made:
        (self.trace.python if python else self.trace.annotation)(name, self.now, us)
        self.now += us + 1
        return self

    def call(self, name: str, us: float | None = None, op: str | None = None) -> Made:
        """A call; without a duration it waits for the device."""
        self.number += 1
        us = self.device - self.now + 5 if us is None else us
        if op is not None:
            self.trace.op(op, self.now - 0.5, us + 1)
        self.trace.launch(name, self.now, us, correlation=self.number)
        self.now += us + 1
        self.device = max(self.device, self.now)
        return self

    def around(self, name: str, work: Callable[[Made], object], *, python: bool = False) -> Made:
        """An op or a frame around some work."""
        began = self.now
        self.now += 1
        work(self)
        (self.trace.python if python else self.trace.op)(name, began, self.now - began)
        self.now += 1
        return self

    def exchange(self, parts: list[int] | None, us: float = 300) -> Made:
        """An all_to_all of parts; where None, the file says nothing of them."""
        more = {} if parts is None else {"In split size": str(parts), "Out split size": str(parts)}
        args = TraceBuilder.collective_args("all_to_allv", "0", 4, 4096, "Float")
        self.number += 1
        self.trace.launch("cudaLaunchKernel", self.now, 4, correlation=self.number)
        start = max(self.device, self.now + 8)
        self.trace.kernel(
            "ncclDevKernel_SendRecv(x)", start, us, correlation=self.number, **args | more
        )
        self.device, self.now = start + us + 1, self.now + 6
        return self

    def done(self) -> TraceBuilder:
        return self.trace.step(1, 5, self.now)


def slow_host(made: Made) -> Made:
    """What the host could have launched while it waited."""
    for _ in range(10):
        made.op(host_us=40)
    return made


def busy() -> Made:
    made = Made()
    for _ in range(30):
        made.op("aten::mm", "ampere_bf16_s16816gemm_bf16_128x128", 60)
    return made


FOUND: dict[str, Callable[[], Made]] = {
    "host-pause": lambda: busy().pause(4_000).op().op(),
    "launch-bound": lambda: _small(40),
    "python-bound": lambda: _paused(40),
    "small-kernels": lambda: _small(40, kernel_us=15),
    "unfused-normalisation": lambda: _norms(8),
    "blocking-sync": lambda: slow_host(busy().call("cudaDeviceSynchronize")),
    "blocking-item": lambda: slow_host(busy().call("cudaStreamSynchronize", None, "aten::item")),
    "device-allocation": lambda: busy().call("cudaMalloc", 4_000, "aten::empty").op(),
    "module-loading": lambda: busy().call("cuModuleLoadData", 4_000, "aten::mm").op(),
    "garbage-collection": lambda: (
        busy().inside("<built-in function collect>", 3_000, python=True).op()
    ),
    "data-starved": lambda: (
        busy().inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 3_000).op()
    ),
    "matrix-units-unused": lambda: _products("ampere_sgemm_128x64_nn"),
    "compiling": lambda: (
        _broken(0)
        .around("_compile.compile_inner (dynamo_timed)", lambda made: made.pause(4_000))
        .op()
    ),
    "autotuning": lambda: (
        busy().around("triton/testing.py(99): do_bench", _trials, python=True).op()
    ),
    "graph-breaks": lambda: _broken(20),
    "uneven-exchange": lambda: _exchanges([4000, 32, 32, 32]),
}


def _small(count: int, kernel_us: float = 2) -> Made:
    made = Made()
    for _ in range(count):
        made.op(kernel_us=kernel_us)
    return made


def _talking(count: int) -> Made:
    made = Made()
    for _ in range(count):
        made.op(kernel_us=2).inside("nccl:all_reduce", 30)
    return made


def _paused(count: int) -> Made:
    made = Made()
    for _ in range(count):
        made.op(kernel_us=2).pause(30)
    return made


def _norms(count: int) -> Made:
    made = busy()
    for _ in range(count):
        for name in NORM:
            made.op(name)
    return made


def _products(kernel: str) -> Made:
    made = Made()
    for _ in range(10):
        made.op("aten::mm", kernel, 100)
    return made


def _trials(made: Made) -> None:
    for _ in range(40):
        made.op("", "triton_candidate", 80, host_us=90)


def _broken(breaks: int) -> Made:
    """Regions of compiled code whose continuation comes after 100 us of something else, or that have none."""

    def graph(made: Made) -> None:
        made.around("CompiledFunction", lambda inner: inner.op("triton_call", "triton_fused", 20))

    def region(made: Made) -> None:
        graph(made)
        if breaks:
            made.pause(100).around("Torch-Compiled Region: 1/0", graph)

    made = Made()
    for _ in range(breaks or 20):
        made.around("Torch-Compiled Region: 0/0", region)
    return made


def _exchanges(parts: list[int] | None) -> Made:
    made = Made()
    for _ in range(5):
        made.op(kernel_us=40).exchange(parts)
    return made


@pytest.mark.sampled(6)
@pytest.mark.parametrize("slug", FOUND)
def test_a_rule_finds_what_it_is_about(slug: str) -> None:
    found = said(slug, FOUND[slug]().done())
    candidates = [one for one in found if isinstance(one, Candidate)]
    assert candidates, found
    assert all(
        one.changes and one.evidence and one.advice and 0 < one.confidence < 1 for one in candidates
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("slug", FOUND)
def test_a_found_fault_is_in_the_ranked_list(slug: str) -> None:
    assert slug in {one.slug for one in rank(grounded(FOUND[slug]().done()), RULES).time}


def test_an_empty_step_behind_the_only_one_hides_nothing() -> None:
    made = FOUND["host-pause"]()
    (found, *_) = rank(grounded(made.done().step(2, made.now + 5, 20)), RULES).time
    assert (found.slug, found.step_count) == ("host-pause", 1)


def test_what_the_device_still_has_to_do_of_earlier_steps_is_not_told_of_this_one() -> None:
    made = Made()
    for step, kernel in ((1, KERNEL), (2, "ampere_sgemm_128x64_nn")):
        began = made.now
        for _ in range(10):
            made.op("aten::mm", kernel, 60)
        made.trace.step(step, began - 5, made.now - began)
    (candidate,) = BY_SLUG["matrix-units-unused"].evaluate(grounded(made.trace).over((2,)))
    assert isinstance(candidate, Candidate)
    assert candidate.title.startswith("600 µs of matrix products")


def test_a_device_that_is_always_busy_needs_no_fix() -> None:
    found = rank(grounded(busy().done()), RULES)
    assert [one.title for one in found.time if (one.saving_fraction or 0) > 0.02] == []
    assert found.memory == ()


@pytest.mark.parametrize("slug", sorted(set(FOUND) - {"launch-bound", "python-bound"}))
def test_a_rule_says_nothing_where_all_is_well(slug: str) -> None:
    assert [
        one
        for one in said(slug, busy().done())
        if isinstance(one, (Candidate, MemoryCandidate, Remark))
    ] == []


WELL = {
    "compiling": lambda: _broken(20),  # compiled before the step, with breaks
    "graph-breaks": lambda: _broken(0),
    "autotuning": lambda: busy().around(
        "train.py(7): benchmark_of_the_year", lambda made: made.op(), python=True
    ),
    "uneven-exchange": lambda: _exchanges([1000, 1100, 1000, 996]),
    "python-bound": lambda: _talking(40),
}


@pytest.mark.parametrize("slug", WELL)
def test_a_rule_says_nothing_where_what_it_is_about_is_there_and_right(slug: str) -> None:
    assert said(slug, WELL[slug]().done()) == []


@pytest.mark.parametrize(("slug", "goes_us"), [("compiling", 4_000), ("autotuning", 40 * 80)])
def test_what_is_tried_out_and_compiled_goes_as_a_whole(slug: str, goes_us: int) -> None:
    (found,) = rank(grounded(FOUND[slug]().done()), [BY_SLUG[slug]]).time
    assert found.saving_ns == pytest.approx(goes_us * 1000, rel=0.05)


def test_graph_breaks_save_at_most_the_host_time_between_the_graphs() -> None:
    (one,) = said("graph-breaks", FOUND["graph-breaks"]().done())
    assert isinstance(one, Candidate)
    assert one.at_most_ns is not None
    assert 20 * 100_000 <= one.at_most_ns <= 20 * 110_000


def test_an_uneven_exchange_is_as_long_as_with_equal_parts() -> None:
    context = grounded(FOUND["uneven-exchange"]().done())
    (one,) = BY_SLUG["uneven-exchange"].evaluate(context)
    assert isinstance(one, Candidate)
    assert "3.9 × the mean" in one.title
    found = rank(context, [BY_SLUG["uneven-exchange"]]).time[0]
    assert found.saving_ns == pytest.approx(5 * 300_000 * (1 - 1024 / 4000), rel=0.1)


def test_exchanges_whose_parts_were_not_recorded_are_not_called_even() -> None:
    (one,) = said("uneven-exchange", _exchanges(None).done())
    assert isinstance(one, Abstention)
    assert "split sizes" in one.reason


@pytest.mark.parametrize("slug", ["compiling", "autotuning", "garbage-collection"])
def test_what_the_host_does_is_not_known_from_the_device_alone(slug: str) -> None:
    device = TraceBuilder()
    for k in range(5):
        device.kernel(KERNEL, 10 + 30 * k, 20)
    (one,) = said(slug, device)
    assert isinstance(one, Abstention)
    assert "nothing was recorded of the host" in one.reason


def _over_elements(calls: int, name: str = "aten::item", before: str = "aten::unbind") -> Made:
    made = Made()
    made.inside(before, 100) if not before.startswith("aten") else made.around(
        before, lambda inner: inner.pause(100)
    )
    for _ in range(calls):
        made.around(name, lambda inner: inner.pause(3))
    for _ in range(20):
        made.op("aten::mm", "ampere_bf16_s16816gemm_bf16_128x128", 20)
    return made


@pytest.mark.parametrize(
    ("name", "before"), [("aten::item", "aten::add"), ("aten::mul", "aten::unbind")]
)
def test_a_loop_over_elements_goes_as_a_whole(name: str, before: str) -> None:
    (found, *_) = rank(
        grounded(_over_elements(100, name, before).done()), [BY_SLUG["python-bound"]]
    ).time
    assert f"a loop over the elements of a tensor calls {name} 100 times" in found.title
    # each call takes 4 us and the next begins 1 us later, and dividing the tensor is part of the loop
    assert found.saving_ns == pytest.approx(
        (500 + (102 if before == "aten::unbind" else 0)) * 1000, rel=0.05
    )


@pytest.mark.parametrize(
    ("calls", "name", "before"),
    [
        (40, "aten::item", "aten::unbind"),  # a value for each parameter
        (100, "aten::copy_", "aten::add"),  # a loop in C++ over many tensors
    ],
)
def test_what_is_no_loop_over_elements_is_not_called_one(
    calls: int, name: str, before: str
) -> None:
    found = said("python-bound", _over_elements(calls, name, before).done())
    assert not [one for one in found if isinstance(one, Candidate) and "elements" in one.title]


ABSTAINS = {
    "launch-bound": "no GPU work",
    "blocking-sync": "no GPU work",
    "low-roofline": "no GPU work",
    "unaligned-matmul": "no GPU work",
    "data-starved": "no data loader",
    "exposed-communication": "no communication",
    "straggler": "only one rank",
    "slow-link": "only one rank",
    "pipeline-bubbles": "only one rank",
    "compute-imbalance": "at least two ranks",
    "memory-growth": "allocations were not recorded",
    "profiler-overhead": "were not measured",
    "slow-steps": "fewer than four",
    "graph-breaks": "torch.compile was not seen",
}


@pytest.mark.parametrize("slug", ABSTAINS)
def test_a_rule_that_cannot_know_says_why(slug: str) -> None:
    on_host = TraceBuilder().op("aten::mm", 10, 50).step(1, 5, 100)
    (one,) = said(slug, on_host)
    assert isinstance(one, Abstention)
    assert ABSTAINS[slug] in one.reason


def test_one_operator_that_takes_long_is_a_late_launch_only_where_it_comes_again() -> None:
    made = busy().op(host_us=30_000).op()
    assert said("launch-bound", made.trace) == []
    (candidate,) = said("launch-bound", made.done())
    assert isinstance(candidate, Candidate)


def test_a_library_that_starts_is_not_told_as_an_allocation() -> None:
    trace = (
        busy()
        .call("cudaGetSymbolAddress", 10)
        .pause(2_000)
        .call("cudaFree", 30_000, "aten::conv2d")
        .op()
        .done()
    )
    (candidate,) = said("module-loading", trace)
    assert isinstance(candidate, Candidate)
    assert "30.0 ms" in candidate.title
    assert said("device-allocation", trace) == []


def test_waits_of_a_profiler_for_its_own_window_are_no_finding() -> None:
    made = busy()
    made.trace.python("lib/profiling/profile.py(34): run_torch_profiler", made.now - 1, 4_000)
    slow_host(made.call("cudaDeviceSynchronize"))
    assert [one for one in said("blocking-sync", made.done()) if isinstance(one, Candidate)] == []


def test_a_backward_pass_of_a_thread_that_was_not_recorded_is_no_pause() -> None:
    made = busy().inside("## backward ##", 4_000)
    made.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")
    (one,) = said("host-pause", made.done())
    assert isinstance(one, Abstention)
    assert "was not recorded" in one.reason
    seen = (
        busy()
        .inside("## backward ##", 4_000)
        .op("autograd::engine::evaluate_function: AddBackward0")
    )
    (one,) = said("host-pause", seen.done())
    assert isinstance(one, Candidate)


def test_of_a_file_with_a_few_of_its_operators_nobody_knows_what_lies_between_them() -> None:
    made = busy()
    for number in range(600):
        made.op(external_id=1_000 * number).pause(300)
    for slug in ("python-bound", "host-pause", "launch-bound"):
        (one,) = said(slug, made.done())
        assert isinstance(one, Abstention)
        assert "left out of the file" in one.reason


def test_the_sum_that_is_normalised_is_no_part_of_the_normalisation() -> None:
    made = busy()
    for _ in range(8):
        for name in ("aten::linear", "aten::add", *NORM):
            made.op(name)
    (one,) = said("unfused-normalisation", made.done())
    assert isinstance(one, Candidate)
    assert f"8 normalisations are made of {8 * len(NORM)} kernels" in one.title


def test_evidence_stands_in_the_step_and_its_times_are_those_of_the_trace() -> None:
    made = FOUND["host-pause"]().done()
    context = grounded(made)
    step = context.traces[0].steps.row(0, named=True)
    for finding in rank(context, RULES).time:
        for one in finding.evidence:
            if one.start_ns is not None:
                assert step["start_ns"] <= one.start_ns <= step["end_ns"], (finding.slug, one)


def test_hostile_names_stay_text() -> None:
    name = "<img src=x onerror=alert(1)>\x1b[31m"
    made = busy()
    made.trace.python(f"{name}.py(1): sleep", made.now, 4_000)
    context = grounded(made.pause(4_001).op().done())
    (found,) = [one for one in rank(context, RULES).time if one.slug == "host-pause"]
    assert "onerror" in found.title  # told as recorded; those who draw it make it harmless
