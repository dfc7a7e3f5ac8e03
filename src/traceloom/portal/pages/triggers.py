"""Rules by which jobs are traced though nobody asks: what each did, why it did not, what may still be spent."""

from __future__ import annotations

from htpy import Node, code, div, fragment, p

from traceloom.collect.trigger_routes import FleetTriggerAnswer, FleetTriggersAnswer, FleetTriggersBody
from traceloom.model import units
from traceloom.portal.documents import document_form, written_text
from traceloom.portal.layout import command
from traceloom.portal.links import to_job, to_request
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit

ROUTE = "/api/v1/triggers"
EXAMPLE = """[[triggers]]
name = "daily-share"
on = "cadence"
share = 0.2               # of the jobs, each day, once each

[[triggers]]
name = "idle-devices"
on = "usage"
busy_below = 0.3          # computes in less of its device time
minutes = 15              # in the last ones
target = "slowest-and-median"

[budget]                  # of all rules together, in any 24 hours
traces_per_day = 50
mb_per_day = 20000.0
share = 0.01              # of the steps of a job
"""
_WHEN = {
    "cadence": "each day, a share of the jobs",
    "usage": "devices are hardly used",
    "finding": "a finding in a capture",
    "regression": "a kernel became slower",
}
_TARGETS = {"job": "all ranks", "slowest-and-median": "slowest rank and one in the middle"}
_RULES = (
    PageColumn("name", "Rule"),
    PageColumn("on", "Fires on"),
    PageColumn("jobs", "Jobs", "count", "that run now and that the rule is about", link=lambda _row: "/jobs"),
    PageColumn("target", "Traces"),
    PageColumn("fired", "Fired", "count", "traces that it asked for",
               link=lambda row: f"/requests?requests.q=trigger+{row['name']}"),
    PageColumn("refusals", "Refused", hint="how often it wanted a trace and there was none, by reason",
               unknown="it was never refused"),
    PageColumn("kept_bytes", "Kept", "bytes", "files of its traces"),
    PageColumn("cooldown", "Cooldown", "time", "until it may trace the same job again"),
)  # fmt: skip
_LAST = (
    PageColumn("at_ns", "When", "instant"),
    PageColumn("name", "Rule"),
    PageColumn("result", "Result", "state"),
    PageColumn("job", "Job", "name", unknown="it is about no job", link=lambda row: to_job(str(row["job"]))),
    PageColumn("what", "What it saw"),
    PageColumn("request", "Request", "name", unknown="there is none", link=lambda row: to_request(str(row["request"]))),
    PageColumn("detail", "Why not", unknown="it fired"),
)


async def compute(visit: Visit) -> FleetTriggersAnswer:
    """The rules and what they did."""
    return await visit.answer(FleetTriggersAnswer, ROUTE)


def content(answer: FleetTriggersAnswer) -> PageContent:
    """What is shown of them."""
    lead = [
        "For what a host sees by itself (errors, slower steps, hangs) its agent has rules, in ",
        code["agent.toml"], ".",
    ]  # fmt: skip
    if not answer.rules:
        empty = fragment[
            p["Nothing is traced unless somebody asks. Rules ask for traces of jobs whose devices idle, in which "
              "something was found, whose kernels became slower; or of a share of all jobs each day."],
            p["Write rules above, or from a file:"],
            command("traceloom fleet triggers set fleet-triggers.toml"),
        ]  # fmt: skip
        return PageContent(
            "There are no rules yet", [ContentSection("rules", "Rules", div(".empty", id="rules")[empty])], lead=lead
        )
    fired = sum(rule.fired for rule in answer.rules)
    happened: list[PageRow] = []  # the last that each rule did and was refused
    for rule in answer.rules:
        if (last := rule.last) is not None:
            happened.append({"at_ns": last.at_ns, "name": rule.name, "result": "fired", "job": last.target,
                             "what": last.what, "request": last.request})  # fmt: skip
        if (refusal := rule.last_refusal) is not None:
            happened.append({"at_ns": refusal.at_ns, "name": rule.name, "result": "refused", "job": refusal.target,
                             "what": refusal.what, "detail": f"{refusal.reason}: {refusal.detail}"})  # fmt: skip
    happened.sort(key=lambda row: -int(row["at_ns"] or 0))
    sections = [
        ContentSection("rules", "Rules", PageTable("rules", "Rules", _RULES, [_row(rule) for rule in answer.rules])),
        ContentSection(
            "last", "What happened last",
            PageTable("last", "What rules did last", _LAST, happened, "No rule has fired yet."),
            "of each rule",
        ),
    ]  # fmt: skip
    if answer.trouble:
        sections.insert(0, ContentSection("trouble", "What is wrong", p(".bad")[answer.trouble]))
    left = "warn" if not answer.traces_left else ""
    numbers = [
        KeyNumber("Fired", units.count(fired), "since these rules are there", leads="/requests?requests.q=trigger"),
        KeyNumber("Traces left", units.count(answer.traces_left),
                  f"of {units.count(answer.traces_per_day)} in 24 hours", left),
        KeyNumber("Bytes left", units.size(answer.bytes_left), f"of {units.size(answer.bytes_per_day)} in 24 hours",
                  "" if answer.bytes_left else "warn"),
        KeyNumber("Share", units.share(answer.share, 1.0), "of the steps of a job, at most"),
    ]  # fmt: skip
    rules = units.counted(len(answer.rules), "rule")
    heading = f"{rules} asked for {units.counted(fired, 'trace')}"
    return PageContent(heading, sections, numbers=numbers, lead=lead)


def _row(rule: FleetTriggerAnswer) -> PageRow:
    refusals = sorted(rule.refusals.items(), key=lambda item: -item[1])
    return {
        "name": rule.name, "on": f"{rule.on}: {_WHEN[rule.on]}", "jobs": rule.jobs,
        "target": _TARGETS[rule.target], "fired": rule.fired,
        "refusals": ", ".join(f"{reason} {units.count(times)}×" for reason, times in refusals),
        "kept_bytes": rule.kept_bytes, "cooldown": int(rule.cooldown_seconds * 1e9),
    }  # fmt: skip


def controls(visit: Visit, answer: FleetTriggersAnswer) -> Node:
    """The form by which rules are set."""
    if not visit.may("operator"):
        return p(".quiet")["An operator may set rules."]
    about = (
        "on: cadence (share), usage (busy_below, minutes), finding (slug, saving), regression (by). "
        "Each may have where (job, user, account, scheduler, framework), target, profilers, steps or duration, shapes, "
        "stacks, cooldown."
    )
    return document_form(visit, "Set rules", "fleet-triggers.toml", answer.toml or EXAMPLE, about)


async def act(visit: Visit) -> str | Node:
    """Say what the rules of the form would be about, or set them.

    Raises:
        RequestError: `wrong-config`: what is wrong with them; `not-allowed`.
    """
    saves = visit.field("do") == "save"
    body = FleetTriggersBody(toml=written_text(visit), dry_run=not saves)
    answer = await visit.answer(FleetTriggersAnswer, ROUTE, method="PUT", body=body)
    if saves:
        return visit.address.path
    names = {"name", "on", "jobs", "target", "cooldown"}
    columns = [column for column in _RULES if column.key in names]
    table = PageTable("checked", "Rules of the form", columns, [_row(rule) for rule in answer.rules],
                      "There would be no rules: nothing would be traced unless somebody asks.")  # fmt: skip
    return div(".notice.wide", role="status")[
        p["The rules are right, and are about so many jobs that run now. Nothing is saved yet."], table.alone()
    ]


PAGE = Page(
    "/triggers", "Triggers", "Rules by which jobs are traced though nobody asks: what each did, why it did not, what "
    "may still be spent; they are checked before they are set.", compute, content, controls, act=act, live=True,
    menu="Traces",
)  # fmt: skip
