"""Check recordings on this machine's GPUs against independent measurements: python
scripts/gpu_proof.py

Runs small programs unrecorded and recorded, and compares outputs, exit codes, time and memory; step
periods with CUDA events; sums with arithmetic and with the counters of PyTorch's allocator and of
the driver; collectives between two processes; CUDA graphs; a trace that the agent takes; a replay.
Prints a table, and writes it as table.md and table.json beside small recordings. Without a GPU the
programs run on the CPU, and what needs a device is skipped by name.

It calls the command line alone and reads documented files. Exit code 5: a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "scripts" / "gpu_programs"
EXAMPLE = ROOT / "examples" / "train_gpt.py"
TRACELOOM = [sys.executable, "-m", "traceloom"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PROCESS_LIMIT_S = 180
KEPT_BYTES = 300_000
WINDOW = range(
    4, 8
)  # steps 3 to 7 are recorded; beginning to record falls into the period before step 3
OTHER_PROGRAMS = ("fail", "loader", "cnn", "lstm", "profiled", "inference", "compiled")
# What a check leaves out without a device, where the rest of it runs.
DEVICE_PARTS = {
    "period": ": CUDA events",
    "sums": ": copies and allocations",
    "replay": ": GPU work",
    "agent": ": power, NVML",
}
PROBE = """
import importlib.util, json, torch
devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "devices": devices, "triton": bool(importlib.util.find_spec("triton"))}))
"""


class CheckError(Exception):
    """A check could not be made, with the reason."""


class MissingError(Exception):
    """This machine lacks what a check needs."""


Pair = tuple[float, float]  # what is expected, and what was recorded


@dataclass
class Row:
    """One line of the table."""

    check: str
    expected: str  # unrecorded, or known otherwise
    recorded: str
    difference: str
    tolerance: str
    verdict: str
    seconds: float


@dataclass
class Table:
    """All rows, each with the time since the one before."""

    rows: list[Row] = field(default_factory=list)
    last: float = field(default_factory=time.monotonic)

    def add(self, check: str, verdict: str, *cells: str) -> None:
        """Add a row, and say so on standard error."""
        now = time.monotonic()
        self.rows.append(
            Row(check, *[*cells, "", "", "", ""][:4], verdict, round(now - self.last, 1))
        )
        print(f"{now - self.last:6.1f} s  {check}: {verdict}", file=sys.stderr, flush=True)
        self.last = now

    def compare(
        self, check: str, values: Pair, unit: str = "", *, share: float = 0, slack: float = 0
    ) -> None:
        """Both values must agree, within a share of the expected one, and a slack."""
        expected, found = values
        parts = [f"{share:.0%}"] * bool(share) + [_show(slack, unit)] * bool(slack)
        holds = abs(found - expected) <= share * expected + slack
        self._judge(check, holds, values, unit, " + ".join(parts) and f"± {' + '.join(parts)}")

    def check_limit(
        self, check: str, values: Pair, unit: str, *, factor: float, slack: float
    ) -> None:
        """The second value must not be above the factor times the first, and a slack."""
        holds = values[1] <= factor * values[0] + slack
        self._judge(check, holds, values, unit, f"≤ {factor:g} x + {_show(slack, unit)}")

    def _judge(self, check: str, holds: bool, values: Pair, unit: str, tolerance: str) -> None:
        expected, found = values
        difference = (
            "none"
            if found == expected
            else f"{found / expected - 1:+.1%}"
            if expected
            else str(found)
        )
        verdict = "pass" if holds else "FAIL"
        self.add(
            check,
            verdict,
            _show(expected, unit),
            _show(found, unit),
            difference,
            tolerance or "equal",
        )

    def render(self) -> str:
        """As Markdown, which a terminal can show, too."""
        heads = [
            "check",
            "unrecorded or known",
            "recorded",
            "difference",
            "tolerance",
            "verdict",
            "seconds",
        ]
        cells = [
            heads,
            *([str(cell).replace("|", "/") for cell in asdict(row).values()] for row in self.rows),
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
        lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
        return "\n".join(
            [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
        )

    @property
    def exit_code(self) -> int:
        """5 where a check failed."""
        return 5 if any(row.verdict.startswith("FAIL") for row in self.rows) else 0


def _show(value: float, unit: str) -> str:
    if unit == "ns":
        return f"{value / 1e6:.3f} ms"
    if unit == "bytes":
        return f"{value / 1e6:.1f} MB"
    return f"{value:g} {unit}".strip() if abs(value) < 1e15 else f"{value:.4e} {unit}".strip()


class Driver:
    """What NVML counts on all devices of the machine; nothing where `reason` says why."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.reason = ""
        if importlib.util.find_spec("pynvml") is None:
            self.reason = "nvidia-ml-py is not installed"
            return
        import pynvml

        self.nvml = pynvml
        try:
            pynvml.nvmlInit()
            self.handles = [
                pynvml.nvmlDeviceGetHandleByIndex(one) for one in range(pynvml.nvmlDeviceGetCount())
            ]
            self.read_used_bytes()
            self.read_joules()
        except pynvml.NVMLError as error:
            self.handles, self.reason = [], f"NVML: {error}"

    def read_used_bytes(self) -> int:
        """Memory in use, by whomever."""
        return sum(int(self.nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self.handles)

    def read_joules(self) -> float:
        """Energy since the driver was loaded."""
        return (
            sum(self.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self.handles)
            / 1000
        )


@dataclass
class Run:
    """One process that has ended."""

    code: int
    out: str
    err: str
    seconds: float
    host_peak_bytes: int
    device_peak_bytes: int  # of all processes of the machine, above what was in use before
    measures: Path
    capture: Path

    def read_measures(self) -> dict[str, Any]:
        """What scripts/gpu_programs/measured.py wrote of rank 0."""
        return dict(json.loads((self.measures / "rank0.json").read_text(encoding="utf-8")))

    def read_answer(self) -> dict[str, Any]:
        """What a program that prints JSON has printed."""
        if self.code:
            raise CheckError(f"exit code {self.code}: {self.err.strip()[-200:]}")
        return dict(json.loads(self.out.strip().splitlines()[-1]))

    def mask_output(self) -> tuple[str, str]:
        """Both streams without what differs from run to run: times, and log lines (launcher,
        Kineto, Traceloom).
        """
        logs = re.compile(r"\[?[IWE]\d{4} |[A-Z]+:\d{4}-\d\d-\d\d |traceloom: |\*{5}")
        err = [line for line in self.err.splitlines() if not logs.match(line)]
        return re.sub(r"[ \d.]+ ms\b", " … ms", self.out), "\n".join(err)


class Proof:
    """The checks, and what they share."""

    def __init__(self, work: Path, output: Path, device: str | None, budget_s: float) -> None:
        self.work, self.output, self.table, self.driver = work, output, Table(), Driver()
        self.began = time.monotonic()
        self.end = self.began + budget_s
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith("TRACELOOM")
        } | {
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONWARNINGS": "ignore",
            "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        }
        self.machine: dict[str, Any] = self.run([sys.executable, "-c", PROBE]).read_answer()
        self.machine |= {"python": platform.python_version(), "processors": os.cpu_count()}
        self.device = device or ("cuda" if self.machine["devices"] else "cpu")
        self.gpu_count = len(self.machine["devices"]) if self.device == "cuda" else 0
        if self.device == "cpu":
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        # Without a GPU it is processor time, which depends on what else runs at that moment.
        self.time_factor = 1.5 if self.gpu_count else 3
        self.kept: list[dict[str, Any]] = []

    def need_device(self) -> None:
        """Leave the rest of a check out where there is no GPU."""
        if not self.gpu_count:
            raise MissingError("no CUDA device")

    # Processes.

    def run(self, command: list[str], capture: Path | None = None) -> Run:
        """Run a command to its end, and measure it from outside."""
        folder = Path(tempfile.mkdtemp(dir=self.work))
        command = [word.replace("{measures}", str(folder)) for word in command]
        before = device_peak = self.driver.read_used_bytes()
        began = time.monotonic()
        end = min(self.end, began + PROCESS_LIMIT_S)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = self.start(command, out, err)
            try:
                while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                    device_peak = max(device_peak, self.driver.read_used_bytes())
                    if time.monotonic() > end:
                        raise TimeoutError(
                            f"stopped after {end - began:.0f} s: {' '.join(command)[-120:]}"
                        )
                    time.sleep(0.02)
                process.returncode = os.waitstatus_to_exitcode(ended[1])
            finally:
                stop(process)
        texts = [
            (folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err")
        ]
        host_peak = ended[2].ru_maxrss * 1024
        seconds = time.monotonic() - began
        return Run(
            process.returncode,
            *texts,
            seconds,
            host_peak,
            device_peak - before,
            folder,
            capture or folder,
        )

    def start(
        self, command: list[str], out: IO[bytes], err: IO[bytes], **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a command in a group of its own."""
        environment = self.environment | more
        return subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, cwd=self.work, start_new_session=True
        )

    def record(self, name: str, command: list[str], *options: str) -> Run:
        """Run a command under `traceloom record`."""
        capture = self.work / name
        words = [
            *TRACELOOM,
            "record",
            "--quiet",
            "--force",
            "-o",
            str(capture),
            *options,
            "--",
            *command,
        ]
        return self.run(words, capture)

    def call_json(self, *words: str) -> Any:
        """What a verb prints as JSON."""
        run = self.run([*TRACELOOM, *words, "--json"])
        if run.code:
            raise CheckError(f"{words[0]}: {run.err.strip()[-300:]}")
        return json.loads(run.out)

    @functools.cache  # noqa: B019  (there is one object)
    def read_report(self, capture: Path) -> dict[str, Any]:
        """The report of a capture."""
        return dict(self.call_json("report", str(capture), "--no-cache"))

    # The programs.

    def build_command(self, name: str) -> tuple[list[str], list[str]]:
        """The command of a program, and options of its recording."""
        measured = [str(PROGRAMS / "measured.py"), "{measures}"]
        python = [sys.executable, *measured]
        small = ["--width", "64", "--heads", "4", "--context", "64"]
        example = [
            str(EXAMPLE),
            "--steps",
            "12",
            "--layers",
            "2",
            *(["--width", "512"] if self.gpu_count else small),
        ]
        example += ["--heads", "8"] if self.gpu_count else []
        plain = ["--workers", "0", "--accumulate", "1"]
        here = ["--device", self.device]
        if name == "gpt":
            return [*python, *example, *here, *plain], ["--graph"]  # which is replayed, too
        if name == "loader":
            return [*python, *example, *here, "--workers", "2", "--accumulate", "4"], []
        if name == "compiled":
            self._need_compiler()
            return [*python, *example, *here, *plain, "--compile"], []
        if name == "ddp":
            device = "cuda" if self.gpu_count > 1 else "cpu"
            return [*TORCHRUN, *measured, *example, "--device", device, *plain], []
        if name == "graph":
            self.need_device()
            return [*python, str(ROOT / "tests" / "support" / "gpu_program.py")], [
                "--steps",
                "2..4",
            ]
        return [*python, str(PROGRAMS / "small.py"), name, self.device], []

    def _need_compiler(self) -> None:
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise MissingError("no C++ compiler")
        if self.gpu_count and not self.machine["triton"]:
            raise MissingError("triton is not installed")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise MissingError("no headers of Python (Python.h)")

    @functools.cache  # noqa: B019
    def run_both(self, name: str) -> tuple[Run, Run]:
        """A program unrecorded, and recorded."""
        command, options = self.build_command(name)
        try:
            unrecorded = self.run(command)
        except TimeoutError:
            raise MissingError(f"unrecorded, it takes more than {PROCESS_LIMIT_S} s here") from None
        if unrecorded.code != (3 if name == "fail" else 0):
            raise CheckError(
                f"unrecorded: exit code {unrecorded.code}: {unrecorded.err.strip()[-200:]}"
            )
        return unrecorded, self.record(name, command, *options)

    def check_program(self, name: str) -> None:
        """Outputs, exit code, time and memory of a program."""
        both = self.run_both(name)
        texts = [(one.code, *one.mask_output()) for one in both]
        shown = [f"exit code {one.code}, {len(one.out.splitlines())} lines" for one in both]
        if texts[0] == texts[1]:
            self.table.add(f"{name}: output", "pass", *shown, "none", "equal")
        else:
            path = self.output / f"{name}.differs.json"
            path.write_text(json.dumps(texts, indent=1), encoding="utf-8")
            self.table.add(f"{name}: output", "FAIL", *shown, f"in {path.name}", "equal")
        measured = [one.read_measures() for one in both]
        if len(measured[0]["wall_ns"]) > WINDOW.stop:
            fastest = find_fastest_steps(*measured)
            if (
                fastest[1] > self.time_factor * fastest[0] + 1e6
            ):  # perhaps others used the machine: once more, and no third time
                again = self.record(f"{name}-again", self.build_command(name)[0])
                fastest = (
                    fastest[0],
                    min(fastest[1], find_fastest_steps(measured[0], again.read_measures())[1]),
                )
            self.table.check_limit(
                f"{name}: fastest step", fastest, "ns", factor=self.time_factor, slack=1e6
            )
        seconds = (1e9 * both[0].seconds, 1e9 * both[1].seconds)
        self.table.check_limit(f"{name}: whole run", seconds, "ns", factor=2, slack=10e9)
        host = (both[0].host_peak_bytes, both[1].host_peak_bytes)
        self.table.check_limit(
            f"{name}: peak of host memory", host, "bytes", factor=1.25, slack=250e6
        )
        if all("device_peak_bytes" in one for one in measured):
            peaks = (measured[0]["device_peak_bytes"], measured[1]["device_peak_bytes"])
            self.table.compare(f"{name}: peak of PyTorch's allocator", peaks, "bytes", share=0.01)
            if self.driver.handles:
                peaks = (both[0].device_peak_bytes, both[1].device_peak_bytes)
                self.table.check_limit(
                    f"{name}: peak of device memory (NVML)", peaks, "bytes", factor=1.1, slack=512e6
                )

    # Against independent means.

    def check_period(self) -> None:
        """The steps of the report against the program's own clock, and on a GPU against CUDA
        events.
        """
        _, recorded = self.run_both("gpt")
        (rank,) = self.read_report(recorded.capture)["ranks"]
        reported = statistics.mean(
            step["duration_ns"] for step in rank["steps"] if step["step"] in WINDOW
        )
        clock = statistics.mean(list_step_times(recorded.read_measures(), "wall_ns"))
        self.table.compare(
            "step period, host's clock", (clock, reported), "ns", share=0.03, slack=0.5e6
        )
        self.keep("gpt", recorded.capture)
        self.need_device()
        events = statistics.mean(list_step_times(recorded.read_measures(), "event_ns"))
        self.table.compare(
            "step period, CUDA events", (events, reported), "ns", share=0.05, slack=0.5e6
        )

    def check_sums(self) -> None:
        """Sums of the report against arithmetic, clocks, and the allocator's own counters."""
        words = [
            sys.executable,
            str(PROGRAMS / "measured.py"),
            "{measures}",
            str(PROGRAMS / "counted.py"),
            self.device,
        ]
        run = self.record("sums", words, "--memory")
        known, measured, report = (
            run.read_answer(),
            run.read_measures(),
            self.read_report(run.capture),
        )
        (products,) = [row for row in report["operators"] if row["name"] == "aten::mm"]
        self.table.compare("products: count", (known["product_count"], products["count"]))
        flops = sum(
            row["flops"] for row in report["roofline"]["operators"] if row["name"] == "aten::mm"
        )
        self.table.compare("products: arithmetic", (known["product_flops"], flops), "FLOP")
        times = (known["products_ns"], products["device_ns" if self.gpu_count else "total_ns"])
        self.table.compare("products: time", times, "ns", share=0.1, slack=5e6)
        (memory,) = [
            row for row in report["memory"]["devices"] if row["device_type"] == self.device
        ]
        expected = measured["device_peak_bytes"] if self.gpu_count else known["peak_bytes"]
        self.table.compare("memory: peak", (expected, memory["peak_bytes"]), "bytes", share=0.01)
        self.keep("sums", run.capture)
        self.need_device()
        self.table.compare(
            "memory: allocations", (measured["device_allocations"], memory["allocation_count"])
        )
        copied = sum_bytes(report["copies"]["kinds"], "HtoD")
        self.table.compare(
            "copies: bytes to the device", (known["copied_bytes"], copied), "bytes", slack=4096
        )

    def check_collectives(self, backend: str) -> None:
        """All-reduces of two processes: how many, of how many bytes, how long."""
        if backend == "nccl":
            self.need_device()
            if self.gpu_count < 2:
                raise MissingError("NCCL between two processes needs two GPUs, and there is one")
        run = self.record(backend, [*TORCHRUN, str(PROGRAMS / "collectives.py"), backend])
        known, rows = (
            run.read_answer(),
            self.read_report(run.capture)["communication"]["collectives"],
        )
        rows = [row for row in rows if row["kind"] == "all_reduce"]
        self.table.compare(
            f"{backend}: all-reduces", (2 * known["count"], sum(row["count"] for row in rows))
        )
        self.table.compare(
            f"{backend}: bytes", (2 * known["bytes"], sum_bytes(rows, "all_reduce")), "bytes"
        )
        fastest = (known["fastest_ns"], min(row["min_ns"] for row in rows))
        self.table.compare(f"{backend}: the fastest one", fastest, "ns", share=0.25, slack=0.3e6)
        self.keep(backend, run.capture)

    def check_gradients(self) -> None:
        """What two data-parallel ranks exchange in 5 recorded steps are the gradients."""
        _, recorded = self.run_both("ddp")
        exchanged = sum_bytes(
            self.read_report(recorded.capture)["communication"]["collectives"], "all_reduce"
        )
        expected = 2 * 5 * recorded.read_measures()["gradient_bytes"]
        self.table.compare("ddp: bytes of the gradients", (expected, exchanged), "bytes")
        self.keep("ddp", recorded.capture)

    def check_graph(self) -> None:
        """Two steps of the program were recorded, each with one replay and one copy of 512 rows of
        256 bfloat16.
        """
        _, recorded = self.run_both("graph")
        report = self.read_report(recorded.capture)
        replays = sum(row["replay_count"] for row in report["graph_launches"]["graphs"])
        self.table.compare("CUDA graphs: replays", (2, replays))
        copied = sum_bytes(report["copies"]["kinds"], "HtoD")
        self.table.compare("CUDA graphs: bytes to the device", (2 * 512 * 256 * 2, copied), "bytes")
        self.keep("graph", recorded.capture)

    def check_replay(self) -> None:
        """The recorded step, run again from its recording."""
        unrecorded, recorded = self.run_both("gpt")
        answer = self.call_json(
            "replay", str(recorded.capture), "--max-time", "10", "--device", self.device
        )
        share = sum(row["count_share"] for row in answer["coverage"] if row["outcome"] == "run")
        self.table.compare("replay: share of ops that ran", (1, share), share=0.02)
        (whole,) = answer["whole"]
        columns = (
            ("event_ns", "replayed_ns") if self.gpu_count else ("process_ns", "replayed_cpu_ns")
        )  # of all threads
        step = statistics.median(list_step_times(unrecorded.read_measures(), columns[0]))
        self.table.check_limit(
            "replay: a pass, and a step",
            (step, whole[columns[1]]),
            "ns",
            factor=self.time_factor,
            slack=2e6,
        )
        self.need_device()
        self.table.compare(
            "replay: GPU work",
            (whole["recorded_gpu_ns"], whole["replayed_gpu_ns"]),
            "ns",
            share=0.2,
        )

    def check_agent(self) -> None:
        """A trace of a program that runs PyTorch alone, requested while it runs."""
        if not all(
            map(importlib.util.find_spec, ("psutil", "uvicorn", "starlette", "prometheus_client"))
        ):
            raise MissingError("traceloom[agent] is not installed")
        short = Path(
            tempfile.mkdtemp(prefix="tl")
        )  # sockets lie in it, and their names must be short
        config, job = short / "agent.toml", short / "job"
        names = ("socket", "history", "audit", "kineto", "requests", "traces")
        config.write_text(
            "[paths]\n" + "".join(f'{one} = "{short}/{one}"\n' for one in names), encoding="utf-8"
        )
        options = ["--config", str(config)]
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, short, ignore_errors=True)
            log, out = (stack.enter_context(path.open("wb")) for path in (short / "log", job))
            agent = self.start([*TRACELOOM, "agent", "run", *options], log, log)
            stack.callback(stop, agent)
            status = [*TRACELOOM, "agent", "status", *options]
            self._wait_for(lambda: self.run(status).code == 0, "the agent answers")
            variables = self.call_json("agent", "env", *options)
            command = self.build_command("gpt")[0]
            command = [
                sys.executable,
                *command[command.index(str(EXAMPLE)) :],
                "--steps",
                "1000000",
            ]
            program = self.start(command, out, out, **variables)
            stack.callback(stop, program)
            self._wait_for(
                lambda: "step  20" in job.read_text(encoding="utf-8"), "the program makes steps"
            )
            before = len(job.read_text(encoding="utf-8").splitlines())
            self._request(program.pid, "agent", "timeline", "--steps", "3", *options)
            printed = job.read_text(encoding="utf-8").splitlines()[before:-1]
            self._judge_trace(
                self.work / "agent", [1e6 * float(line.split()[-2]) for line in printed]
            )
            self.keep("agent", self.work / "agent")
            began, joules = time.time_ns(), self.driver.read_joules()
            self._request(program.pid, "telemetry", "telemetry", "--duration", "3s", *options)
            watts = 1e9 * (self.driver.read_joules() - joules) / (time.time_ns() - began)
            self.table.compare("agent: the program goes on", (1, program.poll() is None))
            self._judge_energy(self.work / "telemetry", watts)

    def _request(self, pid: int, name: str, profilers: str, *options: str) -> None:
        words = [
            "trace",
            "--pid",
            str(pid),
            "--profilers",
            profilers,
            "-o",
            str(self.work / name),
            *options,
        ]
        run = self.run([*TRACELOOM, *words])
        if run.code:
            raise CheckError(f"trace: {run.err.strip()[-300:]}")

    def _judge_trace(self, capture: Path, printed_ns: list[float]) -> None:
        """It holds the steps requested, and each took as long as some that the program printed
        meanwhile.
        """
        (path,) = capture.glob("*.kineto.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        starts = sorted(
            one["ts"] for one in events if str(one.get("name")).startswith("Optimizer.step#")
        )
        self.table.compare("agent: steps of at least 3", (3, min(len(starts), 3)))
        period = 1000 * statistics.median(
            later - earlier for earlier, later in itertools.pairwise(starts)
        )
        nearest = min(max(period, min(printed_ns)), max(printed_ns))
        self.table.compare(
            "agent: step period, as printed", (nearest, period), "ns", share=0.2, slack=1e6
        )
        if self.gpu_count:
            kernels = sum(one.get("cat") == "kernel" for one in events)
            self.table.add("agent: kernels", "pass" if kernels else "FAIL", "> 0", str(kernels))

    def _judge_energy(self, capture: Path, watts: float) -> None:
        """The power by the agent's telemetry against that by NVML, read before and after it by this
        script.
        """
        (path,) = capture.glob("*.telemetry.json.gz")
        series = json.loads(gzip.decompress(path.read_bytes()))["series"]
        self.need_device()
        series = [
            one
            for one in series
            if one["metric"] == "gpu_energy_joules_total" and len(one["values"]) > 1
        ]
        if not series or not watts:
            raise MissingError(self.driver.reason or "the device counts no energy")
        joules = sum(one["values"][-1] - one["values"][0] for one in series)
        found = 1e9 * joules / (series[0]["times_ns"][-1] - series[0]["times_ns"][0])
        self.table.compare("agent: power, NVML", (watts, found), "W", share=0.15, slack=5)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        end = min(self.end, time.monotonic() + PROCESS_LIMIT_S)
        while not condition():
            if time.monotonic() > end:
                raise CheckError(f"not in time: {what}")
            time.sleep(0.2)

    # Recordings to keep.

    def keep(self, name: str, capture: Path) -> None:
        """Copy a recording without directories of this machine; of a trace too large the later
        events are cut.
        """
        folder = self.output / "recordings" / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(capture.glob("*.json*")):
            if re.fullmatch(r"rank\d+\.capture\.json", path.name):
                continue  # capture.json holds it
            zipped = path.suffix == ".gz"
            text = (gzip.decompress(path.read_bytes()) if zipped else path.read_bytes()).decode()
            for directory in (str(self.work), str(ROOT), sys.prefix):
                text = text.replace(f"{directory}/", "")
            data, share = _pack(text, zipped), 1.0
            if len(data) > KEPT_BYTES and ".kineto." in path.name:
                document = json.loads(text)
                events = sorted(document["traceEvents"], key=lambda one: float(one.get("ts", 0)))
                while len(data) > KEPT_BYTES:
                    share *= 0.9 * KEPT_BYTES / len(data)
                    document["traceEvents"] = events[: int(share * len(events))]
                    data = _pack(json.dumps(document, separators=(",", ":")), zipped)
            fits = len(data) <= KEPT_BYTES
            if fits:
                (folder / path.name).write_bytes(data)
            kept = {
                "file": f"{name}/{path.name}",
                "bytes": len(data),
                "kept_share": round(share, 2) if fits else 0,
            }
            self.kept.append(kept)

    # All of it.

    def list_checks(self) -> dict[str, Callable[[], None]]:
        """By name, what matters most first: time may run out."""
        program, collectives = self.check_program, self.check_collectives
        return {
            "gpt": lambda: program("gpt"),
            "period": self.check_period,
            "sums": self.check_sums,
            "graph": lambda: program("graph"),
            "graph-sums": self.check_graph,
            "ddp": lambda: program("ddp"),
            "gradients": self.check_gradients,
            "nccl": lambda: collectives("nccl"),
            "gloo": lambda: collectives("gloo"),
            "replay": self.check_replay,
            "agent": self.check_agent,
            **{name: functools.partial(program, name) for name in OTHER_PROGRAMS},
        }

    def make(self, names: list[str]) -> None:
        """Make the checks of these names, or all: none stops another."""
        for name, check in self.list_checks().items():
            if names and name not in names:
                continue
            if time.monotonic() > self.end - 5:
                self.table.add(name, "not run: no time was left")
                continue
            try:
                check()
            except (MissingError, CheckError, OSError, ValueError, LookupError, TypeError) as error:
                if time.monotonic() > self.end:
                    self.table.add(name, "not run: no time was left for all of it")
                elif isinstance(error, MissingError):
                    self.table.add(f"{name}{DEVICE_PARTS.get(name, '')}", f"skipped: {error}")
                else:
                    text = (
                        str(error)
                        if isinstance(error, CheckError)
                        else f"{type(error).__name__}: {error}"
                    )
                    self.table.add(name, f"FAIL: {' '.join(text.split())}")

    def write(self) -> None:
        """Write the table, and print it."""
        seconds = round(time.monotonic() - self.began, 1)
        document = {
            "machine": self.machine,
            "device": self.device,
            "seconds": seconds,
            "rows": [asdict(row) for row in self.table.rows],
            "recordings": self.kept,
        }
        (self.output / "table.json").write_text(
            json.dumps(document, indent=1) + "\n", encoding="utf-8"
        )
        text = "\n\n".join(
            [
                ", ".join(f"{key} {value}" for key, value in self.machine.items()),
                self.table.render(),
            ]
        )
        (self.output / "table.md").write_text(f"{text}\n", encoding="utf-8")
        verdicts = [row.verdict.partition(":")[0] for row in self.table.rows]
        counts = ", ".join(
            f"{verdicts.count(one)} {one}" for one in ("pass", "FAIL", "skipped", "not run")
        )
        print(f"{text}\n\n{counts}; {seconds:.0f} s; wrote {self.output}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group; a launcher first has the time to end its own."""
    if process.returncode is None and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        process.wait()


def list_step_times(measured: dict[str, Any], column: str) -> list[int]:
    """How long each step of the window took, from the end of the step before."""
    ends = measured[column]
    return [ends[number] - ends[number - 1] for number in WINDOW]


def find_fastest_steps(unrecorded: dict[str, Any], recorded: dict[str, Any]) -> Pair:
    """By CUDA events where both have them, else by the processor time of the thread that makes the
    steps.
    """
    column = "event_ns" if "event_ns" in unrecorded and "event_ns" in recorded else "cpu_ns"
    return min(list_step_times(unrecorded, column)), min(list_step_times(recorded, column))


def sum_bytes(rows: list[dict[str, Any]], kind: str) -> int:
    """The bytes of all rows of a kind."""
    return sum(row["bytes"] for row in rows if row["kind"] == kind)


def _pack(text: str, zipped: bool) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0) if zipped else text.encode()


def main() -> int:
    """Make the checks; the exit code is 5 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=ROOT / "gpu-proof",
        help="directory (default: gpu-proof)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where (default: cuda, if there is one)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=600,
        metavar="S",
        help="seconds for all of it (default: 600)",
    )
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="only these checks, as gpt,sums"
    )
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-proof-", ignore_cleanup_errors=True) as work:
        try:
            proof = Proof(Path(work), output, arguments.device, arguments.budget)
        except (CheckError, OSError) as error:
            parser.error(f"PyTorch does not run here: {error}")
        if proof.device == "cuda" and not proof.gpu_count:
            parser.error("there is no CUDA device")
        names = [name for name in arguments.only.split(",") if name]
        if unknown := set(names) - set(proof.list_checks()):
            parser.error(
                f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(proof.list_checks())}"
            )
        proof.make(names)
        proof.write()
    return proof.table.exit_code


if __name__ == "__main__":
    sys.exit(main())
