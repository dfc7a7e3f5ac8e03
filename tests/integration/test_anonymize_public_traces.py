"""Every public trace: the analyses say the same of what comes out, and nothing of whose it was is left in it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from support.public_traces import DATA
from traceloom.formats import read_kineto
from traceloom.formats.chakra.files import EtReader
from traceloom.formats.host_trace import read_host_trace
from traceloom.graph.host_match import match
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import Anonymized, anonymize

FOLDERS = ("kineto", "critical_path", "damaged_metadata", "diff", "multirank", "pairs")
TRACES = (
    sorted(p for folder in FOLDERS for p in (DATA / folder).glob("*.gz")) if DATA.is_dir() else []
)
HOSTS = sorted((DATA / "host").glob("*.gz")) if DATA.is_dir() else []
CHAKRA = sorted((DATA / "chakra").iterdir()) if DATA.is_dir() else []
SMALL = 200_000  # bytes of gzip: the large ones are rewritten once, not in every way

# One of each kind of device, format and program; the others are the like.
USUAL = re.compile(
    r"a100_cupti_counters|cpu_only_gloo_rank34|h100_bert_small|mi210_gpu_only|mi250_minitoy|mi300_sglang|mtia_inference"
    r"|triton_example|dlrm_rank0|event_sync_multi_stream|simple_add|legacy_categories|rank_non_gpu"
)
THOROUGH = pytest.mark.thorough

# What these files hold of people, machines, models and paths.
TELLING = re.compile(
    rb"bcoutinho|mojif|facebook|twshared|vanguard|feed_ranking|mast_job_name\W+torchx|dper3|owlv2|qwen|bert|deepseek"
    rb"|alexnet|alex_net|transformers/|site-packages|torchinductor|/home/|/tmp/|/data/users|unentitled|tsp_cco|penv#",
    re.IGNORECASE,
)

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not TRACES, reason="the public traces (../shared/data) are not here"),
]


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _shared(path: Path, tmp_path: Path, policy: Policy) -> Anonymized:
    return anonymize([path], tmp_path / "out", policy, Key(b"a key that only tests have"))


def _bytes(outcome: Anonymized) -> bytes:
    parts = [path.read_bytes() for path in outcome.output.iterdir()]
    return b"\n".join(
        gzip.decompress(part) if part.startswith(b"\x1f\x8b") else part for part in parts
    )


def _verdicts(outcome: Anonymized) -> dict[str, str]:
    return {
        part["part"]: part["verdict"]
        for entry in outcome.report["utility"]
        for part in entry["parts"]
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if USUAL.match(p.name) else THOROUGH) for p in TRACES],
    ids=_name,
)
def test_a_trace_says_the_same_and_nothing_of_its_owner(path: Path, tmp_path: Path) -> None:
    outcome = _shared(path, tmp_path, Policy())
    assert TELLING.findall(_bytes(outcome)) == []
    assert set(_verdicts(outcome).values()) <= {"equal", "rounded"}
    assert [entry["new_notices"] for entry in outcome.report["utility"]] == [[]] * len(
        outcome.report["utility"]
    )
    assert all(not one["unknown"] or one["name"] for one in outcome.report["dropped"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=THOROUGH if number % 3 else [])
        for number, p in enumerate(
            p for p in TRACES if p.stat().st_size < SMALL and ".host." not in p.name
        )
    ],
    ids=_name,
)
def test_collapsed_it_keeps_the_gpu_its_steps_and_its_answers(path: Path, tmp_path: Path) -> None:
    outcome = _shared(path, tmp_path, Policy(structure="collapse", shapes="drop"))
    found = _verdicts(outcome)
    for part in (
        "GPU time by device",
        "GPU time by step",
        "kernel categories",
        "launches",
        "collectives",
    ):
        assert found[part] == "equal", part
    assert "changed" not in found.values()
    assert TELLING.findall(_bytes(outcome)) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=THOROUGH if p.name.startswith("resnet_1gpu") else []) for p in HOSTS],
    ids=_name,
)
def test_a_host_trace_keeps_its_nodes(path: Path, tmp_path: Path) -> None:
    outcome = _shared(path, tmp_path, Policy())
    before, after = read_host_trace(path), read_host_trace(next(outcome.output.iterdir()))
    columns = [
        "id",
        "parent",
        "record_function_id",
        "sequence",
        "scope",
        "thread",
        "forward_thread",
        "forward_parent",
    ]
    assert after.ops.select(columns).equals(before.ops.select(columns))
    assert after.groups.drop("ranks").equals(before.groups.drop("ranks"))
    assert after.notices == ()


@pytest.mark.parametrize(
    "rank", [pytest.param(rank, marks=THOROUGH if rank else []) for rank in range(8)]
)
def test_host_and_device_trace_of_a_rank_still_match(rank: int, tmp_path: Path) -> None:
    pair = [DATA / "multirank" / f"dlrm_rank{rank}.{kind}.json.gz" for kind in ("host", "kineto")]
    outcome = anonymize(pair, tmp_path / "out", Policy(), Key(b"a key that only tests have"))
    found = []
    for folder, names in ((DATA / "multirank", pair), (outcome.output, None)):
        host, device = names or (
            folder / f"rank{rank}.host.json.gz",
            folder / f"rank{rank}.kineto.json.gz",
        )
        found.append(match(read_kineto(device), read_host_trace(host)).coverage())
    assert found[0].equals(found[1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", CHAKRA, ids=_name)
def test_a_chakra_file_keeps_nodes_times_and_dependencies(path: Path, tmp_path: Path) -> None:
    outcome = _shared(path, tmp_path, Policy())
    assert {
        part: verdict for part, verdict in _verdicts(outcome).items() if part != "sizes of nodes"
    } == dict.fromkeys(("nodes and times", "dependencies", "total time", "ideal time"), "equal")
    with EtReader(next(outcome.output.iterdir()), strict=True) as reader:
        assert not any(attribute.name == "input_file" for attribute in reader.metadata.attr)
        assert sum(1 for _ in reader) == outcome.report["files"][0]["entries_in"]


def test_all_ranks_of_a_job_stay_one_job(tmp_path: Path) -> None:
    files = sorted((DATA / "multirank").glob("dlrm_rank[0-2].kineto.json.gz"))
    outcome = anonymize(files, tmp_path / "out", Policy(), Key(b"a key that only tests have"))
    before, after = (
        [read_kineto(path).start_ns for path in paths]
        for paths in (files, sorted(outcome.output.iterdir()))
    )
    assert [start - after[0] for start in after] == [start - before[0] for start in before]
    report = json.loads(outcome.report_path.read_text())
    assert report["leaks"]["counts"]["other"] < 10
