"""Asks the fleet's service for a trace of this job, from within its training loop; the standard
library alone.

Everything that could wait happens in a thread of its own, and nothing of it is raised: the loop
goes on whether the service is there, slow, or something else that listens.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import quote

from traceloom.capture.distributed import read_rank_and_world
from traceloom.capture.settings import print_once
from traceloom.system.service_address import ServiceAddress

_AHEAD_S = 60.0  # before the step, it is asked for: all hosts are to be ready by then
_POLL_S = 0.2
_SILENT_S, _EXCHANGE_S = 5.0, 20.0
_MAX_ANSWER_BYTES = 1 << 20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 10.0
_MAX_TRY_S = 300.0
_JOBS = ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID_PACK_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID")
_TRANSIENT_REFUSALS = frozenset(
    {"no-such-job", "not-leading", "no-service"}
)  # agents tell of a job now and then


class _RefusedError(Exception):
    """The service does not answer, or refuses; `lasts`: it will do so again."""

    def __init__(self, text: str, *, lasts: bool) -> None:
        super().__init__(text)
        self.lasts = lasts


class Autoprofile:
    """What asks for the trace; made by `autoprofile`.

    Attributes:
        request: The request that was made, "" before.
        last_error: Why there is none, "" where nothing went wrong.
    """

    def __init__(  # noqa: PLR0917  (as of `autoprofile`)
        self, server: str, token: str, job: str, labels: Mapping[str, str], at_step: int, steps: int
    ) -> None:
        self.request = ""
        self.last_error = ""
        self._server, self._token, self._job, self._labels = server, token, job, dict(labels)
        self._at_step, self._steps = at_step, steps
        self._made = 0
        self._first_s = self._last_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traceloom autoprofile", daemon=True)
        self._thread.start()

    def step(self) -> None:
        """A step of the loop has ended. Costs less than a microsecond, and waits for nothing."""
        self._last_s = time.monotonic()
        self._made += 1
        if self._made == 1:
            self._first_s = self._last_s

    def close(self) -> None:
        """Ask for nothing any more; what was asked for is traced. Does not wait."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._ask_in_time()
        except Exception as error:  # noqa: BLE001  (whatever it is, the program goes on)
            self.last_error = str(error) or type(error).__name__
            print_once("no-autoprofile", f"no trace of this job was asked for: {self.last_error}")

    def _ask_in_time(self) -> None:
        rank = read_rank_and_world()[0]
        if rank:  # the first one asks for all
            return
        if not self._job:
            raise _RefusedError(
                "nothing says which job this is: name it with job=, or set TRACELOOM_JOB",
                lasts=True,
            )
        if not self._server:
            raise _RefusedError(
                "nothing says where the service is: server=, or TRACELOOM_SERVER", lasts=True
            )
        address = ServiceAddress.of(self._server)
        if self._labels:
            self._until_taken(
                address,
                "PUT",
                f"jobs/{quote(self._job, safe='')}",
                lambda: dict[str, object](self._labels),
            )
        while self._at_step and ((left_s := self._left_s()) is None or left_s > _AHEAD_S):
            if self._ended.wait(_POLL_S):
                return
        answer = self._until_taken(address, "POST", "requests", self._body)
        if answer is not None:
            self.request = str(answer.get("id", ""))[:64]

    def _left_s(self) -> float | None:
        """Seconds until the step, by the pace of those that were made; None where that is not
        known.
        """
        if self._made < 2:
            return None
        return (self._at_step - self._made) * (self._last_s - self._first_s) / (self._made - 1)

    def _body(self) -> dict[str, object]:
        left_s = self._left_s() or 0.0
        return {
            "spec": {"job": self._job, "steps": self._steps},
            "start": "step",
            "at_step": self._at_step,
            "after_s": min(max(left_s, 0.0), 3600.0),
            "mark": f"autoprofile {self._at_step}",
        }

    def _until_taken(
        self,
        address: ServiceAddress,
        method: str,
        route: str,
        body: Callable[[], dict[str, object]],
    ) -> dict[str, object] | None:
        """The answer of the service, asked again until it takes it or it is too late; None where
        the loop has ended.
        """
        wait_s, until = _FIRST_WAIT_S, time.monotonic() + _MAX_TRY_S
        while True:
            try:
                return self._exchange(address, method, route, json.dumps(body()).encode())
            except _RefusedError as error:
                late = bool(self._at_step) and self._made >= self._at_step
                if error.lasts or late or time.monotonic() > until:
                    raise
            if self._ended.wait(wait_s):
                return None
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _exchange(
        self, address: ServiceAddress, method: str, route: str, body: bytes
    ) -> dict[str, object]:
        connection = address.connection(_SILENT_S)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        try:
            connection.connect()
            # Who sends a letter now and then would never be silent for long.
            watchdog = threading.Timer(_EXCHANGE_S, partial(_close_connection, connection.sock))
            watchdog.daemon = True
            watchdog.start()
            try:
                connection.request(method, f"{address.prefix}/api/v1/{route}", body, headers)
                with connection.getresponse() as response:
                    text = response.read(_MAX_ANSWER_BYTES + 1)
            finally:
                watchdog.cancel()
        except Exception as error:
            # Whatever a stranger sends is no answer; of the network, it may come back.
            raise _RefusedError(
                f"the service does not answer: {error or type(error).__name__}", lasts=False
            ) from error
        finally:
            connection.close()
        try:
            answer = json.loads(text) if len(text) <= _MAX_ANSWER_BYTES else None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or 300 <= response.status < 400:
            raise _RefusedError(
                f"what answers at {self._server} is no service of a fleet", lasts=True
            )
        if response.status >= 400:
            problem = answer.get("error")
            problem = problem if isinstance(problem, dict) else {}
            lasts = (
                response.status < 500
                and response.status != 429
                and problem.get("slug") not in _TRANSIENT_REFUSALS
            )
            raise _RefusedError(
                f"the service refuses: {str(problem.get('message', response.status))[:300]}",
                lasts=lasts,
            )
        return answer


def _close_connection(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def autoprofile(
    server: str = "",
    *,
    job: str = "",
    model: str = "",
    framework: str = "",
    product: str = "",
    at_step: int = 0,
    steps: int = 3,
    token: str = "",
) -> Autoprofile:
    """Ask the fleet's service for a trace of all ranks of this job that begins with a step.

    Call it once, before the loop, and `step()` of what it returns after each step. It never raises
    and never waits: what goes wrong is one line on standard error, and in `last_error`. Only the first
    rank asks, and one request is made, however many ask. The job is one that agents see (`traceloom
    agent env`).

    Args:
        server: Where the service is, `https://...`; "": as `TRACELOOM_SERVER` says.
        job: Name of the job; "": as `TRACELOOM_JOB` says, or Slurm.
        model: What it trains or serves, for the tables of the fleet; "": not said.
        framework: What it runs on, the same.
        product: What it is for, the same.
        at_step: With which step, counted by `step()`; 0: with the next that all ranks can begin with.
        steps: How many are traced.
        token: What says who asks; "": as `TRACELOOM_TOKEN` says.

    Example:
        >>> profile = traceloom.autoprofile("https://fleet.example:9466", model="gpt", at_step=100)  # doctest: +SKIP
        >>> for batch in data:  # doctest: +SKIP
        ...     train(batch)
        ...     profile.step()
    """
    slurm = next((os.environ[name] for name in _JOBS if os.environ.get(name)), "")
    job = job or os.environ.get("TRACELOOM_JOB", "") or (f"slurm-{slurm}" if slurm else "")
    labels = {"model": model, "framework": framework, "product": product}
    return Autoprofile(
        server or os.environ.get("TRACELOOM_SERVER", ""),
        token or os.environ.get("TRACELOOM_TOKEN", ""),
        job,
        {name: value for name, value in labels.items() if value},
        at_step,
        steps,
    )
