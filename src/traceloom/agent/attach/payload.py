"""The code that runs in a process that is attached to. The agent never runs this file: it sends its
text, and the order as JSON.

It runs in a thread of its own, under any Python (3.8 or later) and PyTorch of the program, and must
not raise into the program, wait for anything that the program may hold, or leave anything behind.
The order stands as long as its file exists: deleting that ends the work. Progress is appended to
that file, one line of JSON each.

PyTorch's profiler sees all threads here, whichever thread starts it. A profile of the program
itself has priority: PyTorch 2.13 crashes if two overlap, so ours ends before the program's starts,
and before Python ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_S = 0.05
_OWN_S = 2.0  # between looks for a profile of the program's own, which cost some 30 ms of a large program
_MOST_ENTRIES = 100_000  # of the allocator's history, the newest
_WORDS = {
    "exited": "the program ended",
    "cancelled-by-program": "the program started a profile of its own",
}


class OrderOverError(Exception):
    """The order was deleted or has expired."""


class OrderRefusedError(Exception):
    """The order cannot be carried out here."""

    def __init__(self, detail: str, *, slug: str) -> None:
        super().__init__(detail)
        self.slug = slug


class AttachedWork:
    """Does what an order says, once: see `run`.

    Args:
        order: `folder` and `name` of the result (the order's file is `NAME.order`), `kind` (`timeline`, `memory`),
            `trace_id`, `steps` or `seconds`, `begin_ns` (0: at once; wall clock), `waits` (whether
            `NAME.begin` will say when), `until_ns`, and `shapes`, `stacks`, `flops`, `modules`;
            `text_at` and `text_bytes`: where this came into the program's memory.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.pid = os.getpid()
        self.path = os.path.join(order["folder"], order["name"])  # noqa: PTH118  (pathlib may not be imported yet)
        self.ended = threading.Event()  # what is recorded is over, or will never begin
        self.lock = threading.RLock()  # held while the profiler begins, ends or writes
        self.stop: Callable[[], Any] | None = None  # ends what records
        self.reason = self.detail = ""  # why it ended early
        self.starter = 0  # the thread that begins ours just now
        self.is_ready = False  # ours may begin
        self.own_begun = 0  # profiles of the program's own
        self.start_ns = self.end_ns = 0
        self.held_ns = 0  # what beginning, ending and writing took: the program's Python may stand still meanwhile
        self.undo: list[Callable[[], Any]] = [self._free]

    def run(self) -> None:
        """All of it; what fails is told, and nothing else happens."""
        try:
            if os.path.exists(self.path + ".order"):  # noqa: PTH110
                self._tell(state="began")
                while True:  # until the program has imported it
                    torch = sys.modules.get("torch")
                    if torch is None:
                        raise OrderRefusedError(  # noqa: TRY301
                            "the program has not imported PyTorch", slug="no-torch"
                        )
                    if not getattr(getattr(torch, "__spec__", None), "_initializing", False):
                        break
                    self._wait(waits_for="PyTorch is still being imported")
                self._timeline(torch) if self.order["kind"] == "timeline" else self._memory(torch)
        except OrderOverError:
            pass
        except OrderRefusedError as error:
            self._tell(state="failed", slug=error.slug, detail=str(error)[:300])
        except BaseException as error:  # noqa: BLE001  (a thread of ours in a stranger's program)
            self._tell(
                state="failed",
                slug="program-error",
                detail=f"{type(error).__name__}: {error}"[:300],
            )
        finally:
            self._finish("over")
            while self.undo:
                with contextlib.suppress(BaseException):
                    self.undo.pop()()

    def _timeline(self, torch: Any) -> None:
        from torch.autograd import profiler
        from torch.profiler import ProfilerActivity, _KinetoProfile

        order = self.order
        try:
            all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001
        except TypeError:
            text = f"PyTorch {torch.__version__} profiles the thread alone that asks for it"
            raise OrderRefusedError(text, slug="old-torch") from None
        while profiler._prepare_profiler.__module__ == __name__:  # noqa: SLF001  (for another agent)
            self._wait(waits_for="another trace of it is recorded")
        for name in ("_prepare_profiler", "_enable_profiler"):
            self._make_way(profiler, name)
        while (
            True
        ):  # until no profile of the program's own runs; one that begins from then on ends ours
            begun = self.own_begun
            runs = any(
                type(candidate) is profiler.profile
                and candidate.entered
                and candidate.kineto_results is None
                for candidate in gc.get_objects()
            )
            with self.lock:
                self.is_ready = not runs and begun == self.own_begun
            if self.is_ready:
                break
            self._wait(_OWN_S, waits_for="its own profiler runs")
        activities = [ProfilerActivity.CPU]
        for name in ("cuda", "xpu"):
            device = getattr(torch, name, None)
            if (
                device is not None
                and device.is_initialized()
                and hasattr(ProfilerActivity, name.upper())
            ):
                activities.append(getattr(ProfilerActivity, name.upper()))
        options = {
            "activities": activities,
            "record_shapes": order["shapes"],
            "with_stack": order["stacks"],
            "with_flops": order["flops"],
            "with_modules": order["modules"],
            "experimental_config": all_threads,
        }
        names_itself = (
            "custom_trace_id_callback" in inspect.signature(_KinetoProfile.__init__).parameters
        )
        if names_itself:
            options["custom_trace_id_callback"] = lambda: order["trace_id"]
        profile = _KinetoProfile(**options)

        def start() -> Callable[[], Any]:
            profile.prepare_trace()
            profile.start_trace()
            if not names_itself:
                profile.add_metadata_json("trace_id", json.dumps(order["trace_id"]))
            stop: Callable[[], Any] = profile.stop_trace
            return stop

        self._record(start)
        self._write(profile.export_chrome_trace)

    def _memory(self, torch: Any) -> None:
        cuda = torch.cuda
        if not (
            cuda.is_available()
            and cuda.is_initialized()
            and hasattr(cuda.memory, "_record_memory_history")
        ):
            raise OrderRefusedError("the program does not use CUDA", slug="no-cuda")
        is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # noqa: SLF001
        has_own = is_enabled is not None and is_enabled()  # a history of the program's own goes on
        record = cuda.memory._record_memory_history  # noqa: SLF001
        parameters = inspect.signature(record).parameters
        options = {"context": "alloc", "stacks": "python", "max_entries": _MOST_ENTRIES}

        def start() -> Callable[[], Any]:
            if not has_own:
                self.undo.append(lambda: record(None))
                record(
                    "all", **{name: value for name, value in options.items() if name in parameters}
                )
            return lambda: None

        self._record(start)
        self._write(cuda.memory._dump_snapshot)  # noqa: SLF001

    def _make_way(self, profiler: Any, name: str) -> None:
        """From here on a profile that the program begins ends ours before."""
        original = getattr(profiler, name)

        def begin(*arguments: Any, **keywords: Any) -> Any:
            if os.getpid() == self.pid and threading.get_ident() != self.starter:
                with self.lock:
                    self.own_begun += 1
                    if self.is_ready:
                        self._finish("cancelled-by-program")
            return original(*arguments, **keywords)

        def put_back() -> None:
            if getattr(profiler, name) is begin:
                setattr(profiler, name, original)

        setattr(profiler, name, begin)
        self.undo.append(put_back)

    def _record(self, start: Callable[[], Callable[[], Any]]) -> None:
        """From when it is to begin until its steps or its time are over."""
        begin_ns = self.order["begin_ns"]
        self._tell(state="ready")
        while self.order["waits"] and not begin_ns:
            self._wait()
            with contextlib.suppress(OSError, ValueError):  # noqa: SIM117 - parentheses are of Python 3.9
                with open(self.path + ".begin", encoding="ascii") as file:  # noqa: PTH123
                    begin_ns = int(file.read(32))
        while time.time_ns() < begin_ns:
            self._wait(min(_LOOK_S, (begin_ns - time.time_ns()) / 1e9))

        def at_exit() -> None:
            self._finish("exited")

        atexit.register(at_exit)
        self.undo.append(lambda: atexit.unregister(at_exit))
        steps, made = self.order["steps"], -1  # its first step ends before the window begins
        if steps is None:
            self._begin(start)
            end = time.monotonic() + self.order["seconds"]
        else:

            def step(*_: object) -> None:
                nonlocal made
                if os.getpid() != self.pid or self.ended.is_set():
                    return
                made += 1
                if made == 0:
                    self._begin(start)
                elif made == steps:
                    self._finish("")

            from torch.optim.optimizer import register_optimizer_step_post_hook

            self.undo.append(register_optimizer_step_post_hook(step).remove)
            end = time.monotonic() + (self.order["until_ns"] - time.time_ns()) / 1e9
        while time.monotonic() < end and not self.ended.wait(
            max(0.0, min(end - time.monotonic(), 4 * _LOOK_S))
        ):
            if not os.path.exists(self.path + ".order"):  # noqa: PTH110
                raise OrderOverError
        if steps is not None and not self.ended.is_set():
            raise OrderRefusedError(f"it made {max(made, 0)} of {steps} steps", slug="not-stepping")
        self._finish("")
        if self.reason:
            raise OrderRefusedError(self.detail, slug=self.reason)

    def _begin(self, start: Callable[[], Callable[[], Any]]) -> None:
        with self.lock:
            if self.ended.is_set():
                return
            self.starter = threading.get_ident()
            began = time.monotonic_ns()
            try:
                self.stop = start()
            except BaseException as error:  # noqa: BLE001  (it may be in a hook of the program's)
                self.reason, self.detail = "program-error", f"{type(error).__name__}: {error}"
                self.ended.set()
                return
            finally:
                self.starter = 0
            self.start_ns = time.time_ns()
            self.held_ns += time.monotonic_ns() - began
        self._tell(state="recording", start_ns=self.start_ns)

    def _finish(self, reason: str) -> None:
        """End what records, and what might still begin; from any thread, as often as one likes."""
        with self.lock:
            if self.ended.is_set():
                return
            self.ended.set()
            self.reason, self.detail = reason, _WORDS.get(reason, reason)
            if self.stop is not None:
                began = time.monotonic_ns()
                self.end_ns = time.time_ns()
                try:
                    self.stop()
                except BaseException as error:  # noqa: BLE001  (it may be in a hook of the program's)
                    self.reason, self.detail = "program-error", f"{type(error).__name__}: {error}"
                self.held_ns += time.monotonic_ns() - began

    def _wait(self, seconds: float = _LOOK_S, waits_for: str = "") -> None:
        if waits_for:
            self._tell(state="waiting", detail=waits_for)
        time.sleep(max(0.0, seconds))
        if time.time_ns() > self.order["until_ns"] or not os.path.exists(self.path + ".order"):  # noqa: PTH110
            raise OrderOverError

    def _write(self, write: Callable[[str], Any]) -> None:
        """The result, whole or not at all; a program that ends waits for it."""
        part = self.path + ".tmp"
        self.undo.append(lambda: os.unlink(part))  # noqa: PTH108  (of a whole one there is no part)
        with self.lock:
            began = time.monotonic_ns()
            write(part)
            os.rename(part, self.path)  # noqa: PTH104
            self.held_ns += time.monotonic_ns() - began
        self._tell(
            state="written", start_ns=self.start_ns, end_ns=self.end_ns, held_ns=self.held_ns
        )

    def _free(self) -> None:
        import ctypes

        free = ctypes.CDLL(None).munmap
        free(ctypes.c_void_p(self.order["text_at"]), ctypes.c_size_t(self.order["text_bytes"]))

    def _tell(self, **line: str | int) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path + ".order", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            try:
                os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)


if __name__ == "traceloom_attached":
    threading.Thread(
        target=AttachedWork(json.loads(globals()["ORDER"])).run, name="traceloom", daemon=True
    ).start()
