"""PyTorch's eight known anti-patterns, detected in recorded traces.

They are those of `torch/profiler/_pattern_matcher.py`, which needs the live profiler; here every
rule reports its matches with their evidence, or why it cannot decide. Definitions:
docs/concepts/anti-patterns.md.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from traceloom.analyze.gpu_work import (
    HostEventIndex,
    build_host_event_index,
    convert_to_ndarray,
    find_gpu_event_rows,
)
from traceloom.analyze.repeats import StretchNumbers
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import get_event_column
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.trace import Trace

_MIN_REPEATS = 10
_ALIGNMENT = 8
_TF32_CAPABILITY = 8.0
_MATMULS = r"^aten::(mm|bmm|addmm|baddbmm)$"
_FP32_KERNEL = r"(?i)sgemm|simt_s|ffma|f32f32_f32f32_f32|gemvNSP_kernel<float|gemv2?[TN]_kernel<.*float, float, float"
_TF32_KERNEL = r"(?i)tf32|tensorop"


@dataclass(frozen=True)
class RuleMatches:
    """The matches of a rule, or why it abstains.

    Attributes:
        position: Positions (in the forest) of the events that match.
        evidence: `correlated` (the recording shows it) or `inferred`, one for all.
        detail: A few words per match.
        last: Last event that each match covers, positions; None where a match is one event.
        reason: Why the rule cannot decide; None where it can.
    """

    position: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    evidence: str = "correlated"
    detail: tuple[str, ...] = ()
    last: Ints | None = None
    reason: str | None = None


def find_extra_copies(host: HostEventIndex) -> RuleMatches:
    """Finds tensors that are filled on the CPU and moved to the GPU at once."""
    to = host.ops(r"^aten::to$")
    if not host.is_op.any():
        return RuleMatches(reason="no operators were recorded")
    copies = host.trace.copies
    if not copies.height:
        return RuleMatches(reason="no copies between CPU and GPU were recorded")
    moved = np.zeros(host.code.size + 1, dtype=np.bool_)
    copy_ops = (
        host.trace.events["op"][copies["event"].filter(copies["kind"] == "HtoD")]
        .drop_nulls()
        .to_numpy()
    )
    moved[host.tree.position[copy_ops]] = True
    last_child = np.append(host.last_child_op, -1)
    to_copy = last_child[to]
    copied = last_child[to_copy]
    names = [
        *(
            np.append(host.named(pattern), False)
            for pattern in (r"^aten::_to_copy$", r"^aten::copy_$")
        )
    ]
    fits = names[0][to_copy] & names[1][copied] & moved[copied] & (host.parent_op[to] < 0)
    to, copied = to[fits], copied[fits]
    # The outermost operator that ended before it on its thread; both come from the same Python
    # code.
    top = np.flatnonzero(host.is_op & (host.parent_op < 0))
    index = np.searchsorted(top, to) - 1
    before = np.where(index >= 0, top[index], -1)
    fits = (before >= 0) & (host.tree.lane[before] == host.tree.lane[to])
    if host.has_stacks:
        outer = np.append(host.tree.parent, -1)
        fits &= outer[outer[to]] == outer[outer[before]]
    # The filling operator at or below it along last children.
    fills = np.append(host.named(r"^aten::(fill_|zero_|normal_|uniform_)$") & host.is_op, False)
    current, fill_op = before, np.full(to.size, -1, dtype=np.int64)
    while (current >= 0).any():  # one iteration per level of nesting
        fill_op = np.where((fill_op < 0) & fills[current], current, fill_op)
        current = np.where(fill_op < 0, last_child[current], -1)
    fits &= fill_op >= 0
    to, copied, fill_op = to[fits], copied[fits], fill_op[fits]
    # Target and source have one element type, or the types were not recorded.
    types: list[list[str]] = [
        json.loads(text) if text else [] for text in host.inputs(copied)["types"].to_list()
    ]
    same = np.array([len(names) < 2 or names[0] == names[1] for names in types], dtype=np.bool_)
    to, fill_op = to[same], fill_op[same]
    filled = host.words.names[host.code[fill_op]].to_list()
    evidence = "correlated" if host.has_stacks else "inferred"
    return RuleMatches(to, evidence, tuple(f"filled by {name}" for name in filled))


def find_loop_indexing(host: HostEventIndex) -> RuleMatches:
    """Finds the same few operators around `aten::select`, ten times and more in a row, as
    siblings.
    """
    if not host.is_op.any():
        return RuleMatches(reason="no operators were recorded")
    if not host.ops(r"^aten::select$").size:
        return RuleMatches()
    # Siblings are below the same operator, or called by the same Python code (built-in functions
    # are not code).
    nearest_frame = host.tree.nearest(~(host.is_python & host.named(r"^<built-in ")))
    ops = np.flatnonzero(host.is_op)
    family = nearest_frame[ops] + 1 + np.where(nearest_frame[ops] < 0, -host.tree.lane[ops] - 1, 0)
    order = np.argsort(family, kind="stable")
    ops, family = ops[order], family[order]
    code = host.code[ops]
    select = np.flatnonzero(host.named(r"^aten::select$")[ops])
    length = np.append(np.diff(select), 0)
    end = np.searchsorted(family, family[select], side="right")
    has_next = np.append(select[1:] < end[:-1], False)  # another select in the same family
    same = has_next.copy()
    candidates = np.flatnonzero(has_next)
    hashed = StretchNumbers(code)
    candidates = candidates[select[candidates] + 2 * length[candidates] <= end[candidates]]
    same[:] = False
    same[candidates] = hashed.number(select[candidates], length[candidates]) == hashed.number(
        select[candidates + 1], length[candidates]
    )
    # A run goes on as long as each part equals the next and has its length.
    goes_on = np.append(same[1:] & (length[1:] == length[:-1]) & same[:-1], False)
    starts = np.flatnonzero(same & ~np.append(False, goes_on[:-1]))
    stops = np.flatnonzero(same & ~goes_on)
    repeats = stops - starts + 2
    is_loop = repeats >= _MIN_REPEATS
    starts, stops, repeats = starts[is_loop], stops[is_loop], repeats[is_loop]
    last = ops[select[stops] + 2 * length[stops] - 1]
    names = host.words.names
    detail = tuple(
        f"{count} times {', '.join(names.gather(code[low : low + size]).to_list()[:4])}"
        for count, low, size in zip(
            repeats.tolist(), select[starts].tolist(), length[starts].tolist(), strict=True
        )
    )
    return RuleMatches(
        ops[select[starts]], "correlated" if host.has_stacks else "inferred", detail, last
    )


def find_fp32_matmuls(host: HostEventIndex) -> RuleMatches:
    """Finds matrix products in plain FP32 on a GPU that has TF32."""
    trace = host.trace
    ops = host.ops(_MATMULS)
    if not ops.size:
        return RuleMatches()
    if not (host.is_launch & host.named(r"^cu")).any():
        return RuleMatches(reason="TF32 is a mode of NVIDIA's; no CUDA call was recorded")
    capability = (
        trace.devices["compute_capability"].filter(trace.devices["used"]).drop_nulls().to_list()
    )
    if not capability:
        return RuleMatches(reason="the file does not record the compute capability of the device")
    if all(float(version) < _TF32_CAPABILITY for version in capability):
        return RuleMatches(
            reason=f"the device has no TF32 (compute capability {capability[0]}, 8.0 is needed)"
        )
    kernel = find_gpu_event_rows(trace)
    op = convert_to_ndarray(get_event_column(trace, "op", -1))[kernel]
    if not (op >= 0).any():
        return RuleMatches(
            reason="no kernel is joined to its operator, and the mode itself is not recorded"
        )
    code = convert_to_ndarray(host.words.code)[kernel]
    slow = host.words.matching(_FP32_KERNEL) & ~host.words.matching(_TF32_KERNEL)
    slow_rows = np.flatnonzero((op >= 0) & slow[code])
    position = convert_to_ndarray(host.tree.position)[op[slow_rows]]
    is_matmul = np.zeros(host.code.size + 1, dtype=np.bool_)
    is_matmul[ops] = True
    owner = (
        np.where(is_matmul[position], position, host.parent_op[position])
        if position.size
        else position
    )
    slow_rows, owner = slow_rows[is_matmul[owner]], owner[is_matmul[owner]]
    owner, first = np.unique(owner, return_index=True)
    names = host.words.names.gather(code[slow_rows[first]]).to_list()
    return RuleMatches(owner, "correlated", tuple(f"runs {text[:80]}" for text in names))


def find_single_tensor_optimizers(host: HostEventIndex) -> RuleMatches:
    frames = np.flatnonzero(host.named(r"_single_tensor_[0-9A-Za-z_]+$"))
    if host.has_stacks:
        names = host.words.names.gather(host.code[frames]).to_list()
        return RuleMatches(frames, "correlated", tuple(name.rsplit(": ", 1)[-1] for name in names))
    step_rows = np.flatnonzero(host.tree.topmost(host.named(r"^Optimizer\.step#")))
    if not step_rows.size:
        return RuleMatches(reason="no optimizer step was recorded; stacks would show its code")
    if not find_gpu_event_rows(host.trace).size:
        return RuleMatches(
            reason="no GPU work was recorded, and it is on GPUs that going one by one costs"
        )
    fused_count = host.inside(host.is_op & host.named(r"_foreach_|_fused_|multi_tensor"))
    updates = host.inside(host.is_op & host.named(r"^aten::(addcdiv_|addcmul_|lerp_|add_|mul_)$"))
    # At least two parameters, or two updates of one
    step_rows = step_rows[(fused_count[step_rows] == 0) & (updates[step_rows] >= 2)]
    return RuleMatches(
        step_rows,
        "inferred",
        tuple(f"{count} updates one by one" for count in updates[step_rows].tolist()),
    )


def find_synchronous_loaders(host: HostEventIndex) -> RuleMatches:
    """Finds DataLoaders without workers: the training loop makes its own batches."""
    spans = np.flatnonzero(host.tree.topmost(host.named(r"_SingleProcessDataLoaderIter")))
    if spans.size:
        return RuleMatches(spans, "correlated", ("_SingleProcessDataLoaderIter",) * spans.size)
    if host.named(r"_MultiProcessingDataLoaderIter").any():
        return RuleMatches()
    if not host.has_stacks:
        return RuleMatches(reason="no DataLoader was recorded, neither as annotation nor in stacks")
    loader = r"(^|/)torch/utils/data/dataloader\.py\(\d+\): "
    iter_calls, creations, worker_checks = (
        host.named(loader + name)
        for name in (r"__iter__$", r"_get_iterator$", "check_worker_number_rationality$")
    )
    worker_check_count = host.inside(worker_checks)
    call_rows = np.flatnonzero(
        iter_calls & (host.inside(creations) > 0) & (worker_check_count == 0)
    )
    return RuleMatches(call_rows, "correlated", ("made without workers",) * call_rows.size)


def find_zeroed_gradients(host: HostEventIndex) -> RuleMatches:
    """Finds `zero_grad` calls that write zeros instead of dropping the gradients."""
    calls = host.named(r"^Optimizer\.zero_grad#") | (host.named(r": zero_grad$") & host.is_python)
    call_rows = np.flatnonzero(host.tree.topmost(calls))
    if not call_rows.size:
        return RuleMatches(
            reason="no zero_grad was recorded; stacks or the optimizer's annotation would show it"
        )
    under_zeros = np.append(host.named(r"^aten::zeros$"), False)[host.parent_op]
    zeroed = host.is_op & (
        (host.named(r"^aten::zero_$") & ~under_zeros) | host.named(r"^aten::_foreach_zero_$")
    )
    count = host.inside(zeroed)[call_rows]
    has_fills = count > 0
    return RuleMatches(
        call_rows[has_fills],
        "correlated",
        tuple(f"{number} fills with zero" for number in count[has_fills].tolist()),
    )


def find_bias_before_norm(host: HostEventIndex) -> RuleMatches:
    """Finds convolutions with a bias that the batch normalisation after them removes again."""
    convolution = host.ops(r"^aten::conv2d$")
    if not convolution.size:
        return RuleMatches()
    if host.has_shapes:
        texts = host.inputs(convolution).select("types", "shapes")
        inputs = [[json.loads(text or "[]") for text in row] for row in texts.iter_rows()]
        # The third input is the bias; where there is none its type and shape are empty.
        bias = np.array(
            [all(len(values) > 2 and values[2] for values in row) for row in inputs], dtype=np.bool_
        )
    elif not host.ops(r"^aten::cudnn_convolution$").size:
        return RuleMatches(
            reason="no shapes were recorded, and only cuDNN's convolutions show their bias without them"
        )
    else:  # cuDNN adds the bias by an operator of its own
        bias = host.inside(host.is_op & host.named(r"^aten::add_$"))[convolution] > 0
    modules = host.named(r"^nn\.Module: Conv2d")
    has_modules = bool(modules.any())
    # The next module that begins is one; Python frames may be between the two calls
    if has_modules:
        enclosing_module = host.find_nearest_ancestor(convolution, modules)
        after = np.where(enclosing_module >= 0, np.append(host.tree.stop, -1)[enclosing_module], -1)
        order = np.flatnonzero(host.named(r"^nn\.Module: "))
        index = np.where(after >= 0, np.searchsorted(order, after), order.size)
        norm = np.append(host.named(r"^nn\.Module: BatchNorm2d"), False)
    else:  # the next operator is one
        order = np.flatnonzero(host.is_op & (host.parent_op < 0))
        index = np.searchsorted(order, convolution, side="right")
        norm = np.append(host.named(r"^aten::batch_norm$"), False)
    following = np.append(order, -1)[index]
    same = np.append(host.tree.lane, -1)[following] == host.tree.lane[convolution]
    is_match = bias & norm[following] & same
    evidence = "correlated" if host.has_shapes and has_modules else "inferred"
    return RuleMatches(
        convolution[is_match],
        evidence,
        ("followed by a batch normalisation",) * int(is_match.sum()),
    )


def find_unaligned_matmuls(host: HostEventIndex) -> RuleMatches:
    """Finds matrix products in half precision whose dimensions are not multiples of 8."""
    ops = host.ops(r"^aten::(mm|bmm|addmm)$")
    if not ops.size:
        return RuleMatches()
    if not host.has_shapes:
        return RuleMatches(reason="shapes and types of inputs were not recorded (record_shapes)")
    inputs = host.inputs(ops).filter(pl.col("shapes").is_not_null() & pl.col("types").is_not_null())
    kinds = inputs.select("shapes", "types").unique()
    # Shapes where the first type is half precision and one of the last two dimensions is unaligned
    details = []
    for shapes, types in kinds.iter_rows():
        half = json.loads(types)[:1] in (["c10::Half"], ["c10::BFloat16"])
        sizes = [shape for shape in json.loads(shapes) if isinstance(shape, list)] if half else []
        sizes = [shape for shape in sizes if all(isinstance(size, int) for size in shape)]
        is_unaligned = any(size % _ALIGNMENT for shape in sizes for size in shape[-2:])
        details.append(" x ".join(str(shape) for shape in sizes if shape) if is_unaligned else None)
    if not any(details):
        return RuleMatches()
    unaligned_kinds = kinds.with_columns(pl.Series("detail", details, dtype=pl.String)).drop_nulls(
        "detail"
    )
    matches = inputs.join(unaligned_kinds, on=["shapes", "types"], maintain_order="left")
    return RuleMatches(
        matches["position"].to_numpy(), "correlated", tuple(matches["detail"].to_list())
    )


RULES: dict[str, tuple[Callable[[HostEventIndex], RuleMatches], str]] = {
    "extra_cuda_copy": (
        find_extra_copies,
        "create the tensor on the GPU: torch.zeros(..., device='cuda')",
    ),
    "for_loop_indexing": (
        find_loop_indexing,
        "index with a tensor or a slice instead of in a loop",
    ),
    "fp32_matmul": (find_fp32_matmuls, "allow TF32: torch.set_float32_matmul_precision('high')"),
    "single_tensor_optimizer": (
        find_single_tensor_optimizers,
        "pass foreach=True or fused=True to the optimizer",
    ),
    "synchronous_data_loader": (
        find_synchronous_loaders,
        "give the DataLoader workers: num_workers > 0",
    ),
    "gradient_not_set_to_none": (
        find_zeroed_gradients,
        "zero_grad(set_to_none=True), which recent versions do by themselves",
    ),
    "conv_bias_before_batch_norm": (
        find_bias_before_norm,
        "bias=False in convolutions that a batch normalisation follows",
    ),
    "unaligned_half_matmul": (
        find_unaligned_matmuls,
        "pad the dimensions of half-precision matrices to multiples of 8",
    ),
}
"""Name of each anti-pattern -> the function that finds it, and its advice."""

PatternName = pl.Enum(list(RULES))
PATTERNS = build_schema(
    "pattern checked match_count host_ns gpu_ns evidence reason advice",
    {"pattern": PatternName, "evidence": pl.Enum(["correlated", "inferred"])},
)
MATCHES = build_schema(
    "pattern event name start_ns duration_ns gpu_ns step thread evidence detail",
    {"pattern": PatternName, "thread": pl.Int64, "evidence": pl.Enum(["correlated", "inferred"])},
)


@dataclass(frozen=True)
class AntiPatterns(Result):
    """Anti-patterns of one trace.

    Attributes:
        patterns: One row per known anti-pattern, always all eight: pattern, checked (False where
            the file does not allow it), match_count, host_ns and gpu_ns (time of the matches on the
            host, and of the GPU work launched in them; null where it is not checked), evidence
            (correlated: the recording shows it; inferred: concluded from the order of operators;
            null without matches), reason (why it is not checked), advice.
        matches: One row per match: pattern, event (its row), name, start_ns, duration_ns, gpu_ns,
            step, thread, evidence, detail (what was seen). Matches of different patterns may share
            time.
    """

    patterns: pl.DataFrame
    matches: pl.DataFrame


@cache_per_trace
def anti_patterns(trace: Trace) -> AntiPatterns:
    """Looks for each of the known anti-patterns, or reports why it cannot be checked."""
    host = build_host_event_index(trace)
    rows, matches = [], [MATCHES.to_frame()]
    for name, (rule, advice) in RULES.items():
        finding = rule(host)
        first, tree, events = finding.position.astype(np.int64), host.tree, host.trace.events
        last = first if finding.last is None else finding.last
        row, gpu = tree.row[first], host.gpu_ns[first]
        if finding.last is not None:  # of all siblings from the first to the last
            for index, (start_row, stop) in enumerate(
                zip(first.tolist(), tree.stop[last].tolist(), strict=True)
            ):
                event_row = int(tree.stop[start_row])
                while event_row < stop:
                    gpu[index] += host.gpu_ns[event_row]
                    event_row = int(tree.stop[event_row])
        duration_ns = tree.end_ns[last] - tree.start_ns[first]
        checked = finding.reason is None
        rows.append(
            {
                "pattern": name,
                "checked": checked,
                "match_count": first.size if checked else None,
                "host_ns": int(duration_ns.sum()) if checked else None,
                "gpu_ns": int(gpu.sum()) if checked else None,
                "evidence": finding.evidence if first.size else None,
                "reason": finding.reason,
                "advice": advice,
            }
        )
        if not first.size:
            continue
        matches.append(
            pl.DataFrame(
                {
                    "pattern": [name] * first.size,
                    "event": row,
                    "name": events["name"][row],
                    "start_ns": tree.start_ns[first],
                    "duration_ns": duration_ns,
                    "gpu_ns": gpu,
                    "step": events["step"][row],
                    "thread": events["thread"][row],
                    "evidence": [finding.evidence] * first.size,
                    "detail": list(finding.detail),
                },
                schema_overrides=MATCHES,
            )
        )
    return AntiPatterns(pl.DataFrame(rows, schema=PATTERNS), pl.concat(matches))
