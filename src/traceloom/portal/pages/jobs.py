"""Jobs that run now."""

from __future__ import annotations

from htpy import code, fragment, p

from traceloom.collect.request_routes import FleetJobAnswer, FleetJobsAnswer
from traceloom.model import units
from traceloom.portal.layout import command
from traceloom.portal.links import to_job
from traceloom.portal.page import ContentSection, KeyNumber, Page, PageContent
from traceloom.portal.table import PageColumn, PageRow, PageTable
from traceloom.portal.visit import Visit

COLUMNS = (
    PageColumn("job", "Job", "name", link=lambda row: to_job(str(row["job"]))),
    PageColumn("user", "User", hint="whose processes they are", unknown="its processes do not say"),
    PageColumn("hosts", "Hosts", "count"),
    PageColumn("devices", "Devices", "count", "devices that its processes hold"),
    PageColumn("ranks", "Ranks", "count", "ranks that were seen"),
    PageColumn("world_size", "Of", "count", "world size that they say", "they do not say it"),
    PageColumn("steps_per_second", "Steps/s", "number", "of its slowest rank", "nobody measures it"),
    PageColumn("traceable", "Traceable", hint="processes that are prepared for traces on demand"),
    PageColumn("framework", "Framework", unknown="no framework was seen in its processes"),
    PageColumn("scheduler", "Scheduler", unknown="nothing names it"),
)


async def compute(visit: Visit) -> list[FleetJobAnswer]:
    """Jobs that run now, by name."""
    return (await visit.answer(FleetJobsAnswer, "/api/v1/jobs")).jobs


def row_of(job: FleetJobAnswer) -> PageRow:
    """A job as a row of `COLUMNS`."""
    return {
        "job": job.job,
        "user": job.user,
        "hosts": len(job.hosts),
        "devices": job.devices,
        "ranks": job.ranks,
        "world_size": job.world_size,
        "steps_per_second": job.steps_per_second,
        "traceable": "all" if job.traceable == job.processes else f"{job.traceable} of {job.processes}",
        "framework": job.framework,
        "scheduler": job.scheduler,
    }


def table(jobs: list[FleetJobAnswer]) -> PageTable:
    """The table of jobs."""
    empty = fragment[
        p["No job runs on hosts of the fleet, as far as they say. Prepare one on a host where an agent runs:"],
        command('eval "$(traceloom agent env)"'),
        p["and start the program in that shell. ", code["TRACELOOM_JOB"], " names the job where no scheduler does."],
    ]
    return PageTable("jobs", "Jobs that run now", COLUMNS, [row_of(job) for job in jobs], empty)


def content(jobs: list[FleetJobAnswer]) -> PageContent:
    """What is shown of them."""
    ready = sum(job.traceable > 0 for job in jobs)
    numbers = [
        KeyNumber("Jobs", units.count(len(jobs)), "that run now"),
        KeyNumber("Traceable", units.count(ready), "have processes that are prepared for traces"),
        KeyNumber("Devices", units.count(sum(job.devices for job in jobs)), "that jobs hold"),
        KeyNumber("Users", units.count(len({job.user for job in jobs if job.user})), "whose jobs run"),
    ]
    return PageContent("Jobs", [ContentSection("jobs", "Running now", table(jobs))], numbers=numbers if jobs else ())


PAGE = Page(
    "/jobs",
    "Jobs",
    "Jobs that run now: whose they are, how fast they step, whether they can be traced.",
    compute,
    content,
    live=True,
    menu="Watch",
)
