"""The routes of questions, made of their declarations."""

from __future__ import annotations

from traceloom.collect.questions.catalogue import QUESTIONS
from traceloom.collect.routes import FleetRoute

QUESTION_ROUTES = tuple(
    FleetRoute(
        path=question.path, summary=f"{question.summary[0].upper()}{question.summary[1:]}",
        answers=lambda asked, question=question: asked.service.questions.ask(  # type: ignore[misc]
            question, asked.parameters(question.parameters)
        ),
        answer=question.answer, parameters=question.parameters, refuses=(400, 503),
    )
    for question in QUESTIONS
)  # fmt: skip
