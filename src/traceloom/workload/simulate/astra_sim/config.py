"""Reading ASTRA-sim's configuration: network.yml and system.json."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from traceloom.analyze.placed_calls import Peak
from traceloom.errors import InputError, UsageError, nearest, unreadable
from traceloom.system.files import read_small, remember_input
from traceloom.trace.notice import Notice
from traceloom.workload.simulate.machine import (
    Algorithm,
    AlgorithmRule,
    Collective,
    Dimension,
    Machine,
    Topology,
)

MAX_BYTES = 1 << 24
GIB_PER_GB = 2**30 / 1e9  # ASTRA-sim's "GB/s" in 10^9 B/s
TOPOLOGIES: dict[str, Topology] = {
    "Ring": "ring",
    "FullyConnected": "fully-connected",
    "Switch": "switch",
}
KINDS: dict[str, Collective] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}
_IMPLEMENTATION = re.compile(
    r"ring|oneRing|(?:direct|oneDirect)(?:\d{1,5})?|halvingDoubling|oneHalvingDoubling|doubleBinaryTree"
)
_IMPLEMENTATIONS = "ring, direct, halvingDoubling, doubleBinaryTree"
_ALGORITHMS: dict[str, Algorithm] = {
    "ring": "ring",
    "direct": "direct",
    "halvingDoubling": "halving-doubling",
    "doubleBinaryTree": "double-tree",
}
# Keys that ASTRA-sim reads without effect on times, and keys that it accepts and ignores.
_WITHOUT_EFFECT = ("trace-enabled", "track-local-mem", "local-mem-trace-filename")
_IGNORED = ("boost-mode", "inter-dimension-scheduling", "intra-dimension-scheduling")
_BUS = ("L", "o", "g", "G", "model-shared-bus")


@dataclass(frozen=True)
class AstraSimNetwork:
    """A network YAML; one value per dimension, the innermost first.

    Attributes:
        topologies: Keys of `TOPOLOGIES`.
        sizes: NPUs along each dimension, at least 2.
        bandwidths: As written. ASTRA-sim calls them GB/s and interprets them as 2^30 B/s.
        latencies: Of one link, ns.
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
        """The total number of NPUs."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class AstraSimSystem:
    """A system JSON, reduced to the keys that ASTRA-sim reads and that affect times.

    Attributes:
        implementations: Kind (`all_reduce`, ...) -> the algorithm in each dimension, as written.
        custom: Kind -> prefix of the `.et` files of its custom algorithm.
        splits: Chunks of a collective (preferred-dataset-splits).
        active_chunks: Max chunks in flight per dimension.
        endpoint_delay: In ns.
        local_reduction_delay: In ns; read but never used by ASTRA-sim.
        local_mem_bw: In GB/s.
        peak_perf: In TFLOPS.
        roofline: Whether the durations of GPU work follow a roofline.
        optimization: baseline or localBWAware.
        scheduling: LIFO, FIFO or EXPLICIT.
        replay_only: Whether all nodes take their recorded durations.
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


def _make_config_error(message: str, location: str, hint: str = "") -> InputError:
    return InputError(message, slug="bad-astra-sim-config", where=location, hint=hint)


def _read_content(path: str | Path) -> bytes:
    try:
        content = read_small(path, MAX_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    remember_input(path)
    return content


def read_network(path: str | Path) -> AstraSimNetwork:
    """Read a network YAML of the analytical backends.

    Raises:
        InputError: slugs `bad-astra-sim-config`, `unreadable`.
    """
    import yaml

    location = str(path)
    try:
        document = yaml.safe_load(_read_content(path).decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _make_config_error(f"the network is no YAML: {reason}", location) from error
    keys = ("topology", "npus_count", "bandwidth", "latency")
    if not isinstance(document, dict):
        raise _make_config_error(
            f"expected a network with {', '.join(keys)}, got {document!r:.40}", location
        )
    for key in document:
        if key not in keys:
            raise _make_config_error(
                f"`{key}` is no key of a network",
                location,
                nearest(str(key), keys) + f"it has {', '.join(keys)}",
            )
    lists = {}
    for key in keys:
        if key not in document:
            raise _make_config_error(f"there is no key `{key}`", location)
        values = document[key]
        if not isinstance(values, list) or not values:
            raise _make_config_error(
                f"expected `{key}` to be a list with one value per dimension, got {values!r:.40}",
                location,
            )
        if len(values) != len(document["topology"]):
            raise _make_config_error(
                f"`{key}` has {len(values)} values for {len(document['topology'])} dimensions of `topology`",
                location,
            )
        lists[key] = values
    for position, name in enumerate(lists["topology"]):
        if not isinstance(name, str) or name not in TOPOLOGIES:
            hint = (
                nearest(str(name), TOPOLOGIES)
                + f"the analytical network has {', '.join(TOPOLOGIES)}"
            )
            raise _make_config_error(
                f"`{name}` is no topology", f"{location}, topology[{position}]", hint
            )
    for key, min_value, expected in (
        ("npus_count", 2, "a whole number of at least 2"),
        ("bandwidth", math.ulp(0.0), "a number above 0"),
        ("latency", 0, "a number of at least 0"),
    ):
        for position, value in enumerate(lists[key]):
            types = (int,) if key == "npus_count" else (int, float)
            if (
                isinstance(value, bool)
                or not isinstance(value, types)
                or not min_value <= value < math.inf
            ):
                raise _make_config_error(
                    f"expected {expected}, got {value!r:.40}", f"{location}, {key}[{position}]"
                )
    return AstraSimNetwork(
        topologies=tuple(lists["topology"]),
        sizes=tuple(lists["npus_count"]),
        bandwidths=tuple(map(float, lists["bandwidth"])),
        latencies=tuple(map(float, lists["latency"])),
        source=location,
    )


def read_system(path: str | Path) -> AstraSimSystem:
    """Read a system JSON.

    Raises:
        InputError: slugs `bad-astra-sim-config`, `unreadable`.
    """
    location = str(path)
    try:
        document = msgspec.json.decode(_read_content(path))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _make_config_error(f"the system is no JSON: {error}", location) from error
    if not isinstance(document, dict):
        raise _make_config_error(f"expected a JSON object, got {document!r:.40}", location)
    values: dict[str, Any] = {}
    for key, (name, fits, expected) in _KEYS.items():
        if key in document:
            if not fits(document[key]):
                raise _make_config_error(
                    f"expected {expected}, got {document[key]!r:.40}", f"{location}, {key}"
                )
            value = document[key]
            values[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    if values.get("roofline"):
        for name, key in (("peak_perf", "peak-perf"), ("local_mem_bw", "local-mem-bw")):
            if not values.get(name):
                raise _make_config_error(
                    f"`roofline-enabled` without `{key}`: computation would take for ever", location
                )
    if "splits" not in values:
        hint = "ASTRA-sim divides by it: write for example 4"
        raise _make_config_error("there is no key `preferred-dataset-splits`", location, hint)
    if "per-node-custom-implementation" in document:
        hint = "give one algorithm for all collectives of a kind: all-reduce-implementation-custom"
        raise _make_config_error(
            "algorithms of single nodes are not simulated",
            f"{location}, per-node-custom-implementation",
            hint,
        )
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
                raise _make_config_error(message, f"{location}, {key}")
            for implementation in names:
                if not isinstance(implementation, str) or not _IMPLEMENTATION.fullmatch(
                    implementation
                ):
                    message = f"{implementation!r:.40} is no algorithm of ASTRA-sim"
                    raise _make_config_error(
                        message, f"{location}, {key}", f"it has {_IMPLEMENTATIONS}"
                    )
            implementations[kind] = tuple(names)
        key += "-custom"
        if key in document:
            prefixes = document[key] if isinstance(document[key], list) else [document[key]]
            if len(prefixes) != 1 or not isinstance(prefixes[0], str):
                raise _make_config_error(
                    f"expected the prefix of `.et` files, got {document[key]!r:.40}",
                    f"{location}, {key}",
                )
            custom[kind] = prefixes[0]
    return AstraSimSystem(
        implementations=implementations,
        custom=custom,
        source=location,
        notices=_list_notices(document, location),
        **values,
    )


def _make_number_check(min_value: float, *types: type[int | float]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and min_value <= value < 2**31
        and (float in types or value == int(value))
    )


_KEYS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "preferred-dataset-splits": (
        "splits",
        _make_number_check(1, int),
        "a whole number of at least 1",
    ),
    "active-chunks-per-dimension": (
        "active_chunks",
        _make_number_check(1, int),
        "a whole number of at least 1",
    ),
    "endpoint-delay": (
        "endpoint_delay",
        _make_number_check(0, int),
        "a whole number of at least 0 (ns)",
    ),
    "local-reduction-delay": (
        "local_reduction_delay",
        _make_number_check(0, int),
        "a whole number of at least 0 (ns)",
    ),
    "local-mem-bw": (
        "local_mem_bw",
        _make_number_check(0, int, float),
        "a number of at least 0 (GB/s)",
    ),
    "peak-perf": (
        "peak_perf",
        _make_number_check(0, int, float),
        "a number of at least 0 (TFLOPS)",
    ),
    "roofline-enabled": ("roofline", lambda value: value in (0, 1), "0 or 1"),
    "replay-only": ("replay_only", lambda value: value in (0, 1), "0 or 1"),
    "collective-optimization": (
        "optimization",
        lambda value: value in ("baseline", "localBWAware"),
        "baseline or localBWAware",
    ),
    "scheduling-policy": (
        "scheduling",
        lambda value: value in ("LIFO", "FIFO", "EXPLICIT"),
        "LIFO, FIFO or EXPLICIT",
    ),
}


def _list_notices(document: dict[str, Any], location: str) -> tuple[Notice, ...]:
    """Returns notices of the keys without effect."""
    read = {
        *_KEYS,
        *_WITHOUT_EFFECT,
        *(f"{name}-implementation{tail}" for name in KINDS for tail in ("", "-custom")),
    }
    ignored = [key for key in _IGNORED if document.get(key)]
    unknown = [key for key in document if key not in read and key not in (*_IGNORED, *_BUS)]
    bus = [key for key in _BUS if document.get(key)]
    notices = []
    if ignored or unknown:
        keys = ", ".join(f"`{key}`" for key in (*ignored, *unknown))
        message = f"ASTRA-sim does not read {keys}: without effect"
        notices.append(
            Notice(
                "astra-sim-key-ignored",
                "info",
                message,
                len(ignored) + len(unknown),
                where=location,
            )
        )
    if bus:
        keys = ", ".join(f"`{key}`" for key in bus)
        message = f"the shared bus of an NPU is not simulated: {keys} without effect"
        notices.append(
            Notice("astra-sim-bus-ignored", "warning", message, len(bus), where=location)
        )
    doubts = []
    if document.get("track-local-mem"):
        doubts.append(
            "with `track-local-mem` it stops at the first node without the attributes `inputs` and `outputs`"
        )
    dimensions = [len(names) for names in document.values() if isinstance(names, list)]
    if "collective-optimization" not in document and max(dimensions, default=0) > 1:
        doubts.append(
            "without `collective-optimization` it reads what nobody set, its ranks disagree and wait for ever; here it "
            "is `baseline`"
        )
    notices += [make_doubt(doubt, location) for doubt in doubts]
    return tuple(notices)


def make_doubt(reason: str, location: str) -> Notice:
    """Returns the notice that ASTRA-sim itself says of no rank when it ends."""
    return Notice(
        "astra-sim-no-end", "warning", f"ASTRA-sim gives no such answer: {reason}", where=location
    )


def build_machine(network: AstraSimNetwork, system: AstraSimSystem | None = None) -> Machine:
    """Returns the machine of a network YAML and a system JSON, for the mode `native`.

    Splits, endpoint delays and the order in which chunks start have no counterpart there. If
    dimensions use different algorithms, that of the first one is used.
    """
    dimensions = tuple(
        Dimension(TOPOLOGIES[topology], size, bandwidth * GIB_PER_GB, latency)
        for topology, size, bandwidth, latency in zip(
            network.topologies, network.sizes, network.bandwidths, network.latencies, strict=True
        )
    )
    name = " x ".join(
        f"{topology} {size}"
        for topology, size in zip(network.topologies, network.sizes, strict=True)
    )
    if system is None:
        return Machine(dimensions, name=name, source=network.source)
    rules = []
    for kind in KINDS.values():
        for implementation in system.implementations.get(kind, ())[:1]:
            base_name = re.sub(r"\d+$", "", implementation).removeprefix("one")
            rules.append(AlgorithmRule(kind, _ALGORITHMS[base_name[:1].lower() + base_name[1:]]))
    device = None
    if system.peak_perf and system.local_mem_bw:
        device = Peak(
            "peak-perf and local-mem-bw",
            dict.fromkeys(("fp32", "bf16", "fp16"), system.peak_perf * 1e12),
            system.local_mem_bw * 1e9,
        )
    return Machine(
        dimensions,
        name=name,
        source=f"{network.source}, {system.source}",
        algorithms=tuple(rules),
        device=device,
    )
