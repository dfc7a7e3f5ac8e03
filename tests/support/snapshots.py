"""Memory snapshots of PyTorch's allocator, made by hand: the same structure that `_dump_snapshot` pickles."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

Frames = tuple[tuple[str, int, str], ...]


class SnapshotBuilder:
    """Plays the caching allocator of one device, and keeps its history and its segments.

    Args:
        segment: Bytes of a segment; blocks are rounded to 512.
        start_us: Time of the first entry; each entry is one microsecond later. None: a version without times.
    """

    def __init__(
        self, segment: int = 1 << 21, start_us: int | None = 1_700_000_000_000_000
    ) -> None:
        self.entries: list[dict[str, Any]] = []
        self.oldest = 0
        self._segment, self._time = segment, start_us
        self._segments: list[list[dict[str, Any]]] = []
        self._shared: dict[tuple[str, int, str], dict[str, Any]] = {}

    def alloc(self, size: int, *frames: tuple[str, int, str]) -> int:
        """Give out a block; `frames` are the stack, the innermost first. Returns its address."""
        rounded = -(-size // 512) * 512
        free = [
            b
            for segment in self._segments
            for b in segment
            if b["state"] == "inactive" and b["size"] >= rounded
        ]
        if free:
            block = min(free, key=lambda block: int(block["size"]))
        else:
            whole = max(self._segment, -(-rounded // self._segment) * self._segment)
            address = 0x7F0000000000 + (len(self._segments) << 36)
            block = {
                "address": address,
                "size": whole,
                "state": "inactive",
                "segment": len(self._segments),
            }
            self._segments.append([block])
            self._add("segment_alloc", address, whole, [])
        if block["size"] > rounded:
            segment = self._segments[block["segment"]]
            rest = {**block, "address": block["address"] + rounded, "size": block["size"] - rounded}
            segment.insert(segment.index(block) + 1, rest)
        block |= {
            "size": rounded,
            "requested_size": size,
            "state": "active_allocated",
            "frames": self._stack(frames),
        }
        self._add("alloc", block["address"], size, block["frames"])
        return int(block["address"])

    def free(self, address: int, *, completed: bool = True) -> SnapshotBuilder:
        """Take a block back."""
        block = next(b for segment in self._segments for b in segment if b["address"] == address)
        self._add("free_requested", address, block["requested_size"], [])
        if completed:
            self._add("free_completed", address, block["requested_size"], [])
        block["state"] = "inactive" if completed else "active_pending_free"
        return self

    def out_of_memory(self, size: int, free: int, *frames: tuple[str, int, str]) -> SnapshotBuilder:
        """Memory runs out."""
        entry = {
            "action": "oom",
            "device_free": free,
            "size": size,
            "stream": 0,
            "frames": self._stack(frames),
        }
        self.entries.append(self._timed(entry))
        return self

    def forget(self) -> SnapshotBuilder:
        """The history begins here: what came before has fallen out of it."""
        self.oldest = len(self.entries)
        return self

    def build(self, *, devices: int = 1, history: bool = True) -> dict[str, Any]:
        """The document, as PyTorch makes it."""
        segments = []
        for blocks in self._segments:
            shown = [
                {key: value for key, value in block.items() if key != "segment"}
                | (
                    {}
                    if block["state"].startswith("active")
                    else {"requested_size": 0, "frames": []}
                )
                for block in blocks
            ]
            active = [block for block in shown if block["state"] == "active_allocated"]
            segments.append(
                {
                    "device": 0,
                    "address": blocks[0]["address"],
                    "total_size": sum(b["size"] for b in blocks),
                    "allocated_size": sum(b["size"] for b in active),
                    "active_size": sum(b["size"] for b in active),
                    "requested_size": sum(b["requested_size"] for b in active),
                    "stream": 0,
                    "segment_type": "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": [],
                    "blocks": shown,
                }
            )
        traces = [self.entries[self.oldest :] if history else [], *([] for _ in range(devices - 1))]
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": {},
            "external_annotations": [],
        }

    def write(self, path: str | Path, **options: Any) -> Path:
        """Pickle it as `torch.cuda.memory._dump_snapshot` does."""
        Path(path).write_bytes(pickle.dumps(self.build(**options), protocol=4))
        return Path(path)

    def _stack(self, frames: tuple[tuple[str, int, str], ...]) -> list[dict[str, Any]]:
        return [
            self._shared.setdefault(f, {"filename": f[0], "line": f[1], "name": f[2]})
            for f in frames
        ]

    def _add(self, action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        self.entries.append(self._timed(entry))

    def _timed(self, entry: dict[str, Any]) -> dict[str, Any]:
        if self._time is not None:
            self._time += 1
            entry["time_us"] = self._time
        return entry
