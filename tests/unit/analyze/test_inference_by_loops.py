"""Random runs of inference servers against plain loops over their steps and their GPU work."""

from __future__ import annotations

import random
from statistics import mean, median
from typing import Any

import pytest

from support.odd_traces import covered
from traceloom.analyze import inference
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

US = 1_000
Row = dict[str, Any]


class Served:
    """A server that makes steps one after the other, each of which launches some work; times in ns."""

    def __init__(self, seed: int, *, rank: int = 0) -> None:
        chance = random.Random(seed)
        self.rank, self.steps, self.work, self.graphs = rank, list[Row](), list[Row](), 0
        at, correlation = 100, 0
        for number in range(25):
            kind = chance.choice(["prefill", "decode", "decode", "mixed", "idle"])
            requests = {"context": chance.randrange(1, 5), "generation": chance.randrange(1, 30)}
            if kind in ("prefill", "idle"):
                requests["generation"] = 0
            if kind in ("decode", "idle"):
                requests["context"] = 0
            tokens = {
                "context": requests["context"] * chance.randrange(1, 700),
                "generation": requests["generation"],
            }
            long = chance.randrange(20, 200)
            name = "execute_{}_context_{}({})_generation_{}({})".format(
                number,
                requests["context"],
                tokens["context"],
                requests["generation"],
                tokens["generation"],
            )
            self.steps.append(
                {
                    "kind": kind,
                    "name": name,
                    "at": at,
                    "end": at + long,
                    **tokens,
                    "requests": sum(requests.values()),
                    "generates": requests["generation"] > 0,
                }
            )
            for _ in range(chance.choice([0, 1, 3])):
                correlation += 1
                call = at + chance.randrange(long)
                graph = chance.random() < 0.4
                for _ in range(3 if graph else 1):
                    start = call + chance.randrange(1, 300)
                    self.work.append(
                        {
                            "step": number,
                            "call": call,
                            "start": start,
                            "end": start + chance.randrange(60),
                            "stream": chance.choice([7, 20]),
                            "correlation": correlation,
                            "graph": graph,
                        }
                    )
            at += long + chance.choice([0, 1, 50])

    def builder(self, order: random.Random | None = None) -> TraceBuilder:
        built = TraceBuilder(self.rank, 2)
        steps, work = list(self.steps), list(self.work)
        if order is not None:
            order.shuffle(steps)
            order.shuffle(work)
        for step in steps:
            built.annotation(step["name"], step["at"], step["end"] - step["at"])
        for correlation in dict.fromkeys(row["correlation"] for row in work):
            row = next(row for row in work if row["correlation"] == correlation)
            call = "cudaGraphLaunch" if row["graph"] else "cudaLaunchKernel"
            built.launch(call, row["call"], 0.5, correlation=correlation, thread=2)
        for row in work:
            where = {"stream": row["stream"], "correlation": row["correlation"]}
            built.kernel("k", row["start"], row["end"] - row["start"], **where)
        return built


def expected_steps(served: Served) -> list[Row]:
    """What is told of each step, by looking at all of the work for each."""
    rows = []
    ended: int | None = None  # of the last steps that generated
    for number, step in enumerate(served.steps):
        own = [row for row in served.work if row["step"] == number]
        end = max((row["end"] for row in own), default=None)
        done = step["end"] if end is None else end
        between = None
        if step["generates"]:
            between = None if ended is None else max(done - ended, 0)
            ended = done if ended is None else max(ended, done)
        rows.append(
            {
                "number": number,
                "kind": step["kind"],
                "requests": step["requests"],
                "context_tokens": step["context"],
                "generation_tokens": step["generation"],
                "start_ns": step["at"] * US,
                "duration_ns": (step["end"] - step["at"]) * US,
                "gpu_ns": covered([(row["start"], row["end"]) for row in own]) * US,
                "gpu_span_ns": None
                if end is None
                else (end - min(row["start"] for row in own)) * US,
                "work_count": len(own),
                "graph_work_count": sum(row["graph"] for row in own),
                "lag_ns": None if end is None else max(end - step["end"], 0) * US,
                "between_ns": None if between is None else between * US,
            }
        )
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_every_step_is_what_its_work_adds_up_to(seed: int) -> None:
    served = Served(seed)
    expected = expected_steps(served)
    steps = inference(served.builder().build()).steps
    assert steps.select(list(expected[0])).to_dicts() == expected
    shuffled = inference(served.builder(random.Random(seed)).build()).steps
    assert shuffled.drop("event").equals(steps.drop("event"))


@pytest.mark.parametrize("seed", range(8))
def test_the_mix_is_the_steps_of_each_kind(seed: int) -> None:
    served = Served(seed)
    steps = expected_steps(served)
    whole = sum(step["gpu_ns"] for step in steps)
    mix = inference(served.builder().build()).mix.to_dicts()
    assert {row["kind"] for row in mix} == {step["kind"] for step in steps}
    for row in mix:
        own = [step for step in steps if step["kind"] == row["kind"]]
        assert row["step_count"] == len(own)
        for name in ("duration_ns", "gpu_ns"):
            values = [step[name] for step in own]
            assert abs(row[f"mean_{name}"] - mean(values)) <= 1
            assert (row[f"min_{name}"], row[f"max_{name}"]) == (min(values), max(values))
        assert row["total_gpu_ns"] == sum(step["gpu_ns"] for step in own)
        assert row["gpu_fraction"] == pytest.approx(row["total_gpu_ns"] / whole)
        assert row["mean_requests"] == pytest.approx(mean(step["requests"] for step in own))
        assert row["generation_tokens"] == sum(step["generation_tokens"] for step in own)
        between = sorted(step["between_ns"] for step in own if step["between_ns"] is not None)
        if between:
            assert abs(row["between_median_ns"] - median(between)) <= 1
            assert row["between_max_ns"] == between[-1]
            assert row["between_p95_ns"] in between
            beyond = sum(value > row["between_p95_ns"] for value in between)
            assert beyond <= 0.05 * len(between) + 0.5
        else:
            assert (
                row["between_median_ns"] is row["between_p95_ns"] is row["between_max_ns"] is None
            )


@pytest.mark.parametrize("seed", range(4))
def test_rates_are_tokens_over_the_window_of_the_steps_and_their_work(seed: int) -> None:
    served = Served(seed)
    ends = [step["end"] for step in served.steps] + [row["end"] for row in served.work]
    window = (max(ends) - served.steps[0]["at"]) * US
    rates = inference(served.builder().build(), samples_per_step=3).rates.to_dicts()
    expected = {
        "generated tokens": (sum(step["generation"] for step in served.steps), "annotation"),
        "context tokens": (sum(step["context"] for step in served.steps), "annotation"),
        "samples": (3 * len(served.steps), "declared"),
    }
    assert {row["what"]: (row["count"], row["evidence"]) for row in rates} == expected
    for row in rates:
        assert row["window_ns"] == window
        assert row["per_second"] == pytest.approx(row["count"] * 1e9 / window)


def test_ranks_of_a_session_are_told_as_each_alone() -> None:
    traces = [Served(seed, rank=seed).builder().build() for seed in range(2)]
    together = inference(Session(tuple(traces), "served"))
    for name in ("steps", "mix", "rates"):
        alone = [getattr(inference(trace), name) for trace in traces]
        shown = getattr(together, name)
        assert shown["rank"].to_list() == [
            rank for rank, frame in enumerate(alone) for _ in range(frame.height)
        ]
        for rank, frame in enumerate(alone):
            assert shown.filter(rank=rank).equals(frame)
