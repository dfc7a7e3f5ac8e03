"""Dry run of a plan on meta tensors: which ops this PyTorch has, whether their outputs match the
recording, and the memory they need.

Meta tensors have shapes but no content, so a dry run takes seconds, however long the ops take, and
needs no accelerator. Each op is called with tensors of the recorded geometries rather than with the
outputs of previous ops, so that one difference is not reported again for all later ops. Outputs
that depend on contents (the length of `nonzero`) cannot be checked.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from traceloom.workload.replay.binding import (
    RECORD_STREAM,
    BindError,
    BoundCall,
    bind_call,
    require_torch,
)
from traceloom.workload.replay.kernels import KERNEL_REASONS
from traceloom.workload.replay.plan import (
    COLLECTIVE,
    GUESSED_STRIDES,
    STAND_IN,
    VIEW,
    WAIT,
    RankPlan,
    ReplayPlan,
)
from traceloom.workload.replay.script import flatten_values

if TYPE_CHECKING:
    import torch

_SMALL_BYTES = 64 << 20
META, CPU = "meta", "cpu"
DATA_DEPENDENT = "data-dependent"
NO_META_KERNEL = "no-meta-kernel"
FAILS = "fails"
# Composite ops that read contents end in one of these; the others are tagged.
_READS_CONTENTS = re.compile(r"\.item\(\)|nonzero|repeat_interleave")
_FAILING_OP = re.compile(r"\baten::(\w+)")


class LeftOp(Struct, frozen=True):
    """Ops of one name that the dry run could not check, or that cannot be run.

    Attributes:
        name: The op.
        reason: `data-dependent` and `no-meta-kernel`: the recorded shapes are assumed correct;
            `fails`: the op rejects the recorded arguments; else why it will not run: a slug of
            `BindError` or of the plan.
        text: The reason in words, for the first of them.
        count: Number of ops.
        duration_ns: Their total recorded duration; None if unknown.
    """

    name: str
    reason: str
    text: str
    count: int
    duration_ns: int | None


class WrongOutput(Struct, frozen=True):
    """An output tensor that differs from the recording.

    Attributes:
        op: The first such op: row of the plan's `ops`.
        node: Its id in the host trace.
        name: Its name.
        output: Index of the output.
        recorded: Type, shape and strides as recorded; strides of a dimension of length 1 are
            ignored.
        here: Those of the actual output; empty if there is none.
        count: Number of ops with these tensors.
    """

    op: int
    node: int | None
    name: str
    output: int
    recorded: str
    here: str
    count: int


class RankDryRun(Struct, frozen=True):
    """The dry run of one rank.

    Attributes:
        rank: The rank.
        ops: Number of ops, in the plan or left out, except for views that the plan adds.
        covered: Number of ops that a replay runs.
        looked_at: Number of ops whose outputs were compared with the recorded ones.
        duration_ns: Total recorded duration of the ops; None if unknown.
        covered_ns: Recorded duration of the ops that a replay runs.
        left: Ops that were not compared, or do not run, by name and reason; longest total time
            first.
        wrong: Outputs that differ from the recording.
        refused: Nodes of the ops that fail.
        peak_bytes: Peak bytes of live storages, by recorded device.
    """

    rank: int
    ops: int
    covered: int
    looked_at: int
    duration_ns: int | None
    covered_ns: int | None
    left: tuple[LeftOp, ...]
    wrong: tuple[WrongOutput, ...]
    refused: tuple[int, ...]
    peak_bytes: dict[str, int]

    @property
    def fits(self) -> bool:
        """Whether all outputs that could be checked match the recording."""
        return not self.wrong and not any(skipped.reason == FAILS for skipped in self.left)


def dry_run(plan: ReplayPlan, *, imports: Sequence[str] = ()) -> dict[int, RankDryRun]:
    """Runs all ranks of a plan on meta tensors.

    Args:
        plan: The plan.
        imports: Modules that define custom ops.

    Returns:
        The results by rank.

    Raises:
        InputError: `no-torch`.
        UsageError: `no-such-module`.
    """
    require_torch()
    from traceloom.workload.replay.running import import_custom_ops

    extra_namespaces = import_custom_ops(imports, plan)
    guessed = {notice.rank for notice in plan.notices if notice.slug == GUESSED_STRIDES}
    return {
        rank: dry_run_rank(
            rank_plan,
            strides=rank not in guessed,
            recorded=plan.torch,
            extra_namespaces=extra_namespaces,
        )
        for rank, rank_plan in plan.ranks.items()
    }


def dry_run_rank(
    plan: RankPlan,
    *,
    strides: bool = True,
    recorded: str | None = None,
    extra_namespaces: frozenset[str] = frozenset(),
) -> RankDryRun:
    """Runs the ops of one rank on meta tensors.

    Args:
        plan: The plan.
        strides: Whether strides were recorded.
        recorded: Version of PyTorch that ran the workload.
        extra_namespaces: Additional allowed namespaces; see `traceloom.workload.replay.schema`.
    """
    ops = plan.ops.filter(pl.col("action") != VIEW).with_columns(
        pl.col("durations_ns").list.median().alias("duration_ns")
    )
    outcomes = _Outcomes(plan, strides=strides, recorded=recorded, further=extra_namespaces)
    reasons = [outcomes.of(row) for row in ops.iter_rows(named=True)]
    op_outcomes = pl.DataFrame(
        {"name": ops["name"], "duration_ns": ops["duration_ns"], "outcome": reasons},
        schema_overrides={"outcome": pl.List(pl.String)},
    ).select(
        "name",
        "duration_ns",
        reason=pl.col("outcome").list.get(0, null_on_oob=True),
        text=pl.col("outcome").list.get(1, null_on_oob=True),
        covered=pl.col("outcome")
        .list.get(0, null_on_oob=True)
        .is_in([DATA_DEPENDENT, NO_META_KERNEL, FAILS])
        .fill_null(value=True),
    )
    out = plan.omitted.select(
        "name",
        pl.col("duration_ns").cast(pl.Float64),
        "reason",
        "text",
        covered=pl.lit(value=False),
    )
    all_ops = pl.concat([op_outcomes, out])
    skipped = (
        all_ops.filter(pl.col("reason").is_not_null())
        .group_by("name", "reason", maintain_order=True)
        .agg(
            pl.col("text").first(),
            pl.len().alias("count"),
            pl.when(pl.col("duration_ns").is_not_null().any()).then(
                pl.col("duration_ns").sum().round().cast(pl.Int64)
            ),
        )
        .sort("duration_ns", "count", descending=True, nulls_last=True, maintain_order=True)
    )
    has_times = all_ops["duration_ns"].is_not_null().any()
    return RankDryRun(
        rank=plan.rank,
        ops=all_ops.height,
        covered=int(all_ops["covered"].sum()),
        looked_at=outcomes.looked_at,
        duration_ns=round(all_ops["duration_ns"].sum()) if has_times else None,
        covered_ns=round(all_ops.filter("covered")["duration_ns"].sum()) if has_times else None,
        left=tuple(LeftOp(*row) for row in skipped.iter_rows()),
        wrong=tuple(outcomes.wrong_outputs()),
        refused=tuple(ops.filter(op_outcomes["reason"] == FAILS)["node"].drop_nulls()),
        peak_bytes={
            str(device): plan.peak_bytes(storages)
            for (device,), storages in plan.storages.group_by("device", maintain_order=True)
        },
    )


# Why an op could not be called (slug, text), None if it could; and its outputs that differ from
# the recording.
_Compared = tuple[tuple[str, str] | None, list[WrongOutput]]


class _Outcomes:
    """The outcome of each op, computed once for all equal calls with tensors of equal
    geometries.
    """

    def __init__(
        self, plan: RankPlan, *, strides: bool, recorded: str | None, further: frozenset[str]
    ) -> None:
        self.plan = plan
        self.looked_at = 0
        self._strides = strides
        self._recorded, self._further = recorded, further
        self._kernels = set(plan.kernels["call"])
        geometry = plan.tensors.select("shape", "strides", "offset", "dtype").with_columns(
            plan.storages["bytes"].gather(plan.tensors["storage"])
        )
        self._geometries = geometry.rows()
        self._alike = geometry.select(pl.struct(pl.all()).rank("dense")).to_series().to_list()
        self._bound: dict[tuple[int, str], BoundCall | tuple[str, str]] = {}
        self._outcome: dict[Any, tuple[str, str] | None] = {}
        self._wrong: dict[Any, list[WrongOutput]] = {}
        self._calls: Counter[Any] = Counter()

    def of(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """Returns why an op is not checked or not run; None if its outputs match, or there are
        none.
        """
        call = row["call"]
        if row["action"] in {COLLECTIVE, WAIT} or row["name"] == RECORD_STREAM:
            return None
        if call is None or call in self._kernels:
            reason = row["reason"] or STAND_IN
            return reason, KERNEL_REASONS.get(reason, "a stand-in takes its time")
        bound = self._bind(call, META)  # also for a stand-in: a module of --import may define it
        if isinstance(bound, tuple):
            return bound
        geometries = [
            None if tensor is None else self._alike[tensor]
            for tensor in (*row["inputs"], *row["outputs"])
        ]
        key = call, *geometries
        self._calls[key] += 1
        if key not in self._outcome:
            self._outcome[key], self._wrong[key] = self._compared(row)
        self.looked_at += self._outcome[key] is None
        return self._outcome[key]

    def _compared(self, row: Mapping[str, Any]) -> _Compared:
        """Calls an op on meta tensors; if the outputs differ, tries fake tensors as on the CPU.

        Fake tensors know more than meta kernels (strides of a channels-last convolution) but are
        slower. If they fail too, the op is called on tensors of zeros, provided these are small.
        """
        from torch._subclasses import fake_tensor

        compared = self._call(row, META)
        if _get_trust_order(compared) > 1:
            fake_tensor.log.disabled = True  # it prints a traceback of what `_call` reports
            with fake_tensor.FakeTensorMode(allow_fallback_kernels=False):
                compared = min(compared, self._call(row, CPU), key=_get_trust_order)
            fake_tensor.log.disabled = False
        tensors = [*row["inputs"], *(output for output in row["outputs"] if output is not None)]
        if (
            _get_trust_order(compared) > 1
            and sum(self._geometries[tensor][-1] for tensor in tensors) <= _SMALL_BYTES
        ):
            on_zeros = self._call(
                row, CPU
            )  # may be invalid contents: only a correct output is conclusive
            compared = compared if _get_trust_order(on_zeros) else on_zeros
        return compared

    def _call(self, row: Mapping[str, Any], device: str) -> _Compared:
        import torch

        bound = self._bind(row["call"], device)
        if isinstance(bound, tuple):
            return bound, []
        inputs = []
        try:
            for tensor in row["inputs"]:
                shape, strides, offset, name, size = self._geometries[tensor]
                kind: torch.dtype = getattr(torch, name)
                storage = torch.zeros(-(-size // kind.itemsize), dtype=kind, device=device)
                inputs.append(storage.as_strided(shape, strides, offset))
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values = list(flatten_values(bound(inputs)))
        except Exception as error:  # noqa: BLE001  (any op may raise anything; it is reported)
            return self._why(row["call"], error), []
        wrong = []
        for number, tensor in enumerate(row["outputs"]):
            if tensor is None:
                continue
            shape, strides, _, dtype, _ = self._geometries[tensor]
            recorded, actual = self._in_words(dtype, shape, strides), ""
            value = values[number] if number < len(values) else None
            if isinstance(value, torch.Tensor):
                actual = self._in_words(
                    str(value.dtype).removeprefix("torch."), value.shape, value.stride()
                )
            if recorded != actual:
                wrong.append(
                    WrongOutput(row["op"], row["node"], row["name"], number, recorded, actual, 0)
                )
        return None, wrong

    def wrong_outputs(self) -> Iterator[WrongOutput]:
        """Yields outputs that differ from the recording, with the number of ops."""
        for key, outputs in self._wrong.items():
            for wrong in outputs:
                yield replace(wrong, count=self._calls[key])

    def _bind(self, call: int, device: str) -> BoundCall | tuple[str, str]:
        if (call, device) not in self._bound:
            schema, arguments = self.plan.calls.select("schema", "arguments").row(call)
            try:
                bound = bind_call(
                    schema,
                    arguments,
                    device,
                    recorded_torch=self._recorded,
                    allowed_namespaces=self._further,
                )
                self._bound[call, device] = bound
            except BindError as error:
                self._bound[call, device] = error.slug, error.text
        return self._bound[call, device]

    def _in_words(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> str:
        """Returns type, shape and significant strides: `float32[8, 1, 4] by [4, -, 1]`."""
        base_text = f"{dtype}[{', '.join(map(str, shape))}]"
        if not self._strides or 0 in shape:
            return base_text
        stride_texts = (
            str(stride) if length > 1 else "-"
            for length, stride in zip(shape, strides, strict=True)
        )
        return f"{base_text} by [{', '.join(stride_texts)}]"

    def _why(self, call: int, error: Exception) -> tuple[str, str]:
        """Returns the reason why an op could not be run without contents."""
        import torch
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        )

        text = (str(error).strip() or type(error).__name__).split("\n")[0][:300]
        names = {
            self.plan.calls["schema"][call].partition("(")[0].partition("::")[2].partition(".")[0]
        }
        names |= set(_FAILING_OP.findall(text))
        overloads = [
            getattr(packet, overload)
            for name in names
            if (packet := getattr(torch.ops.aten, name, None))
            for overload in packet.overloads()
        ]
        tags = {tag for overload in overloads for tag in overload.tags}
        if (
            isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
            or tags & {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
            or _READS_CONTENTS.search(text)
        ):
            return (
                DATA_DEPENDENT,
                "what it gives depends on contents, which meta tensors do not have",
            )
        if (
            isinstance(error, NotImplementedError | UnsupportedOperatorException)
            or "meta" in text.lower()
        ):
            return NO_META_KERNEL, "PyTorch has no kernel of it for meta tensors"
        return FAILS, text


def _get_trust_order(compared: _Compared) -> int:
    """Returns 0 for an op whose outputs match; larger numbers for less conclusive results."""
    refusal, wrong = compared
    reason = ("" if wrong else None) if refusal is None else refusal[0]
    order = (None, DATA_DEPENDENT, "", NO_META_KERNEL)
    return (
        order.index(reason) if reason in order else len(order)
    )  # it fails, or the device lacks the op
