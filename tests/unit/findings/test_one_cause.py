"""One cause has one number, and a mean hides none: loaders, shapes of products, metrics behind the optimizer."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import traceloom
from support import planted_sizes as planted
from traceloom import analyze
from traceloom.analyze.answer import answer
from traceloom.findings import RULES, Context, rank
from traceloom.testing import TraceBuilder


def test_a_slow_loader_has_one_share_in_sentence_bar_and_section(tmp_path: Path) -> None:
    step = planted.cpu_model(random.Random(1))
    load = planted.Do(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        40_000,
        category="user_annotation",
    )
    session = traceloom.load(planted.write(planted.Job((load, *step)), tmp_path / "trace.json"))
    told = answer(session)
    (share,) = re.findall(r"([\d.]+) % of the time the main thread waits for data", told.sentence)
    assert "DataLoader" not in told.sentence
    bar = sum(
        row["fraction"] for row in told.parts.to_dicts() if row["label"].startswith("loading")
    )
    steps = session.traces[0].steps.filter("complete")
    length = int((steps["end_ns"] - steps["start_ns"]).sum())
    waited = int(analyze.data_loading(session.traces[0]).steps["wait_ns"].sum())
    assert float(share) == pytest.approx(100 * bar, abs=0.1)
    assert float(share) == pytest.approx(100 * waited / length, abs=0.1)
    (finding,) = rank(Context.of(session), RULES).time
    assert finding.slug == "data-starved"
    (said,) = re.findall(r"the step waits ([\d.]+) ms for data", finding.title)
    assert float(said) == pytest.approx(
        waited / 1e6 / session.traces[0].steps["complete"].sum(), rel=0.01
    )
    assert "4 workers" in finding.title
    assert "assumes 4 workers" in finding.advice


def test_products_of_one_shape_at_a_low_roofline_are_found_beside_good_ones(tmp_path: Path) -> None:
    chance = random.Random(2)
    good = planted.product(chance, "nvidia", 0.8, 4096)
    bad = planted.product(chance, "nvidia", 0.06, 1024)
    job = planted.Job((*[good] * 6, bad, bad))
    session = traceloom.load(planted.write(job, tmp_path / "trace.json"))
    finding = rank(Context.of(session, planted.PEAK), RULES).time[0]
    assert finding.slug == "low-roofline"
    assert "reaches 6.0 %" in finding.title or "reaches 5.9 %" in finding.title
    assert finding.saving_ns == pytest.approx(2e3 * bad.kernel_us * (1 - 0.06 / 0.7), rel=0.06)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_metric_without_a_backward_is_not_forward(place: str) -> None:
    builder, at = TraceBuilder(device_name=None), 0
    for step in range(3):
        began, order = at, ["metric", "model"] if place == "before" else ["model", "metric"]
        for part in order:
            if part == "metric":
                for number in range(10):
                    builder.op(
                        "aten::select", at + 10 * number, 9, sequence=1000 * step + 500 + number
                    )
                at += 100
            else:
                builder.op("aten::mm", at, 100, sequence=1000 * step + 1)
                builder.op("aten::mse_loss", at + 100, 50, sequence=1000 * step + 2)
                for number, name in ((2, "MseLossBackward0"), (1, "MmBackward0")):
                    builder.op(
                        f"autograd::engine::evaluate_function: {name}",
                        at + 160 + 50 * (2 - number),
                        40,
                        sequence=1000 * step + number,
                        forward_thread=1,
                    )
                builder.annotation("Optimizer.step#SGD.step", at + 270, 30)
                at += 310
        builder.step(step, began, at - began - 1)
    account = analyze.host(builder.build()).account
    sums: dict[str, int] = {}
    for phase, ns in account.select("phase", "ns").rows():
        sums[str(phase)] = sums.get(str(phase), 0) + ns
    assert sums["forward"] == 3 * 150_000
    assert sums["optimizer"] == 3 * 30_000
