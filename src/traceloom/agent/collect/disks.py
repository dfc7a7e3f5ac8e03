"""Disks and file systems."""

from __future__ import annotations

import os
import re

from traceloom.agent.collect import HostCollector, read
from traceloom.agent.metrics import Reading

_SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk's own are
_MOST_MOUNTS = 64
_NO_DISK = re.compile(r"(?:loop|ram|zram|sr|fd|dm-|md)\d*")  # parts of others, or made up
# Of this host: asking a remote one for its space may hang for as long as its server does.
_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"}


class Disks(HostCollector):
    """Reads /proc/diskstats and the mounted file systems; of remote ones no space is asked for, as it may hang."""

    name = "disks"

    def collect(self) -> list[Reading]:
        """Whole disks, without partitions; each device's file system once."""
        readings = []
        for line in read(self.proc / "diskstats").decode().splitlines():
            words = line.split()
            if len(words) < 14 or _NO_DISK.fullmatch(words[2]) or not (self.sys / "block" / words[2]).exists():
                continue
            disk, numbers = words[2], [int(word) for word in words[3:]]
            readings += [
                Reading("host_disk_bytes_total", (disk, "read"), numbers[2] * _SECTOR_BYTES),
                Reading("host_disk_bytes_total", (disk, "write"), numbers[6] * _SECTOR_BYTES),
                Reading("host_disk_operations_total", (disk, "read"), numbers[0]),
                Reading("host_disk_operations_total", (disk, "write"), numbers[4]),
                Reading("host_disk_busy_seconds_total", (disk,), numbers[9] / 1000),
            ]
        seen: set[str] = set()
        for line in read(self.view / "mounts").decode(errors="replace").splitlines():
            device, mount, kind, *_ = line.split()
            if kind not in _FILE_SYSTEMS or device in seen or len(seen) >= _MOST_MOUNTS:
                continue
            seen.add(device)
            mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount)
            try:
                space = os.statvfs(f"{self.view}/root{mount}" if self.view.name == "1" else mount)
            except OSError:  # it was unmounted meanwhile, or is another user's
                continue
            block = space.f_frsize
            readings += [
                Reading("host_filesystem_bytes", (mount, "used"), (space.f_blocks - space.f_bfree) * block),
                Reading("host_filesystem_bytes", (mount, "free"), space.f_bavail * block),
                Reading(
                    "host_filesystem_bytes", (mount, "reserved"), (space.f_bfree - space.f_bavail) * space.f_frsize
                ),
            ]
        return readings

    def trouble(self) -> list[str]:
        """Nothing: what is not there has no reading."""
        return []
