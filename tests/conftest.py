"""What all tests share: where the public traces are, and what is left to `--thorough`."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

# No test is about time, and a run of the suite says the same as the one before. To look for what nobody has found
# yet: `pytest tests/property --hypothesis-profile search`.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=5)
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("search", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also more traces, examples and crashes (make thorough)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples are tried."""
    thorough = config.getoption("--thorough")
    if not thorough:
        # Several tests run at once, and their tables are small: more threads would only wait for each other.
        for variable in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(variable, "1")
    profile = config.getoption("--hypothesis-profile", None) or (
        "thorough" if thorough else "suite"
    )
    hypothesis.settings.load_profile(profile)


# Large public traces, and those of which another is the like: of each kind of device, format and program one is left.
SELDOM = re.compile(
    r"(?<!\w)(h100_owlv2|h100_qwen_0\.5b|v100_ns_resolution|v100_test|a100_control|mi300_qwen_0\.5b"
    r"|mi300_ddp_resnet18_no_allocator|kineto2021_resnet50_workers0|rtx3060_runs_ahead_06|dlrm_rank[2-7]"
    r"|sampled_rank1_of_128|linear\.kineto|mismatched_resnet\.kineto)(?!\w)"
)
CHOSEN = 7  # a test with so few parameters is about these traces


def group_cases(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """Return the cases of each test."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests.values()


def list_left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return what `sampled(n)` leaves to `--thorough`: all but n cases of a test, taken in equal distances."""
    omitted: set[pytest.Item] = set()
    for cases in group_cases(items):
        if (marker := cases[0].get_closest_marker("sampled")) is None:
            continue
        count = min(marker.args[0], len(cases))
        kept = {number * len(cases) // count for number in range(count)}
        omitted |= {case for number, case in enumerate(cases) if number not in kept}
    return omitted


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        kept = {item for item in items if not item.get_closest_marker("thorough")}
        kept -= list_left_out(item for item in items if item in kept)
        kept -= list_seldom(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = in_turns(items, workers)


def list_seldom(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the seldom traces of tests that run with many; a test of chosen traces runs with all of them."""
    return {
        item
        for parameters in group_cases(items)
        if len(parameters) > CHOSEN
        for item in parameters
        if SELDOM.search(item.name.partition("[")[2])
    }


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going through all tests and modules again and again, a fifth of the run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


# Tests that often wait for processes, services or browsers.
WAITING = ("tests/browser/", "tests/docs/", "tests/integration/", "tests/unit/fleet/portal/")


def in_turns(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order the tests so that half of the workers begin with those that wait, and the others with those that compute.

    Each worker begins with an equal part of the list. What is left at the end is short tests that compute, which are
    shared out evenly.
    """
    waiting: dict[str, list[pytest.Item]] = {}
    computing = []
    for item in items:
        module = item.nodeid.partition("::")[0]
        if module.startswith(WAITING):
            waiting.setdefault(module, []).append(item)
        else:
            computing.append(item)
    half, size = workers // 2, len(items) // workers
    modules = list(waiting.values())
    ordered: list[pytest.Item] = []
    for number in range(half):
        first = [item for module in modules[number::half] for item in module]
        room = max(size - len(first), 0)
        ordered += first + computing[:room]
        del computing[:room]
    return ordered + computing


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether more is tried than the suite has time for."""
    return bool(pytestconfig.getoption("--thorough"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public traces beside the checkout; the test is skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the public traces (../shared/data) are not on this machine")
    return SHARED_DATA


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes never name a test: compressed ones hold the time, so two workers would collect different tests."""
    return argname if isinstance(val, bytes) and not val.isascii() else None


@pytest.fixture(autouse=True)
def keep_umask() -> Iterator[None]:
    """A service that a test runs in this process sets it for all that come after."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
