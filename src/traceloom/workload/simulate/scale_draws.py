"""Monte Carlo evaluation of a scaled job: every point of one copy's graph is an array over draws
and copies.

The graph of one copy is traversed once in topological order. A point's time is an array (draws,
copies), so the programs of a thousand ranks take as many NumPy operations as that of one. Copies
meet at the rendezvous of their groups, where each gets the max over the copies of a span. Factors
are looked up in quantile tables by indices from one long row of random numbers, starting at a
random position for each node, so that drawing costs as much as reading.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.graph import graph as graph_schema
from traceloom.graph.graph import Graph, get_edge_points, sort_topologically
from traceloom.system.process import MIN_FREE_BYTES, require_memory
from traceloom.trace.array_types import Bools, Floats, Ints
from traceloom.workload.simulate.scale_replicas import ALL, QUANTILES, Replica, Variation

_BATCH_TIMES = 8_192  # times of a point that are processed at once, to stay in the CPU caches
_MAX_ERROR = 0.5  # of a mean: beyond it a normal distribution is meaningless
_POINTS_PER_CHECK = 1 << 10
_NUMBERS = 1 << 20  # length of the row of random numbers


@dataclass(frozen=True)
class DrawnJob:
    """The result of a scaled job in each draw.

    Attributes:
        steps: The steps, ascending.
        ends_ns: End of each step on all ranks, from the beginning of the window, shape (draws,
            steps).
        waiting_ns: Mean wait of a part at each meeting, shape (meetings,).
        excess_ns: Median time from the arrival of the last part with a recorded rank to that of the
            last of all, shape (meetings,).
        excess_spread_ns: Its standard deviation, shape (meetings,).
    """

    steps: Ints
    ends_ns: Floats
    waiting_ns: Floats
    excess_ns: Floats
    excess_spread_ns: Floats


@dataclass(frozen=True)
class TransferTimes:
    """The durations of the meetings of a job once all have arrived.

    Attributes:
        mean_ns: Of each meeting, shape (meetings,).
        spread: Factor on the deviations of its pool's factors from 1, shape (meetings,).
    """

    mean_ns: Floats
    spread: Floats


def can_end_a_step(graph: Graph) -> Bools:
    """Returns which nodes can be the last of a step: work of devices if there is any, else of
    threads that do not wait.
    """
    kinds = graph.lanes["kind"].cast(pl.String).gather(graph.nodes["lane"].fill_null(0))
    on_lane = graph.nodes["lane"].is_not_null()
    on_device = on_lane & (kinds == "device")
    idle = graph.nodes["kind"].cast(pl.String).is_in([graph_schema.THINK, graph_schema.WAIT])
    selected: Bools = (on_device if on_device.any() else on_lane & ~idle).to_numpy()
    return selected


class MonteCarlo:
    """The graph of one copy, prepared for many draws."""

    def __init__(self, replica: Replica, variation: Variation) -> None:
        graph = replica.graph
        self.replica, self.variation = replica, variation
        nodes = graph.nodes
        count = nodes.height
        source, target = get_edge_points(graph)
        self._order: list[int] = sort_topologically(count, source, target).tolist()
        target_order = np.argsort(target, kind="stable")
        self._edge: list[int] = target_order.tolist()
        self._first: list[int] = np.searchsorted(
            target[target_order], np.arange(2 * count + 1)
        ).tolist()
        self._source: list[int] = source.tolist()
        # Nodes of which a part passes before a successor may start.
        self._overlapped = set((source[~np.isnan(variation.part)] // 2).tolist())
        self._uses = np.bincount(source, minlength=2 * count)
        self._uses[0::2] += 1  # a node's end waits for its start
        start = nodes["start_ns"].to_numpy()
        # Nodes without dependencies start with the recording of their rank.
        position = nodes["rank"].fill_null(0).to_numpy().astype(np.int64)
        first = np.full(int(position.max(initial=0)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, position, start)
        self._roots: list[int] = (start - first[position]).tolist()
        self._began: list[int] = (first - first.min()).tolist()
        step = nodes["step"].fill_null(-1).to_numpy().astype(np.int64)
        self.steps = np.unique(step[step >= 0])
        self._step = np.searchsorted(self.steps, step)
        self._step[step < 0] = self.steps.size
        # Only the last work of a lane can end a step.
        lane = np.where(
            can_end_a_step(replica.graph), nodes["lane"].cast(int).fill_null(-1).to_numpy(), -1
        )
        order = np.lexsort((start + nodes["duration_ns"].to_numpy(), self._step, lane))
        last = np.append((np.diff(lane[order]) != 0) | (np.diff(self._step[order]) != 0), True)
        self._ends_step: Bools = np.zeros(count, dtype=np.bool_)
        self._ends_step[order[last]] = True
        self._ends_step &= (lane >= 0) & (self._step < self.steps.size)
        self._meeting = np.full(count, -1, dtype=np.int64)
        self._meeting[replica.meetings["node"].to_numpy()] = np.arange(replica.meetings.height)
        self._position: list[int] = position.tolist()
        self._stage = position // replica.axis.stride
        self._span: list[int] = replica.meetings["span"].to_list()
        seen_by_node = dict(
            zip(replica.parts["new"].to_list(), variation.seen.tolist(), strict=True)
        )
        self._seen: dict[int, int] = {
            2 * node: copy_count for node, copy_count in seen_by_node.items()
        }

    def run(
        self, copies: int, draws: int, seed: int, transfers: TransferTimes, *, varied: bool = True
    ) -> DrawnJob:
        """Draws the job with a given number of copies.

        Args:
            copies: Copies of the model.
            draws: Number of draws; 1 if nothing varies.
            seed: Random seed.
            transfers: Durations of the meetings.
            varied: Whether anything is drawn; else all copies are equal, and one represents them.
        """
        width = copies if varied else 1
        draws = draws if varied else 1
        batch = max(1, _BATCH_TIMES // width)
        random = np.random.default_rng(seed)
        numbers = (
            random.integers(0, QUANTILES, _NUMBERS + batch * width).astype(np.int16)
            if varied
            else None
        )
        batches = [
            self._batch(min(batch, draws - low), width, random, numbers, transfers)
            for low in range(0, draws, batch)
        ]
        step_ends, *means = zip(*batches, strict=True)
        weight = np.array([len(part) for part in step_ends]) / draws
        return DrawnJob(
            self.steps,
            np.concatenate(step_ends),
            *(np.tensordot(weight, np.array(mean), 1) for mean in means),
        )

    def _batch(
        self,
        draws: int,
        copies: int,
        random: np.random.Generator,
        numbers: NDArray[Any] | None,
        transfer_times: TransferTimes,
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Returns the ends of the steps, (draws, steps); waiting, excess and its spread of the
        meetings.
        """
        variation = self.variation
        shape, size = (draws, copies), draws * copies
        offsets: Any = iter(
            random.integers(0, _NUMBERS, self._uses.size + len(self._edge)).tolist()
        )
        effects = self._effects(random, shape) if numbers is not None else None
        if numbers is None:
            start_times = [np.full(shape, float(began)) for began in self._began]
        else:
            stages = [index // self.replica.axis.stride for index in range(len(self._began))]
            start_times = [
                random.choice(variation.starts_ns[stage], shape).astype(np.float64)
                for stage in stages
            ]
        times: list[Any] = [None] * self._uses.size
        remaining = self._uses.tolist()
        step_ends = np.zeros((draws, self.steps.size))
        meeting_stats = np.zeros((3, len(self._span)))
        work, work_pool, side = (
            variation.work_ns.tolist(),
            variation.work_pool.tolist(),
            variation.side.tolist(),
        )
        spreads = np.append(variation.pools.std(axis=1), 0.0)
        error = np.minimum(
            spreads[variation.work_pool] / np.sqrt(variation.work_samples), _MAX_ERROR
        ).tolist()
        delay, delay_pool, part = (
            variation.delay_ns.tolist(),
            variation.delay_pool.tolist(),
            variation.part.tolist(),
        )
        transfers = self._transferred(
            random, draws, copies, transfer_times, varied=numbers is not None
        )
        pools = variation.pools
        taken_by: dict[int, Any] = {}

        def drawn(pool: int) -> Floats:
            index = next(offsets)
            assert numbers is not None
            factors: Floats = pools[pool].take(numbers[index : index + size]).reshape(shape)
            return factors

        for number, point in enumerate(self._order):
            if not number % _POINTS_PER_CHECK:
                require_memory(
                    MIN_FREE_BYTES, f"draws of {copies:,} copies need", "ask for fewer ranks"
                )
            node, is_end = divmod(point, 2)
            latest: Any = None
            if is_end:
                mean_work = work[node]
                if mean_work:
                    duration: Any = mean_work
                    if numbers is not None and work_pool[node] >= 0:
                        # Draw the error of the mean itself, which is the same for all copies.
                        duration = drawn(work_pool[node])
                        duration *= mean_work * np.maximum(
                            1 + error[node] * random.standard_normal((draws, 1)), 0.0
                        )
                    if (
                        effects is not None
                        and side[node] >= 0
                        and self._step[node] < self.steps.size
                    ):
                        duration = (
                            duration * effects[self._stage[node]][side[node], self._step[node]]
                        )
                    latest = times[point - 1] + duration
                    if node in self._overlapped:
                        taken_by[node] = duration
                else:
                    latest = times[point - 1]
                remaining[point - 1] -= 1
            meeting = self._meeting[node]
            if meeting >= 0 and not is_end:
                latest = self._meet(point, meeting, times, remaining, meeting_stats[:, meeting])
            else:
                for edge in self._edge[self._first[point] : self._first[point + 1]]:
                    source = self._source[edge]
                    source_node = source // 2
                    if self._meeting[source_node] >= 0:
                        late = times[source] + transfers[self._meeting[source_node]]
                    elif part[edge] == part[edge]:
                        late = times[source] + part[edge] * taken_by.get(
                            source_node, work[source_node]
                        )
                    elif numbers is not None and delay_pool[edge] >= 0:
                        late = drawn(delay_pool[edge])
                        late += delay[edge]
                        late += times[source]
                    else:
                        late = times[source] + delay[edge] if delay[edge] else times[source]
                    latest = late if latest is None else np.maximum(latest, late)
                    remaining[source] -= 1
                    if not remaining[source]:
                        times[source] = None
            if latest is None:
                latest = start_times[self._position[node]] + float(self._roots[node])
            if is_end:
                if self._ends_step[node]:
                    column = step_ends[:, self._step[node]]
                    np.maximum(column, latest.max(axis=1), out=column)
                if not remaining[point - 1]:
                    times[point - 1] = None
            times[point] = latest if remaining[point] else None
        return np.maximum.accumulate(step_ends, axis=1), *meeting_stats

    def _meet(
        self,
        point: int,
        meeting: int,
        times: list[Any],
        remaining: list[int],
        meeting_stats: Floats,
    ) -> Floats:
        """Returns the arrival of the last part, for each draw and copy; writes waiting, excess and
        its spread to `meeting_stats`.
        """
        span = self._span[meeting]
        sources = [
            self._source[edge] for edge in self._edge[self._first[point] : self._first[point + 1]]
        ]
        arrivals = [times[source] for source in sources]
        latest = arrivals[0] if len(arrivals) == 1 else np.maximum.reduce(arrivals)
        copies = latest.shape[1]
        if span == ALL:
            last_arrival = latest.max(axis=1, keepdims=True)
        elif span > 1 and copies > 1:
            blocks = latest.reshape(len(latest), copies // span, span).max(axis=2)
            last_arrival = np.repeat(blocks, span, axis=1)
        else:
            last_arrival = latest
        meeting_stats[0] = np.mean([np.mean(last_arrival - arrival) for arrival in arrivals])
        recorded = [
            arrival[:, : self._seen[source] if span == ALL else min(span, self._seen[source])].max(
                axis=1
            )
            for source, arrival in zip(sources, arrivals, strict=True)
            if self._seen.get(source)
        ]
        if recorded:
            last = recorded[0] if len(recorded) == 1 else np.maximum.reduce(recorded)
            later = last_arrival[:, 0] - last
            meeting_stats[1:] = np.median(later), np.std(later)
        for source in sources:
            remaining[source] -= 1
            if not remaining[source]:
                times[source] = None
        return np.broadcast_to(last_arrival, latest.shape)

    def _effects(self, random: np.random.Generator, shape: tuple[int, int]) -> dict[int, Any]:
        """Draws steps, common to all ranks. Returns, by stage, factors of host and device work, (2,
        steps, draws, copies).
        """
        draws, copies = shape
        recorded = self.variation.steps.size
        steps = random.integers(0, max(recorded, 1), (draws, self.steps.size))
        out: dict[int, Any] = {}
        for stage in np.unique(self._stage).tolist():
            table = self.variation.effects.get(stage, np.ones((2, 1, max(recorded, 1))))
            ranks = random.integers(0, table.shape[1], (draws, copies))
            out[stage] = np.moveaxis(table[:, ranks[:, :, None], steps[:, None, :]], 3, 1)
        return out

    def _transferred(
        self,
        random: np.random.Generator,
        draws: int,
        copies: int,
        transfer_times: TransferTimes,
        *,
        varied: bool,
    ) -> list[Any]:
        """Returns the transfer of each meeting, the same for all its parts, (draws, copies) or
        (draws, 1).
        """
        out: list[Any] = []
        variation = self.variation
        columns = (
            variation.transfer_pool,
            transfer_times.mean_ns,
            transfer_times.spread,
            variation.transfer_samples,
        )
        rows = zip(*(column.tolist() for column in columns), self._span, strict=True)
        for pool, transfer, spread, samples, span in rows:
            if not varied or pool < 0:
                out.append(transfer)
                continue
            meeting_count = 1 if span == ALL else -(-copies // span)
            quantiles = 1 + spread * (variation.pools[pool] - 1)
            factor = quantiles.take(random.integers(0, QUANTILES, (draws, meeting_count)))
            factor *= 1 + quantiles.std() / samples**0.5 * random.standard_normal((draws, 1))
            out.append(
                transfer * np.maximum(np.repeat(factor, max(span, 1), axis=1)[:, :copies], 0.0)
            )
        return out
