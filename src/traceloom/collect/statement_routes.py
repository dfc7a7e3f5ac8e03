"""The route by which jobs say what they are: model, framework, product, ..."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer, RequestError
from traceloom.allowed_texts import ONE_LINE
from traceloom.collect.request_routes import check_own_job
from traceloom.collect.routes import FleetAsked, FleetRoute
from traceloom.store.job_facts import JobFacts

Said: TypeAlias = Annotated[str, Meta(max_length=256, pattern=ONE_LINE)]


class JobStatementBody(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """What a job is; "": it does not say it."""

    model: Said = ""
    framework: Said = ""
    product: Said = ""
    division: Said = ""
    application: Said = ""


class JobStatementAnswer(HttpAnswer, frozen=True):
    """Of which job it was taken, and whether it differs from what the job said before."""

    job: str
    changed: bool


async def _state(asked: FleetAsked) -> JobStatementAnswer:
    job, body = asked.request.path_params["job"], await asked.body(JobStatementBody)
    users = asked.hosts().users_of(job)
    if not users:
        raise RequestError(
            404, f"no host of late has processes of `{job[:256]}`", slug="no-such-job", hint="`traceloom fleet jobs`"
        )
    check_own_job(asked, job)
    said = {name: value for name, value in msgspec.structs.asdict(body).items() if value}
    facts = JobFacts(**said, user=min(users))
    changed = bool(await asyncio.to_thread(asked.service.state.say_of_jobs, {job: facts}, time.time_ns()))
    if changed:
        asked.service.pipeline.look()
        await asked.note(job=job)
    return JobStatementAnswer(job=job, changed=changed)


STATEMENT_ROUTES = (
    FleetRoute(
        path="/api/v1/jobs/{job:path}", summary="Take what a job says of itself", answers=_state,
        answer=JobStatementAnswer, method="PUT", body=JobStatementBody, role="requester", refuses=(400, 403, 404, 503),
    ),
)  # fmt: skip
