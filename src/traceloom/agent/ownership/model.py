"""Types of owners and processes, shares of devices, and masking of secrets in command lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from traceloom.agent.accelerators.backend import DeviceProcess


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a process. "" or None: unknown. `sources`: field -> where it was read."""

    job: str = ""  # equal on all its hosts: `slurm-4242`, `torchelastic-<run id>`, `pod-<uid>` ...
    name: str = ""
    scheduler: str = ""  # slurm, kubernetes, torchrun, mpi, ray, lsf, pbs, flux, or ""
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    user: str = ""
    account: str = ""
    partition: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    framework: str = ""  # pytorch, jax, tensorflow or ""
    framework_version: str = ""
    devices: tuple[str, ...] = ()  # uuids that it was assigned, used or not
    labels: dict[str, str] = {}
    sources: dict[str, str] = {}


class JobNames:
    """What jobs are called: who is first keeps a name, and the job of another owner is NAME@OWNER,
    since anybody can state any name. A scheduler's own evidence goes before, whoever it is of.

    Args:
        most: Names that are kept; those that were claimed last.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Name -> whether a scheduler said it, and its owners; claimed last at the end.
        self._owners: dict[str, tuple[bool, set[object]]] = {}

    def claim(self, job: str, owner: int | str, *known_as: int | str, is_scheduled: bool) -> str:
        """Returns the name of an owner's job, which is kept. `known_as`: what else it is called, the
        first in the name.
        """
        while True:
            was_scheduled, owners = self._owners.pop(job, (False, set()))
            if is_scheduled and not was_scheduled:
                owners = set()
            if is_scheduled or not owners:
                owners |= {owner, *known_as}
            self._owners[job] = (was_scheduled or is_scheduled, owners)
            if len(self._owners) > self.most:
                # Of a user who makes up many names the own ones go first.
                others = (name for name, (_, who) in self._owners.items() if owner in who)
                oldest = next(others)
                del self._owners[oldest if oldest != job else next(iter(self._owners))]
            if owner in owners:
                return job
            job = f"{job}@{(*known_as, owner)[0]}"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A relevant process: it uses a device, runs a framework, or belongs to a job.

    Its identity is (boot id of the host, pid, start time); `key` is `PID@START`, where START is in
    clock ticks since boot. `command` has its secrets masked; `declared` holds only the listed
    variables of its environment.
    """

    key: str
    pid: int
    start_ticks: int
    started_ns: int
    parent_pid: int
    uid: int
    command: str
    cgroup: str = ""
    declared: dict[str, str] = {}
    owner: Owner = Owner()
    state: str = ""  # R, S, D, T, Z as in /proc
    unreadable: str = ""  # what could not be read of it, and why
    devices: tuple[str, ...] = ()  # uuids that it uses
    steps_per_second: float | None = None


MASK = "***"
_SECRET_KEY = (
    r"(?:[\w.-]*?(?:token|secret|passw(?:or)?d|passphrase|pwd|credential|api[-_]?key|access[-_]?key|auth|private[-_]?key)"  # noqa: S105
    r"[\w.-]*)"
)
# `--hf-token=x`, `WANDB_API_KEY=x`, `password: x`
_ASSIGNED_SECRET = re.compile(
    rf"(?P<before>(?<![\w-])-{{0,2}}{_SECRET_KEY}\s*[=:]\s*)(?P<secret>(?!\*\*\*).+)",
    re.IGNORECASE | re.DOTALL,
)
# `--token x`, where x is the next word
_SECRET_OPTION = re.compile(rf"-{{1,2}}{_SECRET_KEY}", re.IGNORECASE)
_URL_PASSWORD = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)|(?<=://)(?!\*)[^/\s:@]{16,}(?=@)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<before>\b(?:bearer|basic|token)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
# Tokens with a recognizable format: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, JSON
# web tokens.
_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_\w{8,}|sk-[\w-]{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def mask_secrets(command: Sequence[str]) -> str:
    """Returns the words of a command line in one line, with secrets masked; idempotent."""
    masked = []
    follows = False  # the previous word was an option whose value is a secret
    for word in command:
        if follows and not (word.startswith("-") and _SECRET_OPTION.fullmatch(word)):
            masked.append(MASK)
            follows = False
            continue
        follows = _SECRET_OPTION.fullmatch(word) is not None
        text = _URL_PASSWORD.sub(lambda match: (match["before"] or "") + MASK, word)
        text = _BEARER.sub(lambda match: match["before"] + MASK, text)
        text = _KNOWN_TOKENS.sub(MASK, text)
        masked.append(_ASSIGNED_SECRET.sub(lambda match: match["before"] + MASK, text))
    return " ".join(masked)


SHARE_PARTS = 1 << 40  # shares are multiples of this, so that their sum is exactly 1, in any order


class Share(NamedTuple):
    """A process's share of a device: 0 to 1. `assumed`: it was not measured."""

    part: float
    assumed: bool


def compute_shares(
    processes: Iterable[DeviceProcess],
    keys: Mapping[int, str],
    busy: Mapping[str, float] | None = None,
) -> dict[tuple[str, str], Share]:
    """Returns the share of each process in each device that it uses; those of a device add up to
    exactly 1.

    Shares are proportional to the busy ratios of the processes. Processes without a known ratio
    share the rest of the device's busy time equally, and their shares are assumed; memory says
    nothing about who computes. If no process was busy, the device is split equally.

    Args:
        processes: The processes on each device.
        keys: Key of a process by its pid. A process without one gets the key `PID@`, so that its
            share belongs to no other.
        busy: Busy ratio of each device, 0 to 1, if known.

    Returns:
        (uuid of the device, key of the process) -> its share.
    """
    used: dict[str, dict[str, list[float | None]]] = {}
    for process in processes:  # a process may be listed several times, once per context
        key = keys.get(process.pid) or f"{process.pid}@"
        used.setdefault(process.device, {}).setdefault(key, []).append(process.busy_ratio)
    divided: dict[tuple[str, str], Share] = {}
    for device, entries in used.items():
        measured = {
            key: sum(ratio for ratio in ratios if ratio is not None)
            for key, ratios in entries.items()
            if None not in ratios
        }
        total = sum(measured.values())
        unmeasured = max((busy or {}).get(device, max(1.0, total)) - total, 0.0)
        unmeasured_count = len(entries) - len(measured)
        weights = [
            measured[key] if key in measured else unmeasured / unmeasured_count for key in entries
        ]
        idle = not any(weights)
        for key, part in zip(entries, split_by_weights(SHARE_PARTS, weights), strict=True):
            divided[device, key] = Share(part / SHARE_PARTS, idle or key not in measured)
    return divided


def split_by_weights(total: int, weights: Sequence[float]) -> list[int]:
    """Split an integer, such as milliseconds, into integers in proportion to weights, which add up
    to it.

    The rounding error goes to the largest remainders. If all weights are 0, parts are equal;
    without weights there are no parts.

    Raises:
        ValueError: A weight is negative or not finite.
    """
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    exact = (
        [Fraction(weight) for weight in weights] if any(weights) else [Fraction(1)] * len(weights)
    )
    weight_sum = sum(exact)
    ideal = [total * weight / weight_sum for weight in exact]
    parts = [math.floor(part) for part in ideal]
    remainder_order = sorted(range(len(parts)), key=lambda at: (parts[at] - ideal[at], at))
    for index in remainder_order[: total - sum(parts)] if parts else ():
        parts[index] += 1
    return parts
