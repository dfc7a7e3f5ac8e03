"""What the path of a control group tells: the job of Slurm, the pod, the container.

Forms: Slurm's cgroup/v1 and v2 plugins; the kubelet with cgroupfs and systemd drivers; containerd, CRI-O, Docker and
Podman.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SLURM = re.compile(r"/job_(?P<job>\d+)(?:/|$)")
# `pod1234-...` below kubepods, whose dashes systemd's driver spells as underscores. Seen from a pod's own namespace of
# control groups, the path of another one goes up from there, and need not come by kubepods.
_POD = re.compile(
    r"(?:kubepods[^/]*|^/\.\.)(?:/[^/]+)*?[/-]pod"
    r"(?P<pod>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
)
_CONTAINER = re.compile(
    r"(?:^|/)(?:cri-containerd[-:]|crio-|docker-|libpod-)?(?P<container>[0-9a-f]{64})(?:\.scope)?(?:/|$)"
)


def of_paths(paths: Iterable[str]) -> dict[str, str]:
    """`job`, `scheduler` and `container` as far as the paths of a process's control groups tell them."""
    facts: dict[str, str] = {}
    for path in paths:
        if match := _SLURM.search(path):
            facts.setdefault("job", f"slurm-{match['job']}")
            facts.setdefault("scheduler", "slurm")
        elif match := _POD.search(path):
            facts.setdefault("job", f"pod-{match['pod'].replace('_', '-')}")
            facts.setdefault("scheduler", "kubernetes")
        if match := _CONTAINER.search(path):
            facts.setdefault("container", match["container"][:12])
    return facts
