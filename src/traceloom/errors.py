"""Every way Traceloom says no.

    TraceloomError
     ├─ UsageError      your call: options or arguments that cannot be right       exit 2
     ├─ InputError      your file: not a trace, or not usable                      exit 3
     ├─ OutputError     the place to write to: it exists, is full, is forbidden    exit 3
     ├─ CaptureError    recording could not start or gave nothing                  exit 3
     ├─ PartialError    some of several inputs were refused                        exit 4
     ├─ CheckError      a check you asked for failed                               exit 5
     └─ InvariantError  our fault: a structure broke its own law                   exit 1

Each error has a stable slug; `traceloom explain SLUG` and docs/reference/messages.md say what it
means.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

DOCUMENTATION = "https://traceloom.readthedocs.io"


class TraceloomError(Exception):
    """Something is wrong: what, where, what was expected, what to do.

    Args:
        message: What is wrong, one sentence, without a final full stop needed.
        slug: Stable name of this kind of error; an anchor in docs/reference/messages.md.
        where: The place: a file, a rank, a JSON path, a byte.
        hint: What to do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, slug: str, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.slug = slug
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.message}{where}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders when ranks are read in parallel; keyword-only fields need
        # help to pickle.
        return _rebuild, (type(self), self.message, self.slug, self.where, self.hint)

    def to_dict(self) -> dict[str, str]:
        """The error as the JSON object that `--json` prints."""
        return {"slug": self.slug, "message": self.message, "where": self.where, "hint": self.hint}


def _rebuild(
    kind: type[TraceloomError], message: str, slug: str, where: str, hint: str
) -> TraceloomError:
    return kind(message, slug=slug, where=where, hint=hint)


class UsageError(TraceloomError, ValueError):
    """The call cannot be right, whatever the data."""

    exit_code = 2


class InputError(TraceloomError):
    """A file is refused: it is not what it should be, and nothing in it can be used."""

    exit_code = 3


class OutputError(TraceloomError):
    """The result cannot be written where it should go."""

    exit_code = 3


class CaptureError(TraceloomError):
    """Recording could not start, or nothing was recorded."""

    exit_code = 3


class PartialError(TraceloomError):
    """Some of several inputs were refused; the rest was done."""

    exit_code = 4


class CheckError(TraceloomError):
    """A check the user asked for failed."""

    exit_code = 5


class InvariantError(TraceloomError):
    """A structure of ours broke its own law."""

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        slug: str,
        where: str = "",
        hint: str = "this is a defect of Traceloom, please report it",
    ) -> None:
        super().__init__(message, slug=slug, where=where, hint=hint)


def broken(law: str, message: str) -> InvariantError:
    """The error for a structure that broke one of its laws (`nesting`, `order`, ...), in words."""
    return InvariantError(message, slug=f"broken-{law}")


def unreadable(path: object, error: OSError | ValueError, kind: str = "file") -> InputError:
    """The error for a file or another kind of thing that cannot be opened or read."""
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return InputError(f"the {kind} cannot be read: {reason}", slug="unreadable", where=str(path))


def other_version(what: str, version: object, reads: int, where: object) -> InputError:
    """The error for a file or message of ours in another version of its format than the one that is
    read here.
    """
    return InputError(
        f"the {what} has format version {version!r}, this Traceloom reads version {reads}",
        slug="other-version",
        where=str(where),
        hint="make it again with this Traceloom, or use the one that wrote it",
    )


def nearest(word: str, names: Iterable[str]) -> str:
    """How a hint begins for a word that is none of the names: "did you mean `report`? "; empty
    where none is.
    """
    import difflib

    likely = difflib.get_close_matches(word, list(names), n=1)
    return f"did you mean `{likely[0]}`? " if likely else ""
