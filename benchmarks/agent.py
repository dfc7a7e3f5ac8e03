"""What the host agent costs: processor time and memory while it watches 8 devices, and how quickly
it answers.

    python benchmarks/agent.py [--seconds 120] [--devices 8] [--otlp] [--rules]
    python benchmarks/agent.py --traces [--seconds 120] [--clients 1000]

Starts the agent as a user would (`traceloom agent run --simulate 8`), scrapes it as Prometheus
does, asks it 100 times a second, fills a history with a day of 400 series, and looks at 300 rules
of triggers, which `--rules` does alone. Beside it stands what others publish about themselves.

With `--traces`: what traces on demand cost. Clients are processes that poll as libkineto does, with
PyTorch's library mapped; traces and steps are those of a real training loop. Steps are compared in
pairs: two processes, of which one knows of no agent, run in turns of seconds. Processor seconds
hold on a busy machine too; times from a request to a file, skews and late answers are upper bounds
there.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import importlib.util
import json
import mmap
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from traceloom.agent.config import HistorySettings, MetricRule
from traceloom.agent.history import History
from traceloom.agent.metrics import Reading
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.triggers.watches import MetricWatch, SeriesValues, match_rule_series
from traceloom.server.client import AgentClient

LIMITS = {
    "processor": 0.01,
    "memory": 64e6,
    "memory with OTLP": 76e6,
    "query": 0.020,
    "day": 200e6,
    "hour": 0.050,
    "rules": 0.020,
    "polls": 0.03,
    "late": 0,
    "steps": 4.0,
    "time": 8.0,
    "skew": 0.020,
    "outside": 1.02,
    "clock": 1.01,
}
PEERS = """\
published by peers: dcgm-exporter: 100m CPU and 128 MiB (requests and limits that its Helm chart suggests), and a
host engine of DCGM beside it; dynolog: "lightweight", no figure; neither keeps history or answers queries"""


class Unix(http.client.HTTPConnection):
    """HTTP over a unix socket, kept open."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self.path))

    def ask(self, route: str) -> bytes:
        try:
            self.request("GET", route)
            response = self.getresponse()
        except http.client.RemoteDisconnected:  # the agent closes what was idle for ten seconds
            self.close()
            self.request("GET", route)
            response = self.getresponse()
        body = response.read()
        assert response.status == 200, (route, response.status, body[:200])
        return body


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in lines
        if line.startswith(("Rss", "Pss:"))
    }


def line(what: str, value: float, limit: float, shown: str) -> None:
    print(f"{what:52} {shown:>14}   {'within' if value <= limit else 'ABOVE'} the limit")


class Sink(http.server.BaseHTTPRequestHandler):
    """Takes OTLP and forgets it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def running(directory: Path, args: argparse.Namespace) -> None:
    path = directory / "agent.sock"
    config = f'[paths]\nsocket = "{path}"\nhistory = "{directory}/agent.db"\naudit = "{directory}/audit.jsonl"\n'
    if args.otlp:
        sink = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        config += (
            f'[otlp]\nendpoint = "http://127.0.0.1:{sink.server_port}/v1/metrics"\nperiod = 10.0\n'
        )
    (directory / "agent.toml").write_text(config)
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "agent",
        "run",
        "-q",
        "--simulate",
        str(args.devices),
    ]
    agent = subprocess.Popen(
        [*command, "--config", str(directory / "agent.toml")], stderr=subprocess.DEVNULL
    )
    try:
        while not path.exists():
            time.sleep(0.05)
        connection = Unix(path)
        time.sleep(15)  # everything has run once
        status = json.loads(connection.ask("/api/v1/status"))
        before, start = processor_s(agent.pid), time.monotonic()
        scrapes = []
        while time.monotonic() - start < args.seconds:
            at = time.monotonic()
            connection.ask("/metrics")
            scrapes.append(time.monotonic() - at)
            time.sleep(max(0.0, 10 - (time.monotonic() - at)))
        share = (processor_s(agent.pid) - before) / (time.monotonic() - start)
        used = memory(agent.pid)
        print(
            f"{args.devices} simulated devices, {status['series']} series, scraped every 10 s for {args.seconds} s"
        )
        line("processor time of a core", share, LIMITS["processor"], f"{share:.2%}")
        limit = LIMITS["memory with OTLP" if args.otlp else "memory"]
        line("resident memory", used["Rss"], limit, f"{used['Rss'] / 1e6:.1f} MB")
        print(f"{'  of it its own (proportional)':52} {used['Pss'] / 1e6:>11.1f} MB")
        print(f"{'a scrape (median)':52} {statistics.median(scrapes) * 1e3:>11.1f} ms")
        queries(connection, agent.pid)
    finally:
        agent.terminate()
        agent.wait(30)


def queries(connection: Unix, pid: int) -> None:
    routes = [
        "/api/v1/query?metric=gpu_power_watts&since=2m",
        "/api/v1/query?metric=gpu_power_watts&since=2m&by=job",
        "/api/v1/query?metric=host_cpu_seconds_total&since=2m",
        "/api/v1/devices",
    ]
    times = []
    before, start = processor_s(pid), time.monotonic()
    for number in range(1000):
        due = start + number / 100
        time.sleep(max(0.0, due - time.monotonic()))
        at = time.monotonic()
        connection.ask(routes[number % len(routes)])
        times.append(time.monotonic() - at)
    share = (processor_s(pid) - before) / (time.monotonic() - start)
    times.sort()
    line(
        "a query at 100/s, 99th percentile",
        times[990],
        LIMITS["query"],
        f"{times[990] * 1e3:.1f} ms",
    )
    print(f"{'  median, longest':52} {times[500] * 1e3:>6.1f}, {times[-1] * 1e3:.1f} ms")
    print(f"{'  processor time of a core meanwhile':52} {share:>13.1%}")


def a_day(directory: Path) -> None:
    """8,640 ticks of 400 series in ten metrics; then random hours of random series."""
    path = directory / "day.db"
    history = History(path, HistorySettings(max_mb=10_000))
    metrics = [
        "gpu_power_watts",
        "gpu_busy_ratio",
        "gpu_sm_active_ratio",
        "gpu_dram_active_ratio",
        "gpu_memory_used_bytes",
        "gpu_energy_joules_total",
        "gpu_clock_hertz",
        "gpu_temperature_celsius",
        "gpu_pipe_active_ratio",
        "gpu_flops",
    ]
    rng, start_ns = random.Random(1), 1_700_000_000 * 10**9
    series = [(metric, (f"GPU-{device:032x}",)) for metric in metrics for device in range(40)]
    before = time.process_time()
    for tick in range(8640):
        history.write(start_ns + tick * 10**10, [(one, rng.random()) for one in series])
    wrote = (time.process_time() - before) / 8640
    history.close()
    size = path.stat().st_size
    line("a day of 400 series on disk", size, LIMITS["day"], f"{size / 1e6:.0f} MB")
    print(f"{'  processor time of a tick':52} {wrote * 1e3:>11.1f} ms")
    times = []
    for _ in range(50):
        since = start_ns + rng.randrange(23 * 3600) * 10**9
        at = time.monotonic()
        points = history.query(rng.choice(metrics), since, since + 3600 * 10**9)
        times.append(time.monotonic() - at)
        assert len(points[0].values) in (360, 361)
    line(
        "an hour of one metric, longest of 50",
        max(times),
        LIMITS["hour"],
        f"{max(times) * 1e3:.1f} ms",
    )


def rules() -> None:
    """300 rules, each for a job of its own, among 7,400 series delivered every 10 s and looked at
    each second.
    """
    host_snapshot = Snapshot()
    of_jobs = [
        MetricRule(name=f"r{n}", metric="gpu_flops", below=-1.0, for_seconds=30.0) for n in range(2)
    ]
    of_jobs += [
        MetricRule(
            name=f"j{job}",
            metric="dataloader_wait_seconds_total",
            above=0.5,
            for_seconds=30.0,
            where={"job": f"{job}"},
        )
        for job in range(298)
    ]
    values = SeriesValues(host_snapshot, [match_rule_series(rule) for rule in of_jobs])
    watches = [MetricWatch(rule, values, lambda _: True) for rule in of_jobs]
    fresh, quiet = [], []
    for tick in range(200):
        now_ns = 10**18 + tick * 10**9
        if tick % 10 == 0:
            waits = [
                Reading("dataloader_wait_seconds_total", (f"{n // 8}", f"{n % 8}"), tick)
                for n in range(2400)
            ]
            host_snapshot.put(
                "jobs",
                [*waits, *(Reading("process_threads", (f"{n}",), 1.0) for n in range(5000))],
                now_ns,
            )
        before = time.process_time()
        values.refresh()
        firing = sum(1 for watch in watches for _ in watch.check(now_ns))
        (quiet if tick % 10 else fresh).append(time.process_time() - before)
    assert firing == 298 * 8
    line(
        "300 rules, 7,400 new series, longest of 20 looks",
        max(fresh),
        LIMITS["rules"],
        f"{max(fresh) * 1e3:.1f} ms",
    )
    print(
        f"{'  a look when nothing is new, with 2,384 firing':52} {statistics.median(quiet) * 1e3:>11.1f} ms"
    )


TRAINS = """
import os, sys, time
import torch
torch.set_num_threads(1)
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(8)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with open(sys.argv[1], "w", buffering=1) as log:
    while True:
        began = time.perf_counter_ns()
        model(torch.ones(64, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        log.write(f"{time.time_ns()} {time.perf_counter_ns() - began}\\n")
"""
TURN_S = 2.0
LATE_S = 0.09  # libkineto waits no longer


def started(directory: Path) -> tuple[subprocess.Popen[bytes], AgentClient]:
    (directory / "agent.toml").write_text(
        f'[paths]\nsocket = "{directory}/s"\nhistory = "{directory}/agent.db"\naudit = "{directory}/audit.jsonl"\n'
    )
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "agent",
        "run",
        "-q",
        "--config",
        str(directory / "agent.toml"),
    ]
    agent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (directory / "kineto" / str(os.geteuid()) / "dynolog").exists():
        time.sleep(0.05)
    return agent, AgentClient(directory / "s", 60)


def polls(directory: Path, args: argparse.Namespace) -> None:
    """So many processes poll every 5 s, spread evenly."""
    agent, _ = started(directory)
    sockets = directory / "kineto" / str(os.geteuid())
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    library = os.open(Path(torch.origin).parent / "lib" / "libtorch_cpu.so", os.O_RDONLY)
    mapped = mmap.mmap(
        library, 4096, prot=mmap.PROT_READ
    )  # which clients inherit, and the step clock looks for
    counts = mmap.mmap(-1, 16 * args.clients)  # of each: answers, late ones
    clients = []
    try:
        time.sleep(10)
        before, start = processor_s(agent.pid), time.monotonic()
        time.sleep(args.seconds / 4)
        alone = (processor_s(agent.pid) - before) / (time.monotonic() - start)
        for number in range(args.clients):
            pid = os.fork()
            if not pid:
                poll_for_ever(sockets, number, args.clients, counts)
            clients.append(pid)
        time.sleep(20)  # all are known
        counted = [struct.unpack_from("=qq", counts, 16 * number) for number in range(args.clients)]
        before, start = processor_s(agent.pid), time.monotonic()
        time.sleep(args.seconds)
        share = (processor_s(agent.pid) - before) / (time.monotonic() - start)
        now = [struct.unpack_from("=qq", counts, 16 * number) for number in range(args.clients)]
    finally:
        for pid in clients:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        agent.terminate()
        agent.wait(60)
        mapped.close()
    answers, late = (
        sum(new[at] - old[at] for new, old in zip(now, counted, strict=True)) for at in (0, 1)
    )
    print(f"{args.clients} processes poll every 5 s: {answers} answers in {args.seconds} s")
    line("processor time of a core, all of the agent", share, LIMITS["polls"], f"{share:.2%}")
    print(f"{'  of it without them':52} {alone:>14.2%}")
    line("answers after 90 ms", late, LIMITS["late"], f"{late}")


def poll_for_ever(sockets: Path, number: int, clients: int, counts: mmap.mmap) -> None:
    """As libkineto does, in a process of its own."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.bind(str(sockets / f"dynoconfigclient{uuid.uuid4()}"))
    payload = struct.pack("=iiqii", 3, 2, 0, os.getpid(), os.getppid())
    poll = struct.pack("=Q32s", len(payload), b"req") + payload
    due, answers, late = time.monotonic() + 5 * number / clients, 0, 0
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        due += 5
        at = time.monotonic()
        client.sendto(poll, str(sockets / "dynolog"))
        client.recv(4096)
        answers, late = answers + 1, late + (time.monotonic() - at > LATE_S)
        struct.pack_into("=qq", counts, 16 * number, answers, late)


def traced(client: AgentClient, **wanted: object) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from a request until its files are verified, as the agent's clock has it, and the
    targets.
    """
    request = client.post("requests", wanted)
    while not (request := client.get(f"requests/{request['id']}"))["done"]:
        time.sleep(0.02)
    targets: list[dict[str, Any]] = request["targets"]
    assert all(target["state"] == "kept" for target in targets), targets
    return (max(target["since_ns"] for target in targets) - request["asked_ns"]) / 1e9, targets


def traces(directory: Path, args: argparse.Namespace) -> None:
    """Requests to real training loops, and what is left of their steps meanwhile."""
    agent, client = started(directory)
    variables = client.get("environment")["variables"]
    logs = [directory / name for name in ("unobserved", "observed", "second")]
    jobs = []
    for log in logs:
        environment = {**os.environ, **({} if log.name == "unobserved" else variables)}
        jobs.append(subprocess.Popen([sys.executable, "-c", TRAINS, str(log)], env=environment))
    unobserved, observed, second = (job.pid for job in jobs)
    try:
        while not all(log.exists() and log.stat().st_size for log in logs):
            time.sleep(0.1)
        time.sleep(25)  # what has just begun is given time to import
        os.kill(unobserved, signal.SIGSTOP)
        took = [traced(client, pids=[observed], steps=3)[0] for _ in range(5)]
        line(
            "request to verified file, --steps 3, median of 5",
            statistics.median(took),
            LIMITS["steps"],
            f"{statistics.median(took):.2f} s",
        )
        print(f"{'  longest':52} {max(took):>12.2f} s")
        took = [traced(client, pids=[observed], duration_s=0.5)[0] for _ in range(5)]
        line(
            "request to verified file, 500 ms, median of 5",
            statistics.median(took),
            LIMITS["time"],
            f"{statistics.median(took):.2f} s",
        )
        print(f"{'  longest':52} {max(took):>12.2f} s")
        skews = []
        for _ in range(5):
            starts = [
                t["window_start_ns"]
                for t in traced(client, pids=[observed, second], duration_s=0.5)[1]
            ]
            skews.append((max(starts) - min(starts)) / 1e9)
        line(
            "skew between two processes, longest of 5",
            max(skews),
            LIMITS["skew"],
            f"{max(skews) * 1e3:.2f} ms",
        )
        os.kill(second, signal.SIGSTOP)
        clock, _ = in_turns(
            client, (unobserved, observed), logs, args.seconds / 2, with_traces=False
        )
        line("steps while it polls and steps are counted", clock, LIMITS["clock"], f"{clock:.4f} x")
        outside, number = in_turns(
            client, (unobserved, observed), logs, args.seconds, with_traces=True
        )
        line(
            f"steps outside of the windows of {number} traces",
            outside,
            LIMITS["outside"],
            f"{outside:.4f} x",
        )
    finally:
        for job in jobs:
            job.kill()
            job.wait()
        agent.terminate()
        agent.wait(60)


def in_turns(
    client: AgentClient,
    pids: tuple[int, int],
    logs: list[Path],
    seconds: float,
    *,
    with_traces: bool,
) -> tuple[float, int]:
    """Steps of the observed process over those of the other, each a median of turns; and how many
    traces there were.
    """
    ratios, windows, end = [], [], time.monotonic() + seconds
    unobserved, observed = pids
    os.kill(observed, signal.SIGSTOP)
    while time.monotonic() < end:
        medians = []
        for pid, log in ((unobserved, logs[0]), (observed, logs[1])):
            os.kill(pid, signal.SIGCONT)
            began_ns, window = time.time_ns() + 200_000_000, (0, 0)  # the first moment warms caches
            if with_traces and pid == observed:
                (target,) = traced(client, pids=[pid], steps=3)[1]
                window = target["window_start_ns"], target["window_end_ns"]
                windows.append(window)
                time.sleep(TURN_S / 2)
            else:
                time.sleep(TURN_S)
            os.kill(pid, signal.SIGSTOP)
            steps = [tuple(map(int, text.split())) for text in log.read_text().splitlines()[:-1]]
            medians.append(
                statistics.median(
                    took
                    for ended, took in steps
                    if ended - took > began_ns and not window[0] <= ended <= window[1] + took
                )
            )
        ratios.append(medians[1] / medians[0])
    os.kill(observed, signal.SIGCONT)
    return statistics.median(ratios), len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--otlp", action="store_true", help="export by OTLP too")
    parser.add_argument("--rules", action="store_true", help="of triggers alone")
    parser.add_argument("--traces", action="store_true", help="what traces on demand cost, instead")
    parser.add_argument("--clients", type=int, default=1000, help="processes that poll")
    args = parser.parse_args()
    if args.traces:
        for part in (polls, traces):
            with tempfile.TemporaryDirectory(prefix="tl") as name:  # names of sockets are short
                part(Path(name), args)
        return
    rules()
    if args.rules:
        return
    with tempfile.TemporaryDirectory() as name:
        running(Path(name), args)
        a_day(Path(name))
    print(PEERS)


if __name__ == "__main__":
    main()
