"""From what the hosts of a request sent to a capture of the store that the pipeline analyses."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from traceloom import __version__
from traceloom.collect.hosts import HostDesk
from traceloom.collect.pipeline import CapturePipeline, folder_of
from traceloom.collect.plan import FleetRequest, analysed, stitched
from traceloom.collect.stitch import HostPart, stitch
from traceloom.errors import TraceloomError
from traceloom.files import sha256_of
from traceloom.store.state import CaptureRecord, FileOfCapture

LOG = logging.getLogger("traceloom.collect")
_LOOK_S = 0.5
_PAUSE_S, _TROUBLE_S = 5.0, 900.0  # between tries, and for how long, where the state or a store does not answer
_FOR_GOOD = {"no-capture", "unsafe-name"}  # what is wrong with the parts themselves


class Joining:
    """Joins the parts of requests, one after the other, and waits for their analysis.

    Args:
        desk: Knows requests, and where their parts lie.
        pipeline: Analyses.
    """

    def __init__(self, desk: HostDesk, pipeline: CapturePipeline) -> None:
        self.desk, self.pipeline = desk, pipeline
        self._one = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def take(self, request: FleetRequest) -> None:
        """See to a request that is `stitching` or `analysing`."""
        if request.id not in self._tasks:
            task = asyncio.create_task(self._through(request), name=f"join {request.id}")
            self._tasks[request.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    async def close(self) -> None:
        """Stop; requests go on when the service starts again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _through(self, request: FleetRequest) -> None:
        """Bring it to its end; where the state or a store does not answer it is tried again for a while."""
        until = time.monotonic() + _TROUBLE_S
        while True:
            try:
                if request.state == "stitching":
                    async with self._one:
                        capture, faults = await asyncio.to_thread(self._join, request)
                    request = stitched(request, capture, self.desk.clock(), faults)
                    await self.desk.put(request)
                fault = await self._analysed(request.capture)
                break
            except (TraceloomError, OSError) as error:
                slug = error.slug if isinstance(error, TraceloomError) else ""
                if slug == "not-leading":
                    return  # it is another service's now
                LOG.warning("request %s: %s", request.id, error)
                fault = str(error)
                if slug in _FOR_GOOD or time.monotonic() > until:
                    break
            except Exception as error:  # of ours; the request ends and says so, it does not stay as it is for ever
                LOG.exception("request %s cannot be joined", request.id)
                fault = f"a defect of the service: {type(error).__name__}: {error}"
                break
            await asyncio.sleep(_PAUSE_S)
        with contextlib.suppress(TraceloomError):  # the desk writes it down as soon as it can
            await self.desk.put(analysed(request, self.desk.clock(), fault))

    async def _analysed(self, capture: str) -> str:
        """Why the analysis of a capture failed for good; "" once its rows are in the tables."""
        while True:
            tasks = await asyncio.to_thread(self.pipeline.state.tasks, capture)
            if tasks and tasks[-1].state == "committed":
                return ""
            if tasks and tasks[-1].state == "quarantined":
                return tasks[-1].error or "it could not be analysed"
            await asyncio.sleep(_LOOK_S)

    def _join(self, request: FleetRequest) -> tuple[str, list[str]]:
        """Stitch, and put the capture into the store; its name, and what was wrong. Done again it gives the same."""
        parts = [
            HostPart(host=host, folder=self.desk.incoming / request.id / host, clock=progress.clock)
            for host, progress in request.hosts.items()
            if progress.state == "uploaded"
        ]
        day = datetime.fromtimestamp(request.asked_ns / 1e9, timezone.utc).date().isoformat()
        asked = {
            "id": request.id, "who": request.who, "asked_ns": request.asked_ns,
            "wanted": msgspec.to_builtins(request.wanted),
        }  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="traceloom-", dir=self.desk.incoming) as temporary:
            whole = Path(temporary, "capture")
            faults = stitch(parts, whole, asked)
            for fault in faults:
                LOG.warning("request %s: %s", request.id, fault)
            paths, announced = sorted(whole.iterdir()), []
            for path in paths:
                with path.open("rb") as file:
                    sha256 = sha256_of(file)
                    announced.append(FileOfCapture(path.name, file.tell(), sha256))
            files = tuple(announced)
            record = CaptureRecord(
                id=f"c{hashlib.sha256(request.id.encode()).hexdigest()[:20]}", day=day, job=request.wanted.job,
                uploader=request.who, received_ns=self.desk.clock(), complete=False,
                bytes=sum(file.size for file in files), files=files,
            )  # fmt: skip
            record = self.pipeline.state.add_capture(record)
            if not record.complete:
                for path in paths:
                    self.pipeline.objects.put_file(f"{folder_of(record)}/{path.name}", path)
                self.pipeline.state.complete_capture(record.id, __version__)
                self.pipeline.look()
        return record.id, faults
