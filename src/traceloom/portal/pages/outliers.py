"""Hosts and ranks that are slower than their peers."""

from __future__ import annotations

from traceloom.fleet.outliers import FAR, LEAST_PEERS
from traceloom.model import units
from traceloom.portal.asking import PageAnswer, ask, asking_form, to_page
from traceloom.portal.links import to_host, to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageTable
from traceloom.portal.visit import Visit

_MARK = PageColumn("mark", "Outlier", "state", f"z of {FAR} or more, and slower by 5 % at least")


async def compute(visit: Visit) -> PageAnswer:
    """Ask for them."""
    return await ask(visit, "outliers", top="1000")


def content(asked: PageAnswer) -> PageContent:
    """What is shown of them."""
    asking = asking_form(asked.address)
    sections, slow = [], {}
    for table, title, like, names, links, note in (
        ("hosts", "Hosts", "that ran the same kernels on the same shapes and devices",
         ("device_model", "ratio", "z", "kernels", "jobs"),
         {"jobs": lambda row: to_page("/kernels", asked.address, host=str(row["host"]))},
         "against hosts that ran the same kernels"),
        ("ranks", "Ranks", "in a capture", ("rank", "host", "ratio", "z", "captures"),
         {"host": lambda row: to_host(str(row["host"]))}, "against the ranks of their job"),
    ):  # fmt: skip
        rows = [{**row, "mark": "slow" if row["outlier"] else "like its peers"} for row in asked.tables[table]]
        slow[table] = [row for row in rows if row["mark"] == "slow"]
        first = "host" if table == "hosts" else "job"
        lead = {
            first: (lambda row: to_host(str(row["host"])))
            if table == "hosts"
            else (lambda row: to_job(str(row["job"])))
        }
        columns = [*asked.columns(table, (first,), lead), _MARK, *asked.columns(table, names, links)]
        empty = f"No {table} are compared: it takes {LEAST_PEERS} {like} at least. Ask for more time, or drop a filter."
        sections.append(ContentSection(f"of-{table}", title, PageTable(table, title, columns, rows, empty), note))
    hosts = slow["hosts"]
    heading = "No host is slower than its peers"
    if hosts:
        heading = f"{hosts[0]['host']} takes {units.per_cent(hosts[0]['ratio'] - 1)} % longer than its peers"
    numbers = [
        KeyNumber("Slow hosts", units.count(len(hosts)), f"of {units.count(len(asked.tables['hosts']))} compared",
                  "bad" if hosts else "", "#of-hosts-part"),
        KeyNumber("Slow ranks", units.count(len(slow["ranks"])),
                  f"of {units.count(len(asked.tables['ranks']))} compared", "bad" if slow["ranks"] else "",
                  "#of-ranks-part"),
    ]  # fmt: skip
    return PageContent(heading, sections, numbers=numbers, asking=asking)


PAGE = Page(
    "/outliers", "Outliers", "Hosts and ranks that are slower than their peers, with how far they are from them.",
    compute, content, menu="Understand",
)  # fmt: skip
