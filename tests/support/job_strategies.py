"""Hypothesis strategies for random jobs; needs the package `hypothesis`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from support.jobs import (
    Clock,
    Fault,
    LateHost,
    ParallelRecipe,
    Recipe,
    SlowLink,
    SlowRank,
    StragglingStep,
    TokenImbalance,
)

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn


@st.composite
def training_recipes(draw: DrawFn) -> Recipe:
    """Data-parallel, sharded or pipelined training jobs of up to three ranks."""
    ranks = draw(st.integers(1, 3))
    sharded = ranks > 1 and draw(st.booleans())
    return Recipe(
        steps=draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 4)),
        kernel_us=draw(st.sampled_from([2, 20, 150])),
        op_us=draw(st.sampled_from([2, 12, 40])),
        think_us=draw(st.sampled_from([5, 200])),
        item=draw(st.booleans()),
        sync=draw(st.sampled_from(["", "device", "stream", "event"])),
        pageable_input=draw(st.booleans()),
        side_stream=draw(st.booleans()),
        autograd=draw(st.booleans()),
        loader_us=draw(st.sampled_from([0, 400])),
        ranks=ranks,
        sharded=sharded,
        pipeline=ranks > 1 and not sharded and draw(st.booleans()),
        delay_us={0: 800} if draw(st.booleans()) else {},
        clocks={2: Clock("host1", draw(st.integers(-(10**6), 10**6)))},
        queue_limit=draw(st.sampled_from([2, 1022])),
        spread=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def faults(draw: DrawFn, ranks: int, steps: int) -> tuple[Fault, ...]:
    """Up to two different faults."""
    rank, step = draw(st.integers(0, ranks - 1)), draw(st.integers(0, steps - 1))
    return tuple(
        draw(
            st.lists(
                st.sampled_from(
                    [
                        SlowRank(rank, 1.5),
                        LateHost(rank, 3000, steps=(step,)),
                        StragglingStep(step, 2.0),
                        SlowLink(3.0),
                        TokenImbalance((2, 1)),
                    ]
                ),
                max_size=2,
                unique=True,
            )
        )
    )


@st.composite
def parallel_recipes(draw: DrawFn, /, **fixed: Any) -> ParallelRecipe:
    """Jobs with data, tensor, pipeline and expert parallelism; what is given is fixed."""
    data, tensor, pipeline = draw(
        st.sampled_from([(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 3), (2, 1, 2), (1, 2, 2)])
    )
    steps = draw(st.integers(1, 3))
    return ParallelRecipe(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        expert=draw(st.sampled_from([1, data])),
        steps=steps,
        layers=draw(st.integers(1, 2)),
        microbatches=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        sharded=draw(st.booleans()),
        kernel_us=draw(st.sampled_from([10, 60])),
        item=draw(st.booleans()),
        autograd=draw(st.booleans()),
        graphs=draw(st.booleans()),
        stacks=draw(st.booleans()),
        ranks_per_host=2,
        faults=draw(faults(data * tensor * pipeline, steps)),
        seed=draw(st.integers(0, 100)),
        **{
            "programmatic": draw(st.booleans()),
            "clocks": {1: (draw(st.integers(-(10**6), 10**6)), 0.0)},
            **fixed,
        },
    )
