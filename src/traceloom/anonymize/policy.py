"""The policy: what becomes of each kind of thing. Without a file the defaults protect.

The file is TOML; docs/reference/anonymize.md describes it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from traceloom.errors import InputError, UsageError, other_version
from traceloom.files import read_small

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the tests run on newer ones
    import tomli as tomllib

KEEP, PSEUDONYM, BUCKET, DROP, CATEGORY, ZERO = "keep", "pseudonym", "bucket", "drop", "category", "zero"
COLLAPSE = "collapse"
FIT, CALLS = "fit", "calls"
FORMAT = "traceloom-anonymize-policy"
_MOST_BYTES = 1 << 24

# Field -> what it may be; the first is the default.
CHOICES: dict[str, tuple[str, ...]] = {
    "public_names": (KEEP, PSEUDONYM),
    "names": (PSEUDONYM, KEEP),
    "kernels": (CATEGORY, KEEP),
    "shapes": (BUCKET, KEEP, DROP, FIT),
    "scalars": (DROP, KEEP, CALLS),
    "stacks": (PSEUDONYM, DROP, KEEP),
    "groups": (PSEUDONYM, KEEP),
    "hosts": (PSEUDONYM, DROP),
    "processes": (PSEUDONYM, KEEP),
    "times": (ZERO, KEEP),
    "devices": (KEEP, DROP),
    "versions": (KEEP, DROP),
    "counters": (DROP, KEEP),
    "structure": (KEEP, COLLAPSE),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of each kind of thing; docs/reference/anonymize.md says what each choice does.

    Attributes:
        keep_names: Regular expressions; a name that one of them matches as a whole stays as it is.
        keep_arguments: Further arguments of events, and entries beside the events, that stay where they are numbers.

    Raises:
        UsageError: slug `wrong-usage`: a choice that there is not; it would hide nothing, or something else.
    """

    public_names: str = KEEP
    names: str = PSEUDONYM
    kernels: str = CATEGORY
    shapes: str = BUCKET
    scalars: str = DROP
    stacks: str = PSEUDONYM
    groups: str = PSEUDONYM
    hosts: str = PSEUDONYM
    processes: str = PSEUDONYM
    times: str = ZERO
    devices: str = KEEP
    versions: str = KEEP
    counters: str = DROP
    structure: str = KEEP
    keep_names: tuple[str, ...] = ()
    keep_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                message = f"expected `{name}` to be one of {', '.join(choices)}, got {value!r}"
                raise UsageError(message, slug="wrong-usage")

    def with_structure(self, structure: str | None) -> Policy:
        """The same with `--structure` of the command line, where it is given."""
        return self if structure is None else replace(self, structure=structure)

    def for_replay(self) -> Policy:
        """The same with what a replay needs: arguments of operators, and sizes that fit each other.

        Raises:
            UsageError: slug `wrong-usage`: with collapsed structure nothing can be run.
        """
        if self.structure == COLLAPSE:
            hint = "leave --structure collapse out, or --for replay"
            raise UsageError("what is collapsed cannot be replayed", slug="wrong-usage", hint=hint)
        shapes = self.shapes if self.shapes == KEEP else FIT
        return replace(self, shapes=shapes, scalars=self.scalars if self.scalars == KEEP else CALLS)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the reports."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_policy(path: Path | None) -> Policy:
    """The policy in a file; the defaults for None.

    Raises:
        InputError: slug `bad-policy`: the file is no TOML, or holds what no policy has.
    """
    if path is None:
        return Policy()
    try:
        document = tomllib.loads(read_small(path, _MOST_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise InputError(f"the policy cannot be read: {reason}", slug="bad-policy", where=str(path)) from error
    where = str(path)
    chosen: dict[str, Any] = {}
    for key, value in document.items():
        if key == "format":
            if value != FORMAT:
                raise InputError(f"expected the format `{FORMAT}`, got {value!r}", slug="bad-policy", where=where)
        elif key == "version":
            if value != 1:
                raise other_version("policy", value, 1, where)
        elif key in ("keep_names", "keep_arguments"):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise InputError(f"expected `{key}` to be a list of texts", slug="bad-policy", where=where)
            try:
                re.compile("|".join(f"(?:{item})" for item in value) if key == "keep_names" else "")
            except re.error as error:
                message = f"a text in `keep_names` is no regular expression: {error}"
                raise InputError(message, slug="bad-policy", where=where) from error
            chosen[key] = tuple(value)
        elif key in CHOICES:
            if value not in CHOICES[key]:
                allowed = ", ".join(f'"{choice}"' for choice in CHOICES[key])
                raise InputError(
                    f"expected `{key}` to be one of {allowed}, got {value!r}", slug="bad-policy", where=where
                )
            chosen[key] = value
        else:
            hint = f"a policy has {', '.join([*CHOICES, 'keep_names', 'keep_arguments'])}"
            raise InputError(f"`{key}` is no part of a policy", slug="bad-policy", where=where, hint=hint)
    return Policy(**chosen)
