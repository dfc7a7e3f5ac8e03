"""Calls of every verb with every option that has an effect, on made inputs.

`CASES` has a line for each call, as one types it after `traceloom`; it lies in a folder with the
files of `inputs`, and what it writes below `out` or `made` is part of the answer (`made` stays for
the calls that follow). A line may end with `< FILE`. An option without a call is a failure of the
snapshot: see `uncovered`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from answers import Describer
from static import every_parser, options

from support.fuzzing import seeds
from support.fuzzing.trying import captured
from support.hand_job import hand_rank
from support.jobs import Change, ParallelRecipe, Recipe, SlowRank, parallel_job, training_job
from support.plans import small_plan, timed_plan
from support.workload import collective, node, receive, send, write_set
from traceloom.cli import main

MACHINE = """\
format = "traceloom-machine"
version = 1
name = "two of two"
[[network]]
topology = "switch"
size = 2
bandwidth = 100.0
[[network]]
topology = "switch"
size = 2
bandwidth = 10.0
latency = 1000
[nic]
bandwidth = 10.0
"""
NETWORK = "topology: [ Ring ]\nnpus_count: [ 2 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n"
SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "preferred-dataset-splits": 1,
    "local-mem-bw": 1600,
    "collective-optimization": "localBWAware",
    "active-chunks-per-dimension": 1,
    **{
        f"{kind}-implementation": ["ring"]
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    },
}
PROGRAM = """\
import torch
import traceloom
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    traceloom.step()
"""
POLICY = 'format = "traceloom-anonymize-policy"\nversion = 1\nshapes = "drop"\nstacks = "drop"\nkeep_names = ["aten::.*"]\n'


def inputs(folder: Path) -> None:
    """Write the files that calls are about."""
    job = training_job(Recipe(ranks=2, steps=3, layers=2))
    job.run().write(folder / "run", host=True)
    job.run(Change(kernels=1.3)).write(folder / "slower", host=True)
    parallel_job(ParallelRecipe(data=2, tensor=2, steps=2, faults=(SlowRank(1, 3.0),))).run().write(
        folder / "parallel"
    )
    (folder / "traces").mkdir()
    hand_rank(0).write(folder / "trace.json.gz")
    for rank in range(2):
        hand_rank(rank).write(folder / "traces" / f"rank{rank}.json.gz")
    for kind in ("snapshot", "timeline", "host"):
        seeds.FORMATS[kind](folder)
    ranks = [
        [node(0, us=5), collective(1, deps=[0]), send(2, 1, deps=[1])],
        [node(0, us=7), collective(1, deps=[0]), receive(2, 0, deps=[1])],
    ]
    write_set(folder / "workload", *ranks, groups={"0": [0, 1]})
    write_set(folder / "bare", *ranks)
    write_set(folder / "wrong", [node(0), collective(1, deps=[9])], [node(0)], groups={"0": [0, 1]})
    seeds.FORMATS["graph"](folder)
    small_plan().save(folder / "small.plan")
    timed_plan().save(folder / "timed.plan")
    texts = {
        "machine.toml": MACHINE,
        "network.yml": NETWORK,
        "pair.yml": NETWORK.replace("Ring", "FullyConnected"),
        "system.json": json.dumps(SYSTEM),
        "tiny.py": PROGRAM,
        "policy.toml": POLICY,
        "key.txt": "k" * 64 + "\n",
        "notes.md": "mine\n",
        "groups.json": '{"0": [0, 1]}',
        "rules.json": '[{"name": "mine", "kind": "gemm", "pattern": "gemm"}]',
        "custom.py": "",
        "owners.toml": '[[rule]]\nmatch = {model = "speech"}\nset = {division = "research"}\n',
        "prices.toml": 'currency = "EUR"\n[device_hour]\ndefault = 2\n',
        "triggers.toml": '[[triggers]]\nname = "daily"\non = "cadence"\nshare = 0.000001\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


CASES: dict[str, str] = {
    "report": """
        report run
        report run --full --no-cache --debug
        report run --json
        report run --rank 1 --steps 1..3 --by-shape --top 3 --full
        report run --only operators --sort self
        report run --only operators --sort total
        report run --only operators --sort mean
        report run --only operators --sort max
        report run --only operators --sort count
        report run --only operators --sort name
        report run --only operators --sort device
        report run --only per_step,kernels -q
        report run --only core
        report run --device 'H100 SXM' --link-peak 100 --only roofline,collectives --json
        report run --peak bf16=989e12,memory=3.35e12 --only roofline
        report run --graph-capture trace.json.gz --tokens-per-step 12 --samples-per-step 2 --full
        report run --rules rules.json --only kernel_kinds
        report trace.json.gz -o out/report.html -o out/report.json -o out/report.md -o out/run.perfetto.json.gz
        report trace.json.gz -o out/run.perfetto.json -o out/run.speedscope.json
        report trace.json.gz -o out/kernels.csv -o out/operators.parquet -o -
        report run -o out/tables/
        report run -o out/tables/ --format csv
        report run -o out/tables/ --format parquet
        report trace.json.gz -o notes.md
        report trace.json.gz -o notes.md --force
        report traces --full
        report - < trace.json.gz
        report parallel --json
        report parallel --full
        report snapshot.pickle
        report job.graph
        report missing.json
        report trace.json.gz machine.toml
        report trace.json.gz --only nonsense
    """,
    "whatif": """
        whatif run --set 'kernels ~ gemm * 0.5' --set 'syncs remove' --no-cache
        whatif run --set 'network * 2' --step 1 --json
        whatif run --set 'rank 1 delay remove' -q --debug
        whatif run --set 'idle remove' -o out/a.json -o out/a.md -o out/a.html -o out/a.perfetto.json.gz
        whatif run --set 'copies async' -o notes.md
        whatif run --set 'copies async' -o notes.md --force
        whatif run --set nonsense
        whatif parallel --set 'collectives overlap' --set 'host fuse'
    """,
    "simulate": """
        simulate run --no-cache
        simulate parallel --machine machine.toml --set network.1.bandwidth=1 --json -q --debug
        simulate parallel --machine dgx-h100 --host-factor 0.5 --step 1
        simulate parallel --machine machine.toml --device 'H100 SXM' --recorded-device 'A100 SXM 80GB'
        simulate parallel --machine machine.toml -o out/a.json -o out/a.html -o out/a.perfetto.json.gz -o out/ranks.csv -o out/path.parquet -o out/tables/
        simulate run --only communication
        simulate run --only compute
        simulate run -o made/kept.json
        simulate run -o made/kept.json
        simulate run -o made/kept.json --force
        simulate parallel --ranks 8 --draws 20 --seed 3 --role 0=data
        simulate parallel --ranks 8 -o out/workload/
        simulate run --data-parallel 4 --json
        simulate run --tensor-parallel 2
        simulate run --pipeline-parallel 2
        simulate run --micro-batches 2
        simulate parallel --machine machine.toml --sweep network.0.bandwidth=50,100 --sweep host_factor=1,2 --memory-limit 80GB
        simulate run --sweep host_factor=1,2 --json
        simulate bare --groups groups.json
        simulate workload --mode native --network network.yml --system system.json
        simulate workload --mode astra-sim --network network.yml --system system.json --json
        simulate workload --mode astra-sim --network pair.yml --system system.json --congestion aware
        simulate workload --mode astra-sim --network network.yml --system system.json --congestion unaware
        generate collective --algorithm ring --ranks 2 --size 1kB -o made/ring -q
        simulate workload --mode astra-sim --network network.yml --system system.json --collective all_reduce=made/ring/workload
        simulate job.graph
        simulate run --machine nonsense
    """,
    "calibrate": """
        calibrate parallel --no-cache
        calibrate parallel run --ranks-per-host 2 --json -q --debug
        calibrate parallel -o out/machine.toml -o out/machine.json
        calibrate parallel -o machine.toml
        calibrate parallel -o machine.toml --force
    """,
    "memory": """
        memory run --no-cache
        memory snapshot.pickle
        memory snapshot.pickle --by scope --depth 2 --top 3 --json
        memory snapshot.pickle --by module -q
        memory snapshot.pickle --by category
        memory snapshot.pickle --by op --full-op-names
        memory snapshot.pickle --by stack --at start
        memory snapshot.pickle --by dtype --at end --debug
        memory memory.raw.json --rank 0
        memory snapshot.pickle -o out/a.html -o out/a.csv -o out/a.json
        memory snapshot.pickle -o out/a.csv --all
        memory snapshot.pickle -o notes.json
        memory snapshot.pickle -o notes.json --force
    """,
    "diff": """
        diff run slower --no-cache
        diff run slower --json -q --debug
        diff run slower --top 2 -o out/a.html -o out/a.md -o out/a.json
        diff run slower --fail-if 'step_time > 3%' --strict
        diff run slower --base run --new slower --fail-if 'step_time > 3%' --fail-if 'kernel:gemm > 5%' -o out/check.md
        diff trace.json.gz traces/rank1.json.gz -o notes.md
        diff trace.json.gz traces/rank1.json.gz -o notes.md --force
        diff run missing
    """,
    "baseline": """
        baseline list --store made/store
        baseline save main run run --store made/store --no-cache
        baseline save main run --store made/store -q --debug
        baseline save main run --store made/store --force
        baseline list --store made/store --json
        baseline compare main slower --store made/store --fail-if 'step_time > 3%' --top 2
        baseline compare main slower --store made/store --strict --power 5% -o out/a.md -o out/a.html -o out/a.json
        baseline compare main run --store made/store --json
        baseline compare none run --store made/store
    """,
    "link": """
        link run --no-cache
        link run --window graph --json
        link run --window timed --no-law -q --debug
        link run -o out/run.graph
        link run -o out/et/
        link pair -o out/one.et.gz
        link pair -o job.graph
        link pair -o job.graph --force
    """,
    "convert": """
        convert job.graph out/job.perfetto.json.gz --debug
        convert job.graph out/et/ --json
        convert job.graph out/et/ --only communication
        convert job.graph out/et/ --only compute
        convert job.graph out/et/ --target chakra
        convert job.graph out/et/ --target astra-sim --gpu-only -q
        convert workload/w.0.et out/w.0.jsonl.gz
        convert workload out/workload.graph --strict
        convert bare out/bare.graph --groups groups.json
        convert workload notes.graph --force
        convert wrong out/wrong.graph
        convert workload job.graph
    """,
    "validate": """
        validate workload --debug
        validate workload --target chakra -q
        validate workload --target astra-sim --json
        validate bare --groups groups.json --strict
        validate wrong
        validate wrong --json
        validate job.graph
    """,
    "show": """
        show workload
        show job.graph --json --debug
        show job.graph --node 5 --depth 1 --json
        show workload --node 1 --rank 1 -q
        show job.graph -o out/job.html
        show workload --node 1 --rank 0 -o notes.html --force
        show workload --node 99
    """,
    "generate": """
        generate collective --collective all_gather --algorithm ring --ranks 4 --size 64kB --compute-us 5 -o out/ring
        generate collective --algorithm two-level --ranks 16 -o out/two --json
        generate pipeline --ranks 2 --size 1MiB --micro-batches 3 --schedule gpipe -o out/pipe -q
        generate transformer --data-parallel 1 --tensor-parallel 2 --pipeline-parallel 1 --layers 1 --hidden 64 --tflops 1 --memory-gbps 10 --micro-batches 1 -o out/step --debug
        generate pipeline --collective all_reduce -o out/wrong
        generate collective --ranks 2 -o workload
        generate collective --ranks 2 -o workload --force
    """,
    "anonymize": """
        anonymize run -o out/shared --key key.txt
        anonymize trace.json.gz -o out/shared.json.gz --key key.txt --map out/names.json --json --debug
        anonymize run -o out/shared --key key.txt --structure keep -q
        anonymize run -o out/shared --key key.txt --structure collapse --policy policy.toml
        anonymize run -o out/shared --key key.txt --for replay
        anonymize workload -o out/shared --key key.txt
        anonymize trace.json.gz -o notes.json --key key.txt
        anonymize trace.json.gz -o notes.json --key key.txt --force
    """,
    "explain": """
        explain
        explain data-starved
        explain no-traces -q
        explain file-damage --debug
        explain nonsense
    """,
    "completion": """
        completion bash
        completion zsh -q
        completion fish --debug
        completion nonsense
    """,
    "record": """
        record -o made/first --steps 7..10 --stacks --memory --module-names path --graph -- python tiny.py
        record -o made/first --steps 7..10 --module-names class --graph --no-sources --max-memory 200MB --fail-without-capture -- python tiny.py
        record -o made/first --force --after 0 --duration 0.05 --module-names off -q -- python tiny.py
        record -o out/none
    """,
    "replay": """
        replay run --plan-only
        replay run --plan-only --steps 1..2 --debug
        record -o made/real --steps 1..3 --graph -q -- python tiny.py
        replay made/real --plan-only --level outermost --steps 3..4 --ranks 0 --json --no-cache
        replay made/real --plan-only --level leaf --only compute -o out/run.plan
        replay made/real --plan-only --only communication -q
        replay made/real --plan-only --scope Optimizer.step#SGD.step --repeat Optimizer.step#SGD.step=2
        replay made/real --plan-only --scale 8=2
        replay made/real --plan-only --batch 2
        replay timed.plan --plan-only --batch 2
        replay timed.plan --dry-run
        replay timed.plan --dry-run --json --memory-limit 1GB --stand-ins
        replay small.plan --iterations 2 --device cpu --pace fast --threads one --seed 3 --max-time 5 --timeout 30 --backend gloo -o out/a.json -o out/a.html -o out/ops.csv -o out/each.parquet -o out/tables/ --record out/again
        replay small.plan --iterations 2 --pace recorded --threads recorded --strict --trust --import custom --machine dgx-h100 --json
        replay small.plan -o out/a.py
        replay small.plan --op aten::mm --slowest 1 -o out/mm.py
        replay small.plan -o tiny.py
        replay small.plan -o tiny.py --force
    """,
    "usage": """
        --help
        --version
        nonsense
        report --nonsense
        report
        anonymise
    """,
}
"""Verb -> its calls. Those that ask an agent or a service are in `agent` and `fleet`."""

MEASURED = frozenset({"record", "replay"})
"""Verbs whose answers hold what was measured: of numbers only that they are there counts."""

NOT_CALLED: dict[str, str] = {
    "replay --device cuda": "a device",
    "replay --device xpu": "a device",
    **dict.fromkeys(
        (
            f"calibrate --{name}"
            for name in ("here", "ranks", "device", "backend", "max-size", "powers", "precision")
        ),
        "a quiet machine for a minute",
    ),
    "serve --proxy-role": "a proxy, which the service in `fleet` has",
    "serve --advertise": "a second service, which the tests of forwarding have",
}
"""Verbs and options without a call, and what a call would need that not every machine has."""


class Call(NamedTuple):
    """A call, as it is typed, and its words."""

    line: str
    words: list[str]
    stdin: str = ""


def calls(text: str) -> Iterator[Call]:
    """The calls of a text."""
    for line in filter(None, map(str.strip, text.splitlines())):
        typed, _, stdin = line.partition(" < ")
        yield Call(line, shlex.split(typed), stdin)


def uncovered(every: Iterable[list[str]]) -> list[str]:
    """Options and choices that there are, and that no call of these has; and calls of what there is
    no more.
    """
    known = every_parser()
    used: dict[str, set[str]] = {name: set() for name in known}
    stale = []
    for words in every:
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), "")
        if not name:
            stale.append(f"no such verb any more: traceloom {' '.join(words)}")
            continue
        own = words[: words.index("--")] if "--" in words else words
        used[name].update(own)
        used[name].update(word.split("=")[0] for word in own if word.startswith("--"))
    without = []
    for name, own in known.items():
        for action in options(own):
            names = set(action.option_strings) or {"(nothing)"}
            seen = bool(names & used[name]) if action.option_strings else bool(used[name])
            if isinstance(action.option_strings, list) and action.nargs == 0 and len(names) > 1:
                # `--x` and `--no-x` are two options; `-q` and `--quiet` are one.
                without += [
                    f"{name} {o}" for o in names if o.startswith("--no-") and o not in used[name]
                ]
            if not seen:
                without.append(
                    f"{name} {action.option_strings[-1] if action.option_strings else action.dest}"
                )
                continue
            label = action.option_strings[-1] if action.option_strings else ""
            without += [
                f"{name} {label} {choice}".replace("  ", " ")
                for choice in action.choices or ()
                if str(choice) not in used[name]
            ]
    needed = {
        name for name in without for known in NOT_CALLED if f"{name} ".startswith(f"{known} ")
    }
    return stale + [f"no case for: traceloom {name}" for name in without if name not in needed]


class Caller:
    """Calls in a folder, and describes what they answer.

    Args:
        folder: It becomes the current directory's; the files of `inputs` are in it.
        describer: How answers are described.
    """

    def __init__(self, folder: Path, describer: Describer) -> None:
        self.folder, self.describer = folder, describer
        self.before = self._files()

    def __call__(self, call: Call, run: Callable[[list[str]], int] = main) -> list[str]:
        """The lines of the snapshot about a call."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        (self.folder / "out").mkdir()
        before, self.before = self.before, {}
        code, printed, errors = self._ran(call, run)
        own = self.describer
        kind = (
            " ".join(word for word in call.words[:2] if re.fullmatch(r"[a-z][a-z-]*", word))
            if call.words[0] in {"agent", "fleet"}
            else call.words[0]
        )
        lines = [f"== traceloom {call.line}", f"exit code {code}"]
        lines += self._marked("", own.printed(printed, f"{kind} --json"))
        if errors:
            lines += self._marked("! ", own.text(_untraced(errors)))
        self.before = self._files()
        for name, stamp in self.before.items():
            if before.get(name) != stamp:
                lines.append(f"> {own.masker.text(name)}")
                lines += self._marked("  ", own.file(self.folder / name, kind))
        lines += [
            f"> {name} is gone"
            for name in before
            if name not in self.before and not name.startswith("out/")
        ]
        return [line.rstrip() for line in lines] + [""]

    def _ran(self, call: Call, run: Callable[[list[str]], int]) -> tuple[int, str, str]:
        stdin = sys.stdin
        with captured() as (out, err):
            try:
                if call.stdin:
                    sys.stdin = (self.folder / call.stdin).open(encoding="latin-1")
                code = run(call.words)
            finally:
                if sys.stdin is not stdin:
                    sys.stdin.close()
                sys.stdin = stdin
        return (
            code,
            out.getvalue().decode("utf-8", "replace"),
            err.getvalue().decode("utf-8", "replace"),
        )

    def _marked(self, mark: str, lines: Iterator[str]) -> list[str]:
        return [f"{mark}{line}" for line in lines]

    def _files(self) -> dict[str, tuple[int, int]]:
        paths = sorted(
            path
            for path in self.folder.rglob("*")
            if path.is_file()
            and "__pycache__" not in path.parts
            # Whether a program was looked at often enough is up to the machine.
            and not path.name.endswith(".stacks.json.gz")
        )
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in paths
        }


def _untraced(text: str) -> str:
    """Without the places in the code that `--debug` shows."""
    text = re.sub(r"(?m)^( {2}File .*\n(?: {4}.*\n)*)+", "  <places in the code>\n", text)
    return re.sub(r"(?m)^traceloom(?:\.\w+)+\.(\w+): ", r"\1: ", text)


def lines_of(text: str) -> list[str]:
    """The lines of a text that have something."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def run_lines(
    caller: Caller,
    lines: Iterable[str],
    places: Mapping[str, str],
    *,
    before: Callable[[], object] = lambda: None,
) -> list[str]:
    """Calls, as they are typed with names for what differs from run to run.

    `before` is called before each of them.
    """
    lines_of = []
    for line in lines:
        before()
        words = [
            re.sub(r"\{(\w+)\}", lambda match: places[match[1]], word) for word in shlex.split(line)
        ]
        lines_of += caller(Call(line, words))
    return lines_of
