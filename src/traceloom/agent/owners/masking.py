"""Command lines as they may be shown: what looks like a secret is three stars, the rest stays readable."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"
_KEY = (
    r"(?:[\w.-]*?(?:token|secret|passw(?:or)?d|passphrase|pwd|credential|api[-_]?key|access[-_]?key|auth|private[-_]?key)"
    r"[\w.-]*)"
)
# `--hf-token=x`, `WANDB_API_KEY=x`, `password: x`
_ASSIGNED = re.compile(
    rf"(?P<before>(?<![\w-])-{{0,2}}{_KEY}\s*[=:]\s*)(?P<secret>(?!\*\*\*).+)", re.IGNORECASE | re.DOTALL
)
# `--token x`, where x is the next word
_OPTION = re.compile(rf"-{{1,2}}{_KEY}", re.IGNORECASE)
_IN_URL = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)|(?<=://)(?!\*)[^/\s:@]{16,}(?=@)", re.IGNORECASE
)
_BEARER = re.compile(r"(?P<before>\b(?:bearer|basic|token)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
# Forms of tokens that say what they are: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, JSON web tokens.
_SHAPES = re.compile(
    r"\b(?:hf_\w{8,}|sk-[\w-]{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def masked(command: Sequence[str]) -> str:
    """The words of a command line in one line, with secrets masked; masking twice changes nothing more."""
    words = []
    follows = False  # the last word was an option whose value is a secret
    for word in command:
        if follows and not (word.startswith("-") and _OPTION.fullmatch(word)):
            words.append(MASK)
            follows = False
            continue
        follows = _OPTION.fullmatch(word) is not None
        text = _IN_URL.sub(lambda match: (match["before"] or "") + MASK, word)
        text = _BEARER.sub(lambda match: match["before"] + MASK, text)
        text = _SHAPES.sub(MASK, text)
        words.append(_ASSIGNED.sub(lambda match: match["before"] + MASK, text))
    return " ".join(words)
