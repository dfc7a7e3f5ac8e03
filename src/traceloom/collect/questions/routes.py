"""The routes of questions, made of their declarations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from traceloom.collect.questions.catalogue import QUESTIONS
from traceloom.collect.questions.declared import Question
from traceloom.collect.routes import FleetAsked, FleetRoute


def _answers(question: Question) -> Callable[[FleetAsked], Awaitable[msgspec.Struct]]:
    async def answer(asked: FleetAsked) -> msgspec.Struct:
        return await asked.service.questions.ask(question, asked.parameters(question.parameters))

    return answer


QUESTION_ROUTES = tuple(
    FleetRoute(
        path=question.path, summary=f"{question.summary[0].upper()}{question.summary[1:]}", answers=_answers(question),
        answer=question.answer, parameters=question.parameters, refuses=(400, 503),
    )
    for question in QUESTIONS
)  # fmt: skip
