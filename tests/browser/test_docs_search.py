"""The search of the documentation leads to the page that a person would want; needs `make docs`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

SITE = Path(__file__).resolve().parents[2] / "site"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    if (
        not (SITE / "search" / "search_index.json").exists()
        or not (SITE / "symptoms" / "nccl-slow").is_dir()
    ):
        pytest.skip("the documentation is not built: make docs")
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(SITE))
    ) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


def test_the_search_finds_the_page_and_nothing_is_fetched_from_elsewhere(
    browser: Any, site: str
) -> None:
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for words, expected in {
        "nccl slow": "/symptoms/nccl-slow/",
        "gpu idle": "/symptoms/gpu-idle/",
        "out of memory": "/symptoms/out-of-memory/",
        "rank late": "/symptoms/late-rank/",
        "slower since": "/symptoms/slower-since/",
        "tensorboard plugin": "/how-to/coming-from/",
    }.items():
        page.goto(f"{site}/reference/messages/")
        page.fill(".md-search__input", words)
        results = page.locator(".md-search-result__item a")
        for _ in range(
            120
        ):  # what is written before the page listens is looked for at the next key
            page.press(".md-search__input", "End")
            if results.count():
                break
            page.wait_for_timeout(250)
        page.wait_for_function(
            "document.querySelector('.md-search-result__meta').textContent.match(/[0-9]/)"
        )
        first = results.first.get_attribute("href")
        assert urlsplit(first).path == expected, words
    page.close()
    assert {urlsplit(url).netloc for url in requests if not url.startswith(("data:", "blob:"))} == {
        urlsplit(site).netloc
    }
