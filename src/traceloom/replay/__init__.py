"""Run a recorded workload again on real hardware, without its code and its data.

Planning reads files and needs no torch; only the modules that run a plan import it, when they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traceloom.lazy import lazy

if TYPE_CHECKING:
    from traceloom.replay.dry_run import RankDryRun as RankDryRun
    from traceloom.replay.dry_run import dry_run as dry_run
    from traceloom.replay.plan import RankPlan as RankPlan
    from traceloom.replay.plan import ReplayPlan as ReplayPlan
    from traceloom.replay.planning import Choice as Choice
    from traceloom.replay.planning import make_plan as make_plan
    from traceloom.replay.ranks import replay as replay
    from traceloom.replay.replayed import RankReplayed as RankReplayed
    from traceloom.replay.replayed import Replayed as Replayed
    from traceloom.replay.running import RunOptions as RunOptions

lazy(
    __name__,
    {
        "Choice": ".planning",
        "ReplayPlan": ".plan",
        "RankDryRun": ".dry_run",
        "RankPlan": ".plan",
        "RankReplayed": ".replayed",
        "Replayed": ".replayed",
        "RunOptions": ".running",
        "dry_run": ".dry_run",
        "make_plan": ".planning",
        "replay": ".ranks",
    },
)
