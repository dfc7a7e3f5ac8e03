"""What links carried, how long they were busy, and how long messages waited for them."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.array_types import Floats
from traceloom.simulate.network.topology import MachineNetwork


class LinkUse:
    """Adds up over messages; shape (links,) each.

    Attributes:
        bytes: What the link carried.
        busy_ns: Time in which it carried something.
        waiting_ns: How much longer messages took than alone because of this link; summed over messages.
    """

    def __init__(self, network: MachineNetwork) -> None:
        self._network = network
        self.bytes: Floats = np.zeros(network.bandwidth.size)
        self.busy_ns: Floats = np.zeros(network.bandwidth.size)
        self.waiting_ns: Floats = np.zeros(network.bandwidth.size)

    def frame(self) -> pl.DataFrame:
        """link, name, source, target, bytes, busy_ns, waiting_ns of every link that carried something."""
        links = self._network.links.select("link", "name", "source", "target")
        rows = links["link"].to_numpy()
        counts = {
            name: pl.Series(np.rint(values[rows]).astype(np.int64))
            for name, values in (("bytes", self.bytes), ("busy_ns", self.busy_ns), ("waiting_ns", self.waiting_ns))
        }
        return links.with_columns(**counts).filter(self.bytes[rows] > 0)
