"""The fleet's service with made weeks, two hosts and two captures: its routes and pages for every
role, its verbs.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import polars as pl
from answers import Describer, Masker
from commands import Caller, lines_of, run_lines
from routes import FILTERS, KERNEL, SAMPLES, TIME, Answer, Ask, Page, Routes, ask_routes
from static import every_parser, options

from support.answering import fill
from support.fuzzing.trying import captured
from support.patient_service import patient
from support.running_service import RunningService
from support.simulated_hosts import SimulatedHost, ranked_process
from support.waiting import until
from traceloom.cli import main
from traceloom.errors import TraceloomError
from traceloom.fleet.portal.app import PAGES
from traceloom.fleet.service.service import ROUTES as FLEET_ROUTES
from traceloom.fleet.store.captures import ROLES, ServiceState
from traceloom.fleet.store.tables import Tables
from traceloom.testing.fleet_weeks import TEAMS, WeeksRecipe, build_weeks

MASKS = (
    (re.compile(r"\bc[0-9a-f]{20}\b"), "<capture>"),
    (re.compile(r"(?:(?<=%2F)|(?<![\w.]))[0-9a-f]{16}\b"), "<request>"),
    (re.compile(r"\b\d{1,2} [A-Z][a-z]{2} \d\d:\d\d(:\d\d)?\b"), "<time>"),
    (re.compile(r"(Looked at) (?!2020)\d{4}-\d\d-\d\d 00:00"), r"\1 <30 days ago>"),
    (
        re.compile(r"(?m)^ *Request +Job"),
        "Request  Job",
    ),  # a name of digits alone stands at the right
)
KEYS = frozenset({"attempts", "bytes", "expires_ns", "files", "seconds"})
_ON_PAGES = (
    (re.compile(rf"\bof-(?:{'|'.join(ROLES)})\b"), "<name>"),
    (re.compile(r'title="\d+"(?=>[\d.]+\s[kM]?B<)'), 'title="<bytes>"'),
    (re.compile(r"\b[\d.]+\s[kM]?B\b"), "<size>"),
)
"""Pages name who reads them, and show how large captures are."""
OWNERS = '[[rule]]\nmatch = {model = "vision"}\nset = {product = "segmentation"}\n'
PRICES = 'currency = "EUR"\nper_kwh = 0.3\nco2_g_per_kwh = 350\n[device_hour]\ndefault = 2.6\n'
BASE: dict[str, str] = {
    "report": "{capture} -o out/report.html",
    "fetch": "{capture} -o out/run",
    "token": "list",
    "kernel-history": f"--kernel {KERNEL}",
}
FIRST = """
    upload run --job slurm-42 --wait --server {server} --token-file {token}
    upload run --job slurm-42 --json -q --debug
    upload trace.json.gz missing
    fleet hosts --remove nowhere
    fleet captures --job slurm-42 --most 1
    fleet requests --most 1
    fleet report {capture} -o notes.md
    fleet report {capture} -o notes.html --force
    fleet report none -o out/report.html
    fleet kernels --since 2020-10-05 --until 2020-10-28 --sort cycles
    fleet kernels --since 2020-10-05 --until 2020-10-28 --sort time
    fleet attribution --since 2020-10-05 --until 2020-10-28 --over day
    fleet attribution --since 2020-10-05 --until 2020-10-28 --over hour --by division,product
    fleet characterise --since 2020-10-05 --until 2020-10-28 --by kind
    fleet topline --since 2020-10-05 --until 2020-10-28 --by model
    fleet invest --since 2020-10-05 --until 2020-10-28 --by model
    fleet findings --since 2020-10-05 --until 2020-10-28 --rule exposed-communication
    fleet query --by job --job job --host node0 --top 1
    fleet query --by host
    fleet query --by device
    fleet captures --server nonsense
    trace --server {server} --token-file {token} --list
    trace --server {server} --list --json
    trace --server {server} --job none --steps 2
    trace --server {server} --pid 1 --steps 2
    trace --server {server} --job job --rank 0 --host node0 --steps 2 --profilers timeline --shapes --stacks -o out/t -q
    trace --server {server} --job job --steps 2 --choose slowest-and-median --by-step --at +1s -q --json
    trace --server {server} --cancel 0123456789abcdef
    fleet token add ci --role viewer --days 2
    fleet token add ci2 --role requester
    fleet token add ci3 --role operator
    fleet token add ci4 --role admin --json
    fleet token enrol node7
    fleet token revoke ci
    fleet token revoke ci
    fleet token list
    fleet owners show
    fleet owners set owners.toml --dry-run --since 2020-10-05 --until 2020-10-28
    fleet owners set owners.toml
    fleet owners show --version 1
    fleet owners history
    fleet prices set prices.toml --dry-run --since 2020-10-05 --until 2020-10-28
    fleet prices set prices.toml
    fleet prices show --version 1
    fleet prices history
    fleet attribution --since 2020-10-05 --until 2020-10-28
    fleet triggers set triggers.toml
    fleet triggers show
    fleet triggers list
    fleet webhooks add hook http://127.0.0.1:9/hook --events request.done,regression.new
    fleet webhooks list
    fleet webhooks remove none
    fleet webhooks test none
    fleet webhooks remove hook
    fleet backfill --again
    serve --proxy-user-header X-User -q --debug
    serve --engine dask://192.0.2.1:1 --engine-ca missing --engine-certificate missing --engine-key missing
    serve --engine nonsense
    serve --address nonsense --store {folder}/other --certificate missing --key missing
    serve --state nonsense://x
    serve --webhooks-to nonsense
    serve --demo --store run
"""


def commands() -> list[str]:
    """Every action of `traceloom fleet`, in words, as JSON, and with the filters of those that have
    them.
    """
    lines = []
    for name, parser in every_parser().items():
        verb, _, action = name.partition(" ")
        if verb != "fleet" or not action:
            continue
        names = {action_.dest for action_ in options(parser)}
        base = f"{name} {BASE.get(action, '')}".strip()
        if {"since", "until", "job"} <= names:
            base += f" --since {TIME['since']} --until {TIME['until']}"
            filters = [[one] for one in (*FILTERS, "application") if one in names]
            if (
                action != "kernels"
            ):  # they are the same for all: each alone for one, all together for the rest
                filters = [[one for one in FILTERS if one in names], ["application"]]
            lines += [
                base
                + "".join(f" --{one.replace('_', '-')} {shlex.quote(SAMPLES[one])}" for one in some)
                for some in filters
            ]
            pages = [
                one
                for one in ("top", "skip", "kernel", "shapes")
                if one in names and f"--{one}" not in base
            ]
            lines.append(base + "".join(f" --{one} {shlex.quote(SAMPLES[one])}" for one in pages))
        lines += [base, f"{base} --json -q --debug --server {{server}} --token-file {{token}}"]
    return lines


ENDED = {"done", "partial", "failed", "cancelled"}
_WAIT_S = 600.0
_SILENT_S = 10.0  # that hosts are at most: after a minute they count as lost
WEEKS = WeeksRecipe(
    date(2020, 10, 5), captures=1, days=16, teams=[replace(team, kernels=8) for team in TEAMS]
)


class Fleet:
    """A service with made weeks, two hosts, a capture of theirs and one that was uploaded, and who
    asks it.

    What it answers depends on nothing that goes on meanwhile: see `settle`.
    """

    def __init__(self, folder: Path) -> None:
        store = folder / "store"
        tables = Tables(str(store))
        tables.create()
        fill(tables, build_weeks(WEEKS))
        words = [
            "--store",
            str(store),
            "--state",
            str(store / "state.db"),
            "--workers",
            "1",
            "--lease",
            "3600",
            "--webhooks-to",
            "127.0.0.1",
            "--proxy-user-header",
            "X-User",
            "--proxy-from",
            "127.0.0.1",
            "--proxy-role",
            "requester",
        ]
        self.service = RunningService(folder, *words, command=patient(_WAIT_S, commit_s=0.5))
        self.folder, self.tables = folder, tables
        self.state = ServiceState(str(store / "state.db"))
        self.hosts: list[SimulatedHost] = []
        self._heard_s = 0.0  # of the monotonic clock, when hosts were told to act last
        self._alone = False  # whether they act by themselves
        self.tokens: dict[str, str] = {}

    def prepare(self) -> None:
        """Let in everybody, and have the captures made."""
        folder = self.folder
        admin = self.service.client()
        for role in ROLES:
            self.tokens[role] = admin.post("tokens", {"name": f"of-{role}", "role": role})["token"]
        self.admin = self.service.client(self.tokens["admin"])
        until(self._leads, _WAIT_S)
        self.admin.post("compact")  # else the service does so by itself, from 02:00 on
        self.admin.post("tokens", {"name": "spare", "role": "viewer"})
        now_ns = time.time_ns()
        *self.hosts, spare = [
            SimulatedHost(
                [self.service.url],
                name,
                self.admin.post("agents", {"host": name})["token"],
                [ranked_process(rank, "job")],
                folder,
                base_ns=now_ns,
            )
            for rank, name in enumerate(("node0", "node1", "spare"))
        ]
        spare.close()
        self.beat()
        self.tokens["host"] = self.hosts[0].clients[0].credential
        self.tokens |= {"nobody": "", "stranger": "nonsense"}
        for name, text in (("owners", OWNERS), ("prices", PRICES)):
            self.admin.post(name, {"text": text})
        self.request = self.admin.post("requests", {"spec": {"job": "job", "steps": 2}})["id"]
        until(self._traced, _WAIT_S)
        (folder / "token").write_text(self.tokens["admin"])
        who = ["--server", self.service.url, "--token-file", str(folder / "token")]
        with captured() as (_, errors):
            assert main(["upload", "run", "--job", "slurm-42", "--wait", "-q", *who]) == 0, (
                errors.getvalue()
            )
        [self.capture] = [of["id"] for of in self.admin.get("captures", job="slurm-42")["captures"]]
        until(self._told, _WAIT_S)
        self.settle()

    def _told(self) -> bool:
        """Whether the tables have what hosts say of their job: the service looks for it now and
        then.
        """
        self.beat()
        return bool(self.tables.scan("jobs").filter(pl.col("job") == "job").collect().height)

    def settle(self) -> None:
        """Hosts are there and do what is due, and then the service has nothing to do: no capture is
        analysed or waits to be, and no row waits to be put into the tables.
        """
        self.beat()
        until(self._settled, _WAIT_S)

    def _settled(self) -> bool:
        tasks = self.state.counts()
        return not (
            any(tasks[state] for state in ("received", "checked", "analysed"))
            or self.state.has_rows_to_commit(minutes=True)
        )

    def _leads(self) -> bool:
        try:
            return bool(self.admin.get("hosts"))
        except TraceloomError as error:
            if error.slug != "not-leading":
                raise
            return False

    def _traced(self) -> bool:
        self.beat(early=True)
        return self.admin.get(f"requests/{self.request}")["state"] in ENDED

    def ask(self, method: str, path: str, who: str, content: bytes | None) -> Answer:
        """Ask; the headers of whoever asks say who it is."""
        headers = {"Authorization": f"Bearer {self.tokens[who]}"} if self.tokens[who] else {}
        return self._sent(method, path, headers, content)

    def _sent(
        self, method: str, path: str, headers: dict[str, str], content: bytes | None
    ) -> Answer:
        if time.monotonic() - self._heard_s > _SILENT_S:
            self.beat()
        connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=_WAIT_S)
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer

    def browse(self, cookies: Mapping[str, str]) -> Ask:
        """Asks as a browser does, signed in as a role."""

        def ask(method: str, path: str, who: str, content: bytes | None) -> Answer:
            headers = {"Cookie": cookies[who]} if cookies[who] else {}
            return self._sent(method, path, {**headers, "Origin": self.service.url}, content)

        return ask

    def beat(self, *, early: bool = False) -> None:
        """The hosts are there, and get ready for what is asked of them; they begin with it when it
        is due, or `early`.
        """
        for host in self.hosts if not self._alone else ():
            until(lambda host=host: host.go_on(early=early), _WAIT_S)
        self._heard_s = time.monotonic()

    def open_requests(self) -> list[dict[str, Any]]:
        """Requests that have not ended."""
        requests = self.admin.get("requests")["requests"]
        return [request for request in requests if request["state"] not in ENDED]

    def arm(self) -> None:
        """Hosts are ready for all that was asked of them, and stay so until `begin`: what is not
        ready within 30 s fails.
        """

        def armed() -> bool:
            self.beat()
            return all(request["state"] == "armed" for request in self.open_requests())

        until(armed, _WAIT_S)
        self.settle()

    def begin(self) -> None:
        """From now on hosts do by themselves what is asked of them; nothing is, so far."""
        for request in self.open_requests():
            self.admin.delete(f"requests/{request['id']}")
        self.settle()
        self._alone = True
        for host in self.hosts:
            host.begin()

    def close(self) -> None:
        """End it."""
        for host in self.hosts:
            host.close()
        self.state.close()
        self.service.end()


def describe(folder: Path, describer: Describer) -> dict[str, list[str]]:
    """The fleet's service: its routes, its pages, and the verbs that ask it."""
    home = folder.parent / "fleet"
    home.mkdir()
    fleet = Fleet(home)
    try:
        fleet.prepare()
        routes = fleet_routes(fleet)
        who = ["nobody", "stranger", "host", *ROLES]
        lines = ask_routes(routes, who, "admin", fleet.ask, describer, before=fleet.settle)
        fleet.arm()
        shown = fleet_pages(fleet, Describer(Masker(folder, (*MASKS, *_ON_PAGES), KEYS)))
        fleet.begin()
        (folder / "token").write_text(fleet.tokens["admin"])
        os.environ |= {
            "TRACELOOM_SERVER": fleet.service.url,
            "TRACELOOM_TOKEN": fleet.tokens["admin"],
        }
        places = {
            "server": fleet.service.url,
            "token": "token",
            "capture": fleet.capture,
            "folder": str(home),
        }
        verbs = Describer(describer.masker)
        every = [*lines_of(FIRST), *commands()]
        called = run_lines(Caller(folder, verbs), every, places, before=fleet.settle)
    finally:
        fleet.close()
    return {
        "routes-fleet.txt": [*lines, *describer.shapes.lines()],
        "pages-fleet.txt": shown,
        "commands-fleet.txt": [*called, *verbs.shapes.lines()],
    }


def fleet_routes(fleet: Fleet | None) -> Routes:
    """The routes of the service; the names of what is there, where it runs."""
    capture, request = (fleet.capture, fleet.request) if fleet else ("", "")
    there = {
        "captures": capture,
        "hosts": "node1",
        "requests": request,
        "jobs": "job",
        "agents": "node0",
        "files": "rank0.kineto.json.gz",
        "tokens": "spare",
        "DELETE hosts": "spare",
        "webhooks": "new",
        "against": capture,
    }
    return Routes("fleet", FLEET_ROUTES, there)


def fleet_pages(fleet: Fleet, describer: Describer) -> list[str]:
    """Every page, for everybody."""
    cookies = {role: fleet.service.signed_in(fleet.tokens[role]) for role in ROLES}
    cookies = {"nobody": "", **cookies}
    there = {"captures": fleet.capture, "jobs": "job", "hosts": "node0", "requests": fleet.request}
    change = fleet.admin.get("regressions", **TIME)["changes"][0]
    more = {name: change[name] for name in ("shapes", "device_model") if change[name] is not None}
    query = {
        "/kernels/history": {"kernel": KERNEL},
        "/compare": {"base": fleet.capture, "new": fleet.capture},
        "/regressions/change": {"kernel": change["kernel"], "at": str(change["since_ns"]), **more},
    }
    paths = [
        Page(page.path + (f"?{urlencode(query[page.path])}" if page.path in query else ""))
        for page in PAGES
    ]
    others = [Page("/sign-in"), Page("/sign-out", "POST"), Page("/none")]
    routes = Routes("page", [*paths, *others], there)
    return ask_routes(
        routes, list(cookies), "admin", fleet.browse(cookies), describer, before=fleet.settle
    )


def uncovered() -> list[str]:
    """Routes, parameters and fields without a case."""
    return [*fleet_routes(None).uncovered()]


def calls() -> list[list[str]]:
    """The words of all calls, and of what runs until it is stopped."""
    return [
        shlex.split(line)
        for line in [
            *lines_of(FIRST),
            *commands(),
            "serve --workers 1 --lease 1 --address X --proxy-from X",
        ]
    ]
