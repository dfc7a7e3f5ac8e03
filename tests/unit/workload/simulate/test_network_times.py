"""Times over a network: hand-worked cases, closed forms, progressive filling done in fractions, and bounds that hold always."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from support.flows import Flows, fair_shares, sent_one_by_one
from traceloom.errors import UsageError
from traceloom.workload.collective_algorithms import ALGORITHMS, KINDS_BY_ALGORITHM, build_schedule
from traceloom.workload.simulate.machine import Dimension, Machine, Nic, SpeedFactor, Wire
from traceloom.workload.simulate.network import LinkUse, MachineNetwork, finish_times

SWITCH = Dimension("switch", 8, 50.0, 500.0)


def ends(
    machine: Machine, kind: str, algorithm: str, size: int, ready: list[float] | None = None
) -> list[float]:
    ranks = machine.ranks
    times = finish_times(
        build_schedule(kind, algorithm, ranks, size),
        MachineNetwork(machine),
        np.arange(ranks),
        np.zeros(ranks) if ready is None else np.array(ready),
    )
    return times.tolist()


@pytest.mark.parametrize("topology", ["ring", "switch", "fully-connected"])
def test_a_ring_all_reduce_takes_its_closed_form(topology: str) -> None:
    hops = 2 if topology == "switch" else 1
    machine = Machine((Dimension(topology, 8, 50.0, 500.0),))  # type: ignore[arg-type]
    size = 1 << 23
    expected = 14 * (hops * 500.0 + size / 8 / 50.0)
    assert ends(machine, "all_reduce", "ring", size) == pytest.approx([expected] * 8)


def test_direct_messages_share_the_port_of_their_rank() -> None:
    size = 1 << 23
    in_one_round = 7 * size / 8 / 50.0 + 1000.0
    assert ends(Machine((SWITCH,)), "all_gather", "direct", size // 8) == pytest.approx(
        [in_one_round] * 8
    )
    alone = size / 8 / 50.0 + 500.0
    connected = Machine((Dimension("fully-connected", 8, 50.0, 500.0),))
    assert ends(connected, "all_gather", "direct", size // 8) == pytest.approx([alone] * 8)
    limited = Machine(connected.dimensions, nic=Nic(50.0, "all"))
    assert ends(limited, "all_gather", "direct", size // 8) == pytest.approx(
        [in_one_round - 500.0] * 8
    )


def test_halving_doubling_on_a_ring_shares_links() -> None:
    # Distance 1, then 2: two messages on every link upwards and downwards alike; sizes S/2, S/4.
    machine = Machine((Dimension("ring", 4, 1.0, 10.0),))
    first, second = 400 + 10, 2 * 200 + 2 * 10
    assert ends(machine, "reduce_scatter", "halving-doubling", 800) == pytest.approx(
        [first + second] * 4
    )


def test_reductions_take_time() -> None:
    machine = Machine((Dimension("ring", 4, 1.0, 0.0),))
    times = finish_times(
        build_schedule("all_reduce", "ring", 4, 400),
        MachineNetwork(machine),
        np.arange(4),
        np.zeros(4),
        reduction_ns_per_byte=0.5,
    )
    assert times.tolist() == pytest.approx([6 * 100 + 3 * 50] * 4)


def test_a_late_rank_makes_the_others_wait_for_what_it_sends() -> None:
    machine = Machine((Dimension("ring", 4, 1.0, 0.0),))
    # 3 rounds of 100 ns from when rank 2 is there; rank 1, before it, hears of it last.
    times = ends(machine, "all_gather", "ring", 100, [0, 0, 1000, 0])
    assert times[1] == pytest.approx(1300)
    assert max(times) == pytest.approx(1300)
    assert times[3] == pytest.approx(1100 + 200)


def test_links_used_in_one_round_after_the_other_do_not_overlap() -> None:
    # Rank 0 sends 100 bytes twice; what it awaits in between arrived long ago.
    machine = Machine((Dimension("ring", 3, 1.0, 0.0),))
    times = ends(machine, "all_gather", "ring", 100, [500, 0, 0])
    assert times[0] == pytest.approx(700)


def test_messages_apart_in_time_do_not_share_a_link() -> None:
    machine = Machine((Dimension("switch", 4, 1.0, 0.0),))
    assert ends(machine, "gather", "direct", 400, [0, 0, 50, 1000]) == pytest.approx(
        [1100, 200, 200, 1100]
    )


def test_a_slow_link_slows_the_ring() -> None:
    machine = Machine((Dimension("ring", 4, 1.0, 0.0),), slow=(SpeedFactor((3,), network=0.5),))
    assert max(ends(machine, "all_gather", "ring", 100)) == pytest.approx(600)


def test_fair_shares_by_hand() -> None:
    # Flows A over links 0 and 1, B over 0, C over 1, D over 1: link 1 gives a third each, B takes what is left of 0.
    rates, limits = fair_shares(
        np.array([0, 1, 0, 1, 1]), np.array([0, 0, 1, 2, 3]), 4, np.array([10.0, 6.0])
    )
    assert rates.tolist() == [2.0, 8.0, 2.0, 2.0]
    assert limits.tolist() == [1, 0, 1, 1]


def test_flows_by_hand() -> None:
    # Rank 0 sends 400 bytes to 1 and 100 to 2 over a port of 1 B/ns: half each till 200, then all for the first.
    network = MachineNetwork(Machine((Dimension("switch", 3, 1.0, 5.0),)))
    flows = Flows(network)
    assert flows.next_ns == np.inf
    flows.add(0.0, np.array([0, 0]), np.array([1, 2]), np.array([400, 100]))
    ended, arrived = flows.advance(300.0)
    assert (ended.tolist(), arrived.tolist(), flows.now_ns) == ([1], [210.0], 300.0)
    later = flows.add(400.0, 2, 1, 60)  # shares the port into rank 1 from 400 on
    ended, arrived = flows.advance(np.inf)
    assert (ended.tolist(), arrived.tolist()) == ([int(later[0]), 0], [530.0, 570.0])
    use = flows.use.frame()
    rank_0 = use.filter(use["source"] == "rank 0").row(0, named=True)
    assert (rank_0["bytes"], rank_0["busy_ns"], rank_0["waiting_ns"]) == (500, 560, 100 + 100)
    into_1 = use.filter(use["target"] == "rank 1").row(0, named=True)
    assert (into_1["bytes"], into_1["busy_ns"], into_1["waiting_ns"]) == (460, 560, 60 + 60)
    with pytest.raises(UsageError, match="a flow starts at"):
        flows.add(500.0, 0, 1, 1)


def test_a_flow_to_itself_or_without_bytes_takes_no_time() -> None:
    flows = Flows(MachineNetwork(Machine((SWITCH,))))
    flows.add(7.0, np.array([1, 1]), np.array([1, 2]), np.array([100, 0]))
    ended, arrived = flows.advance(np.inf)
    assert (ended.tolist(), arrived.tolist()) == ([0, 1], [7.0, 1007.0])


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    inner = draw(
        st.sampled_from(
            [
                Dimension("ring", 4, 3.0, 7.0),
                Dimension("switch", 4, 2.0, 3.0),
                Dimension("mesh", 4, 1.0, 1.0, shape=(2, 2)),
                Dimension("fully-connected", 4, 1.0),
                Dimension(
                    "links",
                    4,
                    2.0,
                    links=(Wire(0, 4), Wire(4, 1, 1.0), Wire(4, 5), Wire(2, 5), Wire(3, 5)),
                ),
            ]
        )
    )
    outer = draw(
        st.sampled_from(
            [
                Dimension("switch", 2, 0.5, 11.0),
                Dimension("switch", 2, 1.5, shared=True),
                Dimension("fat-tree", 2, 1.0, radix=1, oversubscription=2.0),
            ]
        )
    )
    nic = draw(st.sampled_from([None, Nic(0.75), Nic(0.6, "all")]))
    slow = draw(st.sampled_from([(), (SpeedFactor((3,), network=0.25),)]))
    order = draw(st.sampled_from([(), (7, 6, 5, 4, 3, 2, 1, 0)]))
    return Machine((inner, outer), nic=nic, slow=slow, order=order)


FLOW = st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 1000), st.integers(0, 500))


def filled(ways: list[list[int]], bandwidth: list[Fraction]) -> list[Fraction]:
    """Progressive filling in fractions: all rates grow together until a link is full."""
    rates = [Fraction(0)] * len(ways)
    growing = {flow for flow, links in enumerate(ways) if links}
    while growing:
        users = {
            link: [flow for flow in growing if link in ways[flow]] for link in range(len(bandwidth))
        }
        rests = {
            link: (
                bandwidth[link]
                - sum(rates[flow] for flow, links in enumerate(ways) if link in links)
            )
            / len(on)
            for link, on in users.items()
            if on
        }
        step = min(rests.values())
        for flow in growing:
            rates[flow] += step
        for link, rest in rests.items():
            if rest == step:
                growing -= set(users[link])
    return rates


@given(
    st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=8
    ),
    st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=6, max_size=6),
)
def test_shares_are_those_of_progressive_filling(
    ways: list[list[int]], bandwidth: list[int]
) -> None:
    links = np.concatenate([np.array(way) for way in ways])
    flow = np.repeat(np.arange(len(ways)), [len(way) for way in ways])
    rates, limits = fair_shares(links, flow, len(ways), np.array(bandwidth, dtype=np.float64))
    assert rates.tolist() == pytest.approx(
        [float(rate) for rate in filled(ways, [Fraction(b) for b in bandwidth])]
    )
    assert all(limit in way for limit, way in zip(limits.tolist(), ways, strict=True))


@given(machines(), st.lists(FLOW, min_size=1, max_size=8))
def test_flows_are_those_of_progressive_filling_over_time(
    machine: Machine, wanted: list[tuple[int, int, int, int]]
) -> None:
    network = MachineNetwork(machine)
    ways, left, start = [], [], []
    for source, target, size, begin in wanted:
        ways.append(network.routes(np.array([source]), np.array([target])).links.tolist())
        left.append(Fraction(size))
        start.append(Fraction(begin))
    bandwidth = [Fraction(rate) for rate in network.bandwidth.tolist()]
    used = sorted({link for way in ways for link in way})
    compact = [[used.index(link) for link in way] for way in ways]
    end: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(end) < len(ways):
        active = [flow for flow in range(len(ways)) if flow not in end and start[flow] <= now]
        rates = dict(
            zip(
                active,
                filled([compact[flow] for flow in active], [bandwidth[link] for link in used]),
                strict=True,
            )
        )
        for flow in active:
            if not left[flow] or not ways[flow]:
                end[flow] = now
        steps = [left[flow] / rates[flow] for flow in active if flow not in end]
        steps += [begin - now for begin in start if begin > now]
        if end.keys() >= set(active) and not steps:
            break
        step = Fraction(0) if any(flow in end for flow in active) else min(steps)
        for flow in active:
            if flow not in end:
                left[flow] -= rates[flow] * step
        now += step
    flows = Flows(network)
    for source, target, size, begin in wanted:
        flows.add(float(begin), source, target, size)
    numbers, arrived = flows.advance(np.inf)
    latency = [network.latency[way].sum() for way in ways]
    expected = {flow: float(moment) + latency[flow] for flow, moment in end.items()}
    assert dict(zip(numbers.tolist(), arrived.tolist(), strict=True)) == pytest.approx(
        expected, abs=1e-2
    )
    assert flows.use.bytes.sum() == sum(
        len(way) * size for way, (*_, size, _) in zip(ways, wanted, strict=True)
    )


@given(machines(), st.lists(FLOW, min_size=1, max_size=8), st.randoms())
def test_flows_do_not_depend_on_the_order_of_adding(
    machine: Machine, wanted: list[tuple[int, int, int, int]], random: object
) -> None:
    def times(order: list[int]) -> dict[int, float]:
        flows = Flows(MachineNetwork(machine))
        for index in order:
            source, target, size, begin = wanted[index]
            flows.add(float(begin), source, target, size)
        numbers, arrived = flows.advance(np.inf)
        return {
            order[number]: time
            for number, time in zip(numbers.tolist(), arrived.tolist(), strict=True)
        }

    straight = list(range(len(wanted)))
    shuffled = straight.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert times(shuffled) == times(straight)


@given(
    machines(),
    st.sampled_from(ALGORITHMS),
    st.integers(0, 5),
    st.integers(0, 5000),
    st.lists(st.integers(0, 3000), min_size=8, max_size=8),
)
def test_no_answer_beats_the_bandwidth(
    machine: Machine, algorithm: str, kind: int, size: int, ready: list[int]
) -> None:
    kinds = KINDS_BY_ALGORITHM[algorithm]
    messages = build_schedule(kinds[kind % len(kinds)], algorithm, 8, size, local=4)
    network = MachineNetwork(machine)
    use = LinkUse(network)
    start = np.array(ready, dtype=np.float64)
    times = finish_times(messages, network, np.arange(8), start, use=use)
    assert (times >= start).all()
    busiest = use.bytes / network.bandwidth
    assert times.max() - start.min() >= busiest.max() - 1e-6
    assert use.busy_ns == pytest.approx(busiest)
    if machine.nic is not None:  # what each rank sends to other hosts
        sent = np.zeros(8)
        hosts = machine.places // 4
        for part in messages.rounds:
            out = (hosts[part.source] != hosts[part.target]) | (machine.nic.of == "all")
            np.add.at(sent, part.source[out], part.bytes[out])
        rate = machine.nic.bandwidth * machine.network_speeds()
        assert ((times - start.min()) >= sent / rate - 1e-6).all()


NETWORKS = [
    (SWITCH,),
    (Dimension("ring", 8, 50.0, 500.0),),
    (Dimension("mesh", 8, 50.0, 500.0, shape=(4, 2)),),
    (Dimension("switch", 4, 450.0, 300.0), Dimension("switch", 2, 50.0, 1350.0)),
    (Dimension("fat-tree", 8, 50.0, 500.0, radix=2, oversubscription=2.0),),
]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "dimensions", NETWORKS, ids=lambda dimensions: "-".join(part.topology for part in dimensions)
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounds_end_as_their_messages_do_one_by_one(
    algorithm: str, dimensions: tuple[Dimension, ...]
) -> None:
    network = MachineNetwork(Machine(dimensions))
    for kind in KINDS_BY_ALGORITHM[algorithm][:2]:
        for size in (1 << 14, 1 << 24):
            messages = build_schedule(kind, algorithm, 8, size, local=4, chunks=2)
            together = finish_times(messages, network, np.arange(8), np.zeros(8)).max()
            assert together == pytest.approx(
                sent_one_by_one([(messages, range(8), [0.0] * 8)], network)[0].max(), rel=0.07
            )


@pytest.mark.parametrize("dimensions", NETWORKS[:3], ids=lambda dimensions: dimensions[0].topology)
@given(
    size=st.integers(8, 1 << 20), ready=st.lists(st.integers(0, 100_000), min_size=8, max_size=8)
)
def test_a_ring_ends_as_its_messages_do_whoever_is_late(
    dimensions: tuple[Dimension, ...], size: int, ready: list[int]
) -> None:
    network = MachineNetwork(Machine(dimensions))
    messages = build_schedule("all_reduce", "ring", 8, size)
    start = [float(time) for time in ready]
    one_by_one = sent_one_by_one([(messages, range(8), start)], network)[0]
    assert finish_times(messages, network, np.arange(8), np.array(start)) == pytest.approx(
        one_by_one, rel=1e-6
    )
