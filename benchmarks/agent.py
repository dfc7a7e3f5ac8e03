"""What the host agent costs: processor time and memory while it watches 8 devices, and how quickly it answers.

    python benchmarks/agent.py [--seconds 120] [--devices 8] [--otlp] [--rules]

Starts the agent as a user would (`traceloom agent run --simulate 8`), scrapes it as Prometheus does, asks it 100 times
a second, fills a history with a day of 400 series, and looks at 300 rules of triggers, which `--rules` does alone.
Beside it stands what others publish about themselves.
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from traceloom.agent.board import Board
from traceloom.agent.config import HistorySettings, MetricRule
from traceloom.agent.history import History
from traceloom.agent.metrics import Reading
from traceloom.agent.triggers.metric import MetricWatch, of_rule
from traceloom.agent.triggers.values import SeriesValues

LIMITS = {
    "processor": 0.01,
    "memory": 64e6,
    "memory with OTLP": 76e6,
    "query": 0.020,
    "day": 200e6,
    "hour": 0.050,
    "rules": 0.020,
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
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Rss", "Pss:"))}


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
        config += f'[otlp]\nendpoint = "http://127.0.0.1:{sink.server_port}/v1/metrics"\nperiod = 10.0\n'
    (directory / "agent.toml").write_text(config)
    command = [sys.executable, "-m", "traceloom", "agent", "run", "-q", "--simulate", str(args.devices)]
    agent = subprocess.Popen([*command, "--config", str(directory / "agent.toml")], stderr=subprocess.DEVNULL)
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
        print(f"{args.devices} simulated devices, {status['series']} series, scraped every 10 s for {args.seconds} s")
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
    line("a query at 100/s, 99th percentile", times[990], LIMITS["query"], f"{times[990] * 1e3:.1f} ms")
    print(f"{'  median, longest':52} {times[500] * 1e3:>6.1f}, {times[-1] * 1e3:.1f} ms")
    print(f"{'  processor time of a core meanwhile':52} {share:>13.1%}")


def a_day(directory: Path) -> None:
    """8,640 ticks of 400 series in ten metrics; then random hours of random series."""
    path = directory / "day.db"
    history = History(path, HistorySettings(most_mb=10_000))
    metrics = [
        "gpu_power_watts", "gpu_busy_ratio", "gpu_sm_active_ratio", "gpu_dram_active_ratio", "gpu_memory_used_bytes",
        "gpu_energy_joules_total", "gpu_clock_hertz", "gpu_temperature_celsius", "gpu_pipe_active_ratio", "gpu_flops",
    ]  # fmt: skip
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
    line("an hour of one metric, longest of 50", max(times), LIMITS["hour"], f"{max(times) * 1e3:.1f} ms")


def rules() -> None:
    """300 rules, each for a job of its own, among 7,400 series delivered every 10 s and looked at each second."""
    board = Board()
    of_jobs = [MetricRule(name=f"r{n}", metric="gpu_flops", below=-1.0, for_seconds=30.0) for n in range(2)]
    of_jobs += [
        MetricRule(
            name=f"j{job}", metric="dataloader_wait_seconds_total", above=0.5, for_seconds=30.0, where={"job": f"{job}"}
        )
        for job in range(298)
    ]
    values = SeriesValues(board, [of_rule(rule) for rule in of_jobs])
    watches = [MetricWatch(rule, values, lambda _: True) for rule in of_jobs]
    fresh, quiet = [], []
    for tick in range(200):
        now_ns = 10**18 + tick * 10**9
        if tick % 10 == 0:
            waits = [Reading("dataloader_wait_seconds_total", (f"{n // 8}", f"{n % 8}"), tick) for n in range(2400)]
            board.put("jobs", [*waits, *(Reading("process_threads", (f"{n}",), 1.0) for n in range(5000))], now_ns)
        before = time.process_time()
        values.refresh()
        firing = sum(1 for watch in watches for _ in watch.look(now_ns))
        (quiet if tick % 10 else fresh).append(time.process_time() - before)
    assert firing == 298 * 8
    line("300 rules, 7,400 new series, longest of 20 looks", max(fresh), LIMITS["rules"], f"{max(fresh) * 1e3:.1f} ms")
    print(f"{'  a look when nothing is new, with 2,384 firing':52} {statistics.median(quiet) * 1e3:>11.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--otlp", action="store_true", help="export by OTLP too")
    parser.add_argument("--rules", action="store_true", help="of triggers alone")
    args = parser.parse_args()
    rules()
    if args.rules:
        return
    with tempfile.TemporaryDirectory() as name:
        running(Path(name), args)
        a_day(Path(name))
    print(PEERS)


if __name__ == "__main__":
    main()
