"""Recording, inside the user's process. Nothing here imports more than the standard library and the
user's torch.

with traceloom.record("run1", steps="20..25") as recording: ...
traceloom.step()
with traceloom.scope("loss"): ...
"""

from __future__ import annotations

from traceloom.capture.in_code import Recording, record, step
from traceloom.capture.scope import scope

__all__ = ["Recording", "record", "scope", "step"]
