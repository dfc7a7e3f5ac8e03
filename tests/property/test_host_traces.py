"""Host traces of any damage, and joins with planted truth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hypothesis
import numpy as np
import polars as pl
import pytest
from hypothesis import strategies as st

from support.trace_pairs import NestedOp, build_trace_pair
from traceloom.errors import InputError
from traceloom.formats.alignment import align, build_hashes, find_occurrences, hash_numbers
from traceloom.formats.host_trace import read_host_trace
from traceloom.graph.host_match import match
from traceloom.testing import HostTraceBuilder
from traceloom.testing.host_trace_builder import HOST_SCHEMAS
from traceloom.trace.trace import HOST_OPS

NAMES = st.one_of(
    st.sampled_from(["aten::mm", "aten::add", 'say "hi"', "a\\b", "}, {", '"id": 3', "日本"]),
    st.text(max_size=8),
)


@st.composite
def host_traces(draw: st.DrawFn) -> HostTraceBuilder:
    made = HostTraceBuilder(draw(st.sampled_from(HOST_SCHEMAS)))
    ids: list[int | None] = [None]
    for _ in range(draw(st.integers(1, 12))):
        values = draw(
            st.lists(
                st.tuples(st.integers() | st.text(max_size=4), st.just([]), st.text(max_size=4)),
                max_size=2,
            )
        )
        ids.append(
            made.op(
                draw(NAMES),
                parent=draw(st.sampled_from(ids)),
                thread=draw(st.integers(1, 3)),
                inputs=values,
            )
        )
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host") / "host.json"


@hypothesis.given(host_traces())
def test_names_and_values_come_back(place, made):
    place.write_text(made.text(), encoding="utf-8")
    host = read_host_trace(place)
    nodes = sorted((json.loads(node) for node in made.nodes()), key=lambda node: node["id"])
    assert host.notices == ()
    assert host.ops["name"].to_list() == [node["name"] for node in nodes]
    values = [node["inputs"]["values"] if made.nested else node["inputs"] for node in nodes]
    assert [json.loads(text) for text in host.ops["inputs"]] == values


@hypothesis.given(host_traces(), st.floats(0, 1))
def test_a_cut_keeps_every_whole_node(place, made, share):
    text = made.text().encode()
    cut = int(len(text) * share)
    place.write_bytes(text[:cut])
    ends, at = [], 0
    for node in made.nodes():
        at = text.index(node.encode(), at) + len(node.encode())
        ends.append(at)
    whole = sum(end <= cut for end in ends)
    try:
        host = read_host_trace(place)
    except InputError:
        assert not whole
        return
    assert host.ops.height == whole


@hypothesis.given(
    host_traces(), st.integers(0, 10**6), st.binary(min_size=1, max_size=6), st.booleans()
)
def test_whatever_stands_in_a_file_it_is_read_or_refused(place, made, where, bad, instead):
    text = made.text().encode()
    at = where % len(text)
    place.write_bytes(text[:at] + bad + text[at + (len(bad) if instead else 0) :])
    try:
        host = read_host_trace(place)
    except InputError:
        return
    assert host.ops.schema == HOST_OPS
    # One wound hurts a node, or two where it joins them.
    assert host.ops.height >= len(made.nodes()) - 2 or at < text.index(b'"nodes"') + 12


# -- sequences --------------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 4), max_size=40).map(
    lambda values: hash_numbers(np.array(values, dtype=np.int64))
)


@hypothesis.given(TOKENS, TOKENS)
def test_occurrences_are_all_there_are(pattern, text):
    found = find_occurrences(build_hashes(pattern), build_hashes(text)).tolist()
    size = pattern.size
    expected = [
        at for at in range(text.size - size + 1) if size and (text[at : at + size] == pattern).all()
    ]
    assert found == expected


@hypothesis.given(TOKENS, TOKENS)
def test_alignments_pair_equal_elements_in_order(one, other):
    mine, theirs = align(build_hashes(one), build_hashes(other))
    assert (one[mine] == other[theirs]).all()
    assert (np.diff(mine) > 0).all()
    assert (np.diff(theirs) > 0).all()
    same, _ = align(build_hashes(one), build_hashes(one))
    assert same.size == one.size


# -- planted iterations -----------------------------------------------------------------------------------------------

CALLS = st.deferred(
    lambda: st.builds(
        NestedOp, st.sampled_from(list("abcdefgh")), st.lists(CALLS, max_size=2).map(tuple)
    )
)


def _ops(call: NestedOp) -> int:
    return 1 + sum(_ops(one) for one in call.inside)


@st.composite
def steps(draw: st.DrawFn) -> list[NestedOp]:
    outer = draw(st.lists(st.tuples(CALLS, st.integers(1, 3)), min_size=1, max_size=8))
    return [replace(call, thread=thread) for call, thread in outer]


@hypothesis.given(steps(), st.integers(1, 6), st.data())
def test_a_recorded_iteration_is_found_whole_by_names(step, count, data):
    recorded = data.draw(st.integers(0, count - 1))
    device, host = (
        one.build()
        for one in build_trace_pair(
            [step] * count, recorded=range(recorded, recorded + 1), keys="none"
        )
    )
    found = match(device, host)
    every = sum(_ops(call) for call in step)
    assert (found.matched, found.ops) == (every, every)
    assert found.iterations >= count
    event = np.flatnonzero(found.host_op >= 0)
    # All of it lies in one iteration, each thread on a lane of its own.
    names = dict(host.ops.select("id", "name").iter_rows())
    assert [names[op] for op in found.host_op[event].tolist()] == device.events["name"].gather(
        event
    ).to_list()
    assert found.threads["lane"].n_unique() == found.threads.height


@hypothesis.given(st.lists(steps(), min_size=2, max_size=5), st.data())
def test_ids_find_the_true_event_of_every_op(iterations, data):
    recorded = data.draw(st.integers(0, len(iterations) - 1))
    device, host = (
        one.build() for one in build_trace_pair(iterations, recorded=range(recorded, recorded + 1))
    )
    found = match(device, host)
    assert found.exact
    joined = device.events.with_columns(pl.Series("host_op", found.host_op)).filter(
        pl.col("host_op") >= 0
    )
    truth = dict(
        host.ops.drop_nulls("record_function_id").select("id", "record_function_id").iter_rows()
    )
    assert joined.height == len(truth)
    assert [truth[op] for op in joined["host_op"]] == joined["record_function_id"].to_list()


@hypothesis.given(steps(), st.data())
def test_a_few_lost_ops_do_not_lose_the_others(step, data):
    long = step * 12
    device, host = build_trace_pair([long], keys="none")
    trace, whole = device.build(), host.build()
    is_op = ~whole.roots()
    every = int(is_op.sum())
    lost = data.draw(st.sets(st.integers(0, every - 1), max_size=max(1, every // 25)))
    rows = np.flatnonzero(is_op.to_numpy())
    keep = np.ones(whole.ops.height, dtype=np.bool_)
    keep[rows[sorted(lost)]] = False
    found = match(trace, replace(whole, ops=whole.ops.filter(pl.Series(keep))))
    assert found.matched >= 0.9 * (every - len(lost))
