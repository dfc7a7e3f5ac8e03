"""Inputs that lie elsewhere: a plain HTTP server, and moto's S3."""

from __future__ import annotations

import builtins
import functools
import json
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom.cli import main
from traceloom.errors import InputError, UsageError
from traceloom.system import files, remote
from traceloom.testing import TraceBuilder

UNIX_NS = 1_700_000_000 * 10**9


def trace(rank: int, kernel: str = "gemm") -> TraceBuilder:
    made = TraceBuilder(rank=rank, world_size=2, base_ns=UNIX_NS, process=10 + rank)
    for step in range(4):
        made.step(step, step * 100, 90).op("aten::mm", step * 100 + 10, 50)
        made.launch("cudaLaunchKernel", step * 100 + 20, 5, correlation=step + 1)
        made.kernel(kernel, step * 100 + 30, 40, correlation=step + 1)
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and no address of another test."""
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_addresses", {})
    return tmp_path / "cache" / "remote"


class _Handler(SimpleHTTPRequestHandler):
    """Files of a directory, and a few bad manners."""

    bodies = 0
    asked: tuple[str, str | None] = ("", None)

    def do_GET(self) -> None:
        type(self).asked = self.path, self.headers["Authorization"]
        to = {"/away.json": "http://127.0.0.2:1/x.json", "/here.json": "/rank0.json"}.get(self.path)
        if to is not None:
            self.send_response(302)
            self.send_header("Location", to)
            self.end_headers()
        elif self.path == "/cut.json":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"traceEvents": [')
        elif self.path == "/endless.json":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b" " * 100_000)
        else:
            super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        type(self).bodies += 1
        super().copyfile(source, outputfile)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # whoever reads has enough
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, type[_Handler]]]:
    """Its address, its directory, and its handler."""
    folder = tmp_path / "served"
    folder.mkdir()
    for rank in range(2):
        trace(rank).write(folder / f"rank{rank}.json")
    handler = type("Handler", (_Handler,), {})
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    ) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}", folder, handler
        http.shutdown()


def test_a_file_of_a_web_server_is_fetched_once_and_again_when_it_changes(
    server: tuple[str, Path, type[_Handler]], cache: Path
) -> None:
    address, folder, handler = server
    for _ in range(2):
        session = traceloom.load(f"{address}/rank0.json")
        assert session.name == f"{address}/rank0.json"
    assert handler.asked[0] == "/rank0.json"
    before = {path: path.stat().st_ino for path in cache.rglob("rank0.json")}
    assert len(before) == 1
    trace(0, "softmax").write(folder / "rank0.json")
    assert "softmax" in traceloom.load(f"{address}/rank0.json").traces[0].events["name"].to_list()
    assert {path: path.stat().st_ino for path in cache.rglob("rank0.json")} != before


def test_what_has_not_changed_keeps_its_copy_and_no_cache_fetches_it_again(
    server: tuple[str, Path, type[_Handler]],
) -> None:
    address, _, _ = server
    path = remote.fetch_copy(f"{address}/rank0.json")
    kept = path.stat().st_ino
    assert remote.fetch_copy(f"{address}/rank0.json") == path
    assert path.stat().st_ino == kept
    remote.fetch_copy(f"{address}/rank0.json", cache=False)
    assert path.stat().st_ino != kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "command",
    [
        ["report", "{}/rank0.json", "{}/rank1.json", "--json", "--only", "core"],
        ["report", "{}/rank0.json", "-o", "out.html"],
        ["whatif", "{}/rank0.json", "--set", "kernels * 0.5"],
        ["diff", "{}/rank0.json", "{}/rank1.json", "--json"],
        [
            "diff",
            "{}/rank0.json",
            "{}/rank1.json",
            "--new",
            "{}/rank1.json",
            "--fail-if",
            "idle > 3%",
        ],
        ["baseline", "save", "main", "{}/rank0.json", "--store", "store"],
        ["link", "{}/rank0.json", "-o", "out.graph"],
        ["memory", "{}/rank0.json"],
        ["anonymize", "{}/rank0.json", "-o", "out.json"],
        ["convert", "{}/one.graph", "out.et"],
        ["show", "{}/one.graph"],
        ["validate", "{}/one.et"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_address_may_stand_wherever_an_input_may(
    command: list[str],
    server: tuple[str, Path, type[_Handler]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, folder, _ = server
    monkeypatch.chdir(tmp_path)
    if "one." in " ".join(command):
        for name in ("one.graph", "one.et"):
            assert (
                main(
                    ["link", str(folder / "rank0.json"), "-o", str(folder / name), "-q", "--no-law"]
                )
                == 0
            )
    assert main([word.format(address) for word in command]) == 0
    said = "".join(capsys.readouterr())
    assert str(tmp_path / "cache") not in said, "the address is shown, not its copy"
    if command[-1] == "--json" or command[0] == "report":
        assert f"{address}/rank0.json" in said or (tmp_path / "out.html").exists()


def test_errors_name_the_address(
    server: tuple[str, Path, type[_Handler]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, folder, _ = server
    (folder / "empty.json").write_text("")
    secret = address.replace("http://", "http://me:hunter2@")
    assert main(["report", f"{secret}/empty.json?signature=abc"]) == 3
    said = capsys.readouterr().err
    assert f"({address}/empty.json)" in said
    assert "hunter2" not in said
    assert "abc" not in said


def test_a_user_in_an_address_is_a_header(server: tuple[str, Path, type[_Handler]]) -> None:
    address, _, handler = server
    remote.fetch_copy(address.replace("http://", "http://me:pass%20word@") + "/rank0.json")
    assert handler.asked == ("/rank0.json", "Basic bWU6cGFzcyB3b3Jk")


@pytest.mark.parametrize(
    ("name", "slug", "words"),
    [
        ("missing.json", "unreadable", "404"),
        ("", "unreadable", "do not list directories"),
        ("away.json", "redirected", "http://127.0.0.2:1"),
        ("cut.json", "cut-download", "17 of 1,000 bytes"),
        ("endless.json", "too-large", "no more is fetched"),
    ],
)
def test_what_a_server_may_not_do_ends_with_a_sentence(
    name: str,
    slug: str,
    words: str,
    server: tuple[str, Path, type[_Handler]],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "MAX_BYTES", 3_000_000)
    with pytest.raises(InputError, match=words) as error:
        remote.fetch_copy(f"{server[0]}/{name}")
    assert error.value.slug == slug
    assert [path for path in cache.rglob("*") if path.is_file()] == [], "nothing half fetched stays"


def test_a_redirect_within_the_host_is_followed(server: tuple[str, Path, type[_Handler]]) -> None:
    address, folder, _ = server
    assert (
        remote.fetch_copy(f"{address}/here.json").read_bytes()
        == (folder / "rank0.json").read_bytes()
    )


def test_a_server_that_is_not_there_and_an_address_of_another_kind_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match="refused") as error:
        traceloom.load("http://127.0.0.1:1/trace.json")
    assert error.value.slug == "unreadable"
    (tmp_path / "trace.json").write_text("{}")
    for address in (
        f"file://{tmp_path}/trace.json",
        "simplecache::s3://bucket/x",
        "ftp://host/x.json",
    ):
        with pytest.raises((UsageError, InputError)) as refused:
            traceloom.load(address)
        assert refused.value.slug in {"unknown-address", "unreadable"}


def test_progress_is_said_in_bytes(server: tuple[str, Path, type[_Handler]]) -> None:
    address, folder, _ = server
    said: list[tuple[int, int | None]] = []
    remote.fetch_copy(
        f"{address}/rank0.json", report_progress=lambda done, total: said.append((done, total))
    )
    size = (folder / "rank0.json").stat().st_size
    assert said[-1] == (size, size)


def test_what_was_unused_for_longest_goes_first(
    server: tuple[str, Path, type[_Handler]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder, _ = server
    monkeypatch.setattr(
        remote, "MAX_CACHE_BYTES", int(1.5 * (folder / "rank0.json").stat().st_size)
    )
    for rank in range(2):
        remote.fetch_copy(f"{address}/rank{rank}.json")
    assert [path.name for path in cache.rglob("rank*.json")] == ["rank1.json"]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_without_the_extra_the_error_names_it(
    scheme: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".", maxsplit=1)[0] in {"fsspec", "s3fs", "gcsfs"}:
            raise ImportError(f"no module {name}")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] in {"fsspec", "s3fs", "gcsfs"}]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["report", f"{scheme}://bucket/run"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'traceloom[remote]'" in said
    assert "see traceloom explain no-fsspec" in said


class _Store:
    """A store of fsspec's in memory under the name of Google's, which no test can reach."""

    def __init__(self, content: dict[str, bytes]) -> None:
        import fsspec

        self.files = fsspec.filesystem("memory")
        self.files.store.clear()
        for name, data in content.items():
            self.files.pipe_file(name, data)

    def opened(self, url: str) -> tuple[Any, str]:
        return self.files, url.removeprefix("gs:/")


def test_all_files_below_a_prefix_of_a_store_are_one_input(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {f"/bucket/run/rank{rank}.json": _json(rank) for rank in range(2)}
    store = _Store(
        {**made, "/bucket/run/a/b/c/d/e/f/deep.json": b"{}", "/bucket/other.json": b"{}"}
    )
    monkeypatch.setattr(remote, "open_file_system", store.opened)
    session = traceloom.load("gs://bucket/run/")
    assert session.ranks == (0, 1)
    assert session.name == "gs://bucket/run"
    assert {path.name for path in cache.rglob("*.json")} == {
        "rank0.json",
        "rank1.json",
        "versions.json",
    }
    store.files.rm_file("/bucket/run/rank1.json")
    assert traceloom.load("gs://bucket/run/").ranks == (0,), "what is gone there is gone here"
    with pytest.raises(InputError, match="no such file"):
        traceloom.load("gs://bucket/nothing")
    monkeypatch.setattr(remote, "MAX_FILES", 1)
    store.files.pipe_file("/bucket/run/rank1.json", _json(1))
    with pytest.raises(InputError, match="more than 1 files") as error:
        traceloom.load("gs://bucket/run")
    assert error.value.slug == "too-large"


def _json(rank: int, kernel: str = "gemm") -> bytes:
    return trace(rank, kernel).text().encode()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket `runs` of moto's server, as a client of boto3 sees it."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed").ThreadedMotoServer(
        port=0
    )
    import boto3

    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="runs")
    yield client
    client.close()
    server.stop()


def test_a_run_in_s3_is_read_and_only_what_changed_is_fetched_again(
    bucket: Any, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        bucket.put_object(Bucket="runs", Key=f"gpt/rank{rank}.json", Body=_json(rank))
    assert main(["report", "s3://runs/gpt", "--only", "core", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in document["inputs"]] == [
        "s3://runs/gpt/rank0.json",
        "s3://runs/gpt/rank1.json",
    ]
    before = {path.name: path.stat().st_ino for path in cache.rglob("rank*.json")}
    bucket.put_object(Bucket="runs", Key="gpt/rank1.json", Body=_json(1, "softmax"))
    assert "softmax" in traceloom.load("s3://runs/gpt").traces[1].events["name"].to_list()
    after = {path.name: path.stat().st_ino for path in cache.rglob("rank*.json")}
    assert before["rank0.json"] == after["rank0.json"]
    assert before["rank1.json"] != after["rank1.json"]
    assert traceloom.load("s3://runs/gpt/rank0.json").ranks == (0,)
    assert main(["report", "s3://runs/nothing"]) == 3
    assert "(s3://runs/nothing)" in capsys.readouterr().err
