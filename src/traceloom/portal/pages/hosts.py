"""Hosts of the fleet, and how each is."""

from __future__ import annotations

from htpy import Node, button, code, div, form, fragment, p

from traceloom.collect.host_routes import EnrolmentAnswer, EnrolmentBody
from traceloom.collect.request_routes import HostAnswer, HostsAnswer
from traceloom.model import units
from traceloom.portal.forms import number_of, text_field
from traceloom.portal.layout import command, folded
from traceloom.portal.links import to_host, to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit

COLUMNS = (
    PageColumn("host", "Host", link=lambda row: to_host(str(row["host"]))),
    PageColumn("state", "State", "state", "lost: it was silent for a minute"),
    PageColumn("heard_ns", "Heard", "instant", unknown="not since the service started"),
    PageColumn("devices", "Devices", "count"),
    PageColumn("stale_devices", "Silent", "count", "devices that cannot be read now"),
    PageColumn("processes", "Processes", "count", "that matter: they hold devices, or belong to a job"),
    PageColumn(
        "jobs",
        "Jobs",
        unknown="no job runs there",
        link=lambda row: to_host(str(row["host"])) if ", " in str(row["jobs"]) else to_job(str(row["jobs"])),
    ),
    PageColumn(
        "clock_offset_ns", "Clock", "time", "how far its clock is behind that of the service", "not measured yet"
    ),
    PageColumn("clock_error_ns", "±", "time", "at most", "not measured yet"),
    PageColumn("version", "Version", unknown="not heard of yet"),
    PageColumn("trouble", "Trouble", unknown="it reports none"),
)


def state_of(host: HostAnswer) -> str:
    """`here`, `lost` or `never`."""
    return "never" if host.heard_ns is None else "lost" if host.lost else "here"


async def compute(visit: Visit) -> list[HostAnswer]:
    """Hosts, by name."""
    return (await visit.answer(HostsAnswer, "/api/v1/hosts")).hosts


def content(hosts: list[HostAnswer]) -> PageContent:
    """What is shown of them."""
    rows: list[PageRow] = [
        {
            "host": host.host,
            "state": state_of(host),
            "heard_ns": host.heard_ns,
            "devices": host.devices,
            "stale_devices": host.stale_devices,
            "processes": host.processes,
            "jobs": ", ".join(host.jobs),
            "clock_offset_ns": host.clock_offset_ns,
            "clock_error_ns": host.clock_error_ns,
            "version": host.version,
            "trouble": "; ".join(f"{name}: {why}" for name, why in sorted(host.trouble.items())),
        }
        for host in hosts
    ]
    empty = fragment[
        p["No host belongs to the fleet yet. A host joins by a token that works once. Beside the service:"],
        command("traceloom fleet token enrol node7 > node7.token"),
        p["and on the host:"],
        command("traceloom agent run --server URL --token-file node7.token"),
    ]
    lost = sum(host.lost for host in hosts)
    silent = sum(host.stale_devices for host in hosts)
    numbers = [
        KeyNumber("Hosts", units.count(len(hosts)), "belong to the fleet"),
        KeyNumber("Lost", units.count(lost), "were not heard of for a minute", "bad" if lost else ""),
        KeyNumber("Devices", units.count(sum(host.devices for host in hosts)), "on them"),
        KeyNumber("Silent", units.count(silent), "devices that cannot be read", "warn" if silent else ""),
    ]
    table = PageTable("hosts", "Hosts of the fleet", COLUMNS, rows, empty)
    return PageContent("Hosts", [ContentSection("hosts", "By name", table)], numbers=numbers if hosts else ())


def controls(visit: Visit, _hosts: list[HostAnswer]) -> Node:
    """The form by which a host may join, for operators."""
    if not visit.may("operator"):
        return None
    inside = form(method="post")[
        div(".fields")[
            text_field("host", "Host", "Its name; empty: any host.", value=visit.field("host"), maxlength="253"),
            text_field("days", "Days", "For so many it may be used, once.", value=visit.field("days") or "1"),
        ],
        div(".buttons")[button(".primary", type="submit")["Make a token"]],
    ]
    return folded("join", "Let a host join", inside, is_open=bool(visit.form))


async def act(visit: Visit) -> Node:
    """Make a token of enrolment, and show it, once.

    Raises:
        RequestError: `wrong-request`, `not-allowed`.
    """
    days = number_of(visit.field("days"), "the number of days", float) or 1.0
    body = EnrolmentBody(host=visit.field("host"), days=days)
    answer = await visit.answer(EnrolmentAnswer, "/api/v1/agents", method="POST", body=body)
    return div(".notice", role="status")[
        p["The token is shown only now. Put it into a file on ", code[answer.host] if answer.host else "the host", ":"],
        command(answer.token),
        p["and start the agent with it; URL is the address of this page, as far as the port:"],
        command("traceloom agent run --server URL --token-file FILE"),
    ]


PAGE = Page(
    "/hosts",
    "Hosts",
    "Hosts of the fleet: which are here, their devices, how far their clocks are off.",
    compute,
    content,
    controls,
    act=act,
    live=True,
    menu="Watch",
)
