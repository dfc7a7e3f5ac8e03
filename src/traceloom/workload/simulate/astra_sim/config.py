"""Network.yml and system.json."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from traceloom.analyze.placed_calls import Peak
from traceloom.errors import InputError, UsageError, nearest, unreadable
from traceloom.system.files import note_input, read_small
from traceloom.trace.notice import Notice
from traceloom.workload.simulate.machine import Algorithm, AlgorithmRule, Collective, Dimension, Machine, Topology

MOST_BYTES = 1 << 24
GIB = 2**30 / 1e9  # what its "GB/s" are, in 10^9 B/s
TOPOLOGIES: dict[str, Topology] = {"Ring": "ring", "FullyConnected": "fully-connected", "Switch": "switch"}
KINDS: dict[str, Collective] = {
    "all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}  # fmt: skip
_IMPLEMENTATION = re.compile(
    r"ring|oneRing|(?:direct|oneDirect)(?:\d{1,5})?|halvingDoubling|oneHalvingDoubling|doubleBinaryTree"
)
_IMPLEMENTATIONS = "ring, direct, halvingDoubling, doubleBinaryTree"
_ALGORITHMS: dict[str, Algorithm] = {
    "ring": "ring", "direct": "direct", "halvingDoubling": "halving-doubling", "doubleBinaryTree": "double-tree",
}  # fmt: skip
# What ASTRA-sim reads but what changes no time, and what it takes and ignores.
_WITHOUT_EFFECT = ("trace-enabled", "track-local-mem", "local-mem-trace-filename")
_IGNORED = ("boost-mode", "inter-dimension-scheduling", "intra-dimension-scheduling")
_BUS = ("L", "o", "g", "G", "model-shared-bus")


@dataclass(frozen=True)
class AstraSimNetwork:
    """A network YAML; one value per dimension, the innermost first.

    Attributes:
        topologies: Keys of `TOPOLOGIES`.
        sizes: NPUs along each dimension, at least 2.
        bandwidths: As they are written. ASTRA-sim calls them GB/s and takes them as 2^30 B/s.
        latencies: ns of one link.
        source: The file.
    """

    topologies: tuple[str, ...]
    sizes: tuple[int, ...]
    bandwidths: tuple[float, ...]
    latencies: tuple[float, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if min(self.sizes, default=0) < 2:
            raise UsageError("a dimension has at least 2 NPUs", slug="bad-astra-sim-config")

    @property
    def ranks(self) -> int:
        """NPUs in all."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class AstraSimSystem:
    """A system JSON: what ASTRA-sim reads of it and what changes times.

    Attributes:
        implementations: Kind (`all_reduce`, ...) -> the algorithm in each dimension, as it is written.
        custom: Kind -> prefix of the `.et` files of its custom algorithm.
        splits: Chunks of a collective (preferred-dataset-splits).
        active_chunks: Per dimension.
        endpoint_delay: ns.
        local_reduction_delay: ns; read and never used by ASTRA-sim.
        local_mem_bw: GB/s.
        peak_perf: TFLOPS.
        roofline: Whether GPU work takes what the roofline says.
        optimization: baseline or localBWAware.
        scheduling: LIFO, FIFO or EXPLICIT.
        replay_only: Whether everything takes its recorded duration.
        source: The file.
        notices: About keys that have no effect.
    """

    implementations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    custom: Mapping[str, str] = field(default_factory=dict)
    splits: int = 1
    active_chunks: int = 1
    endpoint_delay: int = 10
    local_reduction_delay: int = 1
    local_mem_bw: float = 0.0
    peak_perf: float = 0.0
    roofline: bool = False
    optimization: str = "baseline"
    scheduling: str = "LIFO"
    replay_only: bool = False
    source: str = ""
    notices: tuple[Notice, ...] = ()


def _refused(message: str, where: str, hint: str = "") -> InputError:
    return InputError(message, slug="bad-astra-sim-config", where=where, hint=hint)


def _content(path: str | Path) -> bytes:
    try:
        content = read_small(path, MOST_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    note_input(path)
    return content


def read_network(path: str | Path) -> AstraSimNetwork:
    """Read a network YAML of the analytical back ends.

    Raises:
        InputError: slugs `bad-astra-sim-config`, `unreadable`.
    """
    import yaml

    where = str(path)
    try:
        document = yaml.safe_load(_content(path).decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _refused(f"the network is no YAML: {reason}", where) from error
    keys = ("topology", "npus_count", "bandwidth", "latency")
    if not isinstance(document, dict):
        raise _refused(f"expected a network with {', '.join(keys)}, got {document!r:.40}", where)
    for key in document:
        if key not in keys:
            raise _refused(
                f"`{key}` is no key of a network", where, nearest(str(key), keys) + f"it has {', '.join(keys)}"
            )
    lists = {}
    for key in keys:
        if key not in document:
            raise _refused(f"there is no key `{key}`", where)
        values = document[key]
        if not isinstance(values, list) or not values:
            raise _refused(f"expected `{key}` to be a list with one value per dimension, got {values!r:.40}", where)
        if len(values) != len(document["topology"]):
            raise _refused(
                f"`{key}` has {len(values)} values for {len(document['topology'])} dimensions of `topology`", where
            )
        lists[key] = values
    for position, name in enumerate(lists["topology"]):
        if not isinstance(name, str) or name not in TOPOLOGIES:
            hint = nearest(str(name), TOPOLOGIES) + f"the analytical network has {', '.join(TOPOLOGIES)}"
            raise _refused(f"`{name}` is no topology", f"{where}, topology[{position}]", hint)
    for key, least, expected in (
        ("npus_count", 2, "a whole number of at least 2"),
        ("bandwidth", math.ulp(0.0), "a number above 0"),
        ("latency", 0, "a number of at least 0"),
    ):
        for position, value in enumerate(lists[key]):
            types = (int,) if key == "npus_count" else (int, float)
            if isinstance(value, bool) or not isinstance(value, types) or not least <= value < math.inf:
                raise _refused(f"expected {expected}, got {value!r:.40}", f"{where}, {key}[{position}]")
    return AstraSimNetwork(
        topologies=tuple(lists["topology"]),
        sizes=tuple(lists["npus_count"]),
        bandwidths=tuple(map(float, lists["bandwidth"])),
        latencies=tuple(map(float, lists["latency"])),
        source=where,
    )


def read_system(path: str | Path) -> AstraSimSystem:
    """Read a system JSON.

    Raises:
        InputError: slugs `bad-astra-sim-config`, `unreadable`.
    """
    where = str(path)
    try:
        document = msgspec.json.decode(_content(path))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"the system is no JSON: {error}", where) from error
    if not isinstance(document, dict):
        raise _refused(f"expected a JSON object, got {document!r:.40}", where)
    values: dict[str, Any] = {}
    for key, (name, fits, expected) in _KEYS.items():
        if key in document:
            if not fits(document[key]):
                raise _refused(f"expected {expected}, got {document[key]!r:.40}", f"{where}, {key}")
            values[name] = document[key]
    if "splits" not in values:
        hint = "ASTRA-sim divides by it: write for example 4"
        raise _refused("there is no key `preferred-dataset-splits`", where, hint)
    if "per-node-custom-implementation" in document:
        hint = "give one algorithm for all collectives of a kind: all-reduce-implementation-custom"
        raise _refused("algorithms of single nodes are not simulated", f"{where}, per-node-custom-implementation", hint)
    for flag in ("roofline", "replay_only"):
        values[flag] = bool(values.get(flag, False))
    implementations: dict[str, tuple[str, ...]] = {}
    custom: dict[str, str] = {}
    for name, kind in KINDS.items():
        key = f"{name}-implementation"
        if key in document:
            names = document[key]
            if not isinstance(names, list) or not names:
                message = f"expected a list with one algorithm per dimension, got {names!r:.40}"
                raise _refused(message, f"{where}, {key}")
            for each in names:
                if not isinstance(each, str) or not _IMPLEMENTATION.fullmatch(each):
                    message = f"{each!r:.40} is no algorithm of ASTRA-sim"
                    raise _refused(message, f"{where}, {key}", f"it has {_IMPLEMENTATIONS}")
            implementations[kind] = tuple(names)
        key += "-custom"
        if key in document:
            prefixes = document[key] if isinstance(document[key], list) else [document[key]]
            if len(prefixes) != 1 or not isinstance(prefixes[0], str):
                raise _refused(f"expected the prefix of `.et` files, got {document[key]!r:.40}", f"{where}, {key}")
            custom[kind] = prefixes[0]
    return AstraSimSystem(
        implementations=implementations, custom=custom, source=where, notices=_notices(document, where), **values
    )


def _number(least: float, *types: type[int | float]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool) and least <= value < 2**31


_KEYS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "preferred-dataset-splits": ("splits", _number(1, int), "a whole number of at least 1"),
    "active-chunks-per-dimension": ("active_chunks", _number(1, int), "a whole number of at least 1"),
    "endpoint-delay": ("endpoint_delay", _number(0, int), "a whole number of at least 0 (ns)"),
    "local-reduction-delay": ("local_reduction_delay", _number(0, int), "a whole number of at least 0 (ns)"),
    "local-mem-bw": ("local_mem_bw", _number(0, int, float), "a number of at least 0 (GB/s)"),
    "peak-perf": ("peak_perf", _number(0, int, float), "a number of at least 0 (TFLOPS)"),
    "roofline-enabled": ("roofline", lambda value: value in (0, 1), "0 or 1"),
    "replay-only": ("replay_only", lambda value: value in (0, 1), "0 or 1"),
    "collective-optimization": (
        "optimization", lambda value: value in ("baseline", "localBWAware"), "baseline or localBWAware",
    ),
    "scheduling-policy": ("scheduling", lambda value: value in ("LIFO", "FIFO", "EXPLICIT"), "LIFO, FIFO or EXPLICIT"),
}  # fmt: skip


def _notices(document: dict[str, Any], where: str) -> tuple[Notice, ...]:
    """What of a system has no effect."""
    read = {*_KEYS, *_WITHOUT_EFFECT, *(f"{name}-implementation{tail}" for name in KINDS for tail in ("", "-custom"))}
    ignored = [key for key in _IGNORED if document.get(key)]
    unknown = [key for key in document if key not in read and key not in (*_IGNORED, *_BUS)]
    bus = [key for key in _BUS if document.get(key)]
    notices = []
    if ignored or unknown:
        keys = ", ".join(f"`{key}`" for key in (*ignored, *unknown))
        message = f"ASTRA-sim does not read {keys}: without effect"
        notices.append(Notice("astra-sim-key-ignored", "info", message, len(ignored) + len(unknown), where=where))
    if bus:
        keys = ", ".join(f"`{key}`" for key in bus)
        message = f"the shared bus of an NPU is not simulated: {keys} without effect"
        notices.append(Notice("astra-sim-bus-ignored", "warning", message, len(bus), where=where))
    return tuple(notices)


def machine_of(network: AstraSimNetwork, system: AstraSimSystem | None = None) -> Machine:
    """The machine of a network YAML and a system JSON, for the mode `native`.

    Splits, endpoint delays and the order in which chunks are started have no counterpart there. Where dimensions use
    different algorithms, that of the first counts.
    """
    dimensions = tuple(
        Dimension(TOPOLOGIES[topology], size, bandwidth * GIB, latency)
        for topology, size, bandwidth, latency in zip(
            network.topologies, network.sizes, network.bandwidths, network.latencies, strict=True
        )
    )
    name = " x ".join(f"{topology} {size}" for topology, size in zip(network.topologies, network.sizes, strict=True))
    if system is None:
        return Machine(dimensions, name=name, source=network.source)
    rules = []
    for kind in KINDS.values():
        for implementation in system.implementations.get(kind, ())[:1]:
            plain = re.sub(r"\d+$", "", implementation).removeprefix("one")
            rules.append(AlgorithmRule(kind, _ALGORITHMS[plain[:1].lower() + plain[1:]]))
    device = None
    if system.peak_perf and system.local_mem_bw:
        flops = dict.fromkeys(("fp32", "bf16", "fp16"), system.peak_perf * 1e12)
        device = Peak("peak-perf and local-mem-bw", flops, system.local_mem_bw * 1e9)
    source = f"{network.source}, {system.source}"
    return Machine(dimensions, name=name, source=source, algorithms=tuple(rules), device=device)
