"""What all tests share: where the public traces are."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

# No test is about time, and a run of the suite says the same as the one before. To look for what nobody has found
# yet: `pytest tests/property --hypothesis-profile search`.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=10)
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("search", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also more traces, examples and crashes (make thorough)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples are tried; tests that say how many themselves keep to that."""
    thorough = config.getoption("--thorough")
    profile = config.getoption("--hypothesis-profile", None) or (
        "thorough" if thorough else "suite"
    )
    hypothesis.settings.load_profile(profile)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = in_turns(items, workers)


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
def shared_data() -> Path:
    """The folder of public traces beside the checkout; the test is skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the public traces (../shared/data) are not on this machine")
    return SHARED_DATA


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes never name a test: compressed ones hold the time, so two workers would collect different tests."""
    return argname if isinstance(val, bytes) and not val.isascii() else None
