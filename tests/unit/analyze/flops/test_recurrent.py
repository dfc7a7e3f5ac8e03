"""FLOPs of recurrent networks against the closed form: for each position of a sequence, layer and direction
2 × gates × hidden × (what goes in + the state), twice as many backward."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from support.public_traces import DATA
from traceloom.analyze import flops, roofline
from traceloom.formats import load
from traceloom.testing import TraceBuilder

LSTM = DATA / "failing" / "lstm_cpu_unmodelled.json.gz"
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


class Net:
    """A network of random sizes, and its closed form."""

    def __init__(self, kind: str, seed: int) -> None:
        chance = random.Random(f"{kind} {seed}")
        self.kind, self.gates = kind, GATES[kind]
        self.time, self.batch, self.size, self.hidden = (
            chance.randint(1, 40) for _ in ("time", "batch", "size", "hidden")
        )
        self.layers, self.both = chance.randint(1, 4), chance.random() < 0.5
        self.directions = 1 + self.both
        self.positions = self.time * self.batch

    def sizes(self) -> list[int]:
        """What goes into each layer."""
        return [self.size, *[self.directions * self.hidden] * (self.layers - 1)]

    def flops(self) -> int:
        return sum(
            2 * self.positions * self.gates * self.hidden * (size + self.hidden) * self.directions
            for size in self.sizes()
        )

    def weights(self) -> list[list[int]]:
        """Shapes of the parameters in PyTorch's order."""
        rows = self.gates * self.hidden
        return [
            shape
            for size in self.sizes()
            for _ in range(self.directions)
            for shape in ([rows, size], [rows, self.hidden], [rows], [rows])
        ]


def counted(name: str, inputs: list[tuple[Any, str, str]]) -> int:
    shapes, types, values = (list(column) for column in zip(*inputs, strict=True))
    work = flops.MODELS.work(flops.Call(name, shapes, types, values, []))
    assert isinstance(work, flops.Work), work
    assert work.bytes > 0
    return work.flops


def value(it: object) -> tuple[Any, str, str]:
    return [], "Scalar", str(it)


TENSOR = ([], "", "")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", GATES)
def test_a_recurrent_network_counts_its_closed_form(kind: str, seed: int) -> None:
    net = Net(kind, seed)
    x = ([net.time, net.batch, net.size], "float", "")
    state = ([net.layers * net.directions, net.batch, net.hidden], "float", "")
    weights = (net.weights(), "TensorList", "")
    numbers = [value(entry) for entry in (True, net.layers, 0.0, True)]
    whole = counted(f"aten::{kind}", [x, state, weights, *numbers, value(net.both), value(False)])
    packed = ([net.positions, net.size], "float", "")
    sizes = ([net.time], "long int", "")
    rows = [packed, sizes, state, weights, *numbers, value(net.both)]
    mode = [value(entry) for entry in (MODES[kind], net.hidden)]
    tail = [value(entry) for entry in (net.layers, False, 0.0, True, net.both)]
    unknown = ([], "TensorList", "")  # older profilers record no shapes of lists
    head, backward = [x, unknown, value(4)], [state] * 6
    cudnn = [*head, TENSOR, state, TENSOR, *mode, value(0), *tail]
    miopen = [*head, state, TENSOR, *mode, *tail]
    assert counted(f"aten::{kind}", rows) == whole == net.flops()
    assert counted("aten::_cudnn_rnn", cudnn) == counted("aten::miopen_rnn", miopen) == whole
    cudnn = [*head, TENSOR, *backward, *mode, value(0), *tail]
    miopen = [*head, TENSOR, *backward, *mode, *tail]
    assert counted("aten::_cudnn_rnn_backward", cudnn) == 2 * whole
    assert counted("aten::miopen_rnn_backward", miopen) == 2 * whole


def test_a_layer_on_the_cpu_counts_its_closed_form() -> None:
    x, bias, state = ([12, 3, 64], "float", ""), ([384], "float", ""), ([3, 96], "float", "")
    head = [x, ([384, 64], "float", ""), ([384, 96], "float", ""), bias, bias, state, state]
    forward = 2 * 36 * 384 * (64 + 96)
    assert counted("aten::mkldnn_rnn_layer", [*head, value(False)]) == forward
    assert counted("aten::mkldnn_rnn_layer_backward", [*head, x, state, state, x]) == 2 * forward


def test_a_network_whose_weights_are_unknown_is_not_counted() -> None:
    inputs = [([4, 2, 8], "float", ""), ([1, 2, 8], "float", ""), ([], "TensorList", "")]
    call = flops.Call("aten::gru", *(list(column) for column in zip(*inputs, strict=True)), [])
    assert flops.MODELS.work(call) == "the weights are not recorded"


@pytest.mark.data
@pytest.mark.skipif(not LSTM.is_file(), reason="the given recordings are not on this machine")
def test_the_given_network_takes_29_mflop() -> None:
    found = roofline(load(LSTM).traces[0]).operators
    rnn = found.filter(found["name"].str.contains("lstm|rnn"))
    forward = 2 * 36 * 384 * ((64 + 96) + (96 + 96))
    assert rnn["flops"].sum() == 3 * forward == 29_196_288


def test_without_gpu_work_what_is_not_modelled_is_named_with_its_share() -> None:
    shapes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    trace = TraceBuilder(device_name=None).op("aten::mm", 0, 30, **shapes)
    trace.op("mine::special", 40, 60).op("mine::inner", 50, 20)
    found = roofline(trace.build())
    rows = found.unmodelled.select("name", "count", "total_ns", "fraction").rows()
    assert [row[:3] for row in rows] == [("mine::special", 1, 40_000), ("mine::inner", 1, 20_000)]
    assert [row[3] for row in rows] == pytest.approx([40 / 90, 20 / 90])
    assert found.operators["fraction"].to_list() == pytest.approx([30 / 90])
    assert json.dumps(found.unmodelled["reason"].to_list()).count("not recorded") == 2
