"""The listeners against clients that are slow, silent, many, or speak no HTTP; and who is let in over TCP."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.agent_server import Reply, SmallAgent, ask, connect, listening
from support.waiting import until
from traceloom.agent.config import Config
from traceloom.errors import InputError, OutputError
from traceloom.server.listener import bind_unix_socket, build_tls_context
from traceloom.server.settings import Access, Tcp, Token

PATIENCE_S = 60.0  # of these tests; that of the agent is far shorter


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of an agent that gives a client half a second."""
    with listening(
        SmallAgent(Config(access=Access(seconds=0.5))), tmp_path_factory.mktemp("agent")
    ) as listeners:
        yield listeners.socket_path


def _dripped(connection: socket.socket, text: bytes) -> bytes:
    """What comes back while a byte is sent again and again, until the other side ends."""
    connection.settimeout(0.05)
    received = b""
    for _ in range(int(PATIENCE_S / 0.05)):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(text)
        with contextlib.suppress(TimeoutError):
            try:
                part = connection.recv(65_536)
            except ConnectionResetError:
                return received
            if not part:
                return received
            received += part
    raise AssertionError("the agent still waits for it")


@pytest.mark.parametrize(
    ("sent", "dripped"),
    [
        (b"GET /api/v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"a"),
        (b"POST /api/v1/steps HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n[", b" "),
        (
            b"POST /api/v1/steps HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1\r\n \r\n",
        ),
    ],
    ids=["headers", "body", "chunks"],
)
def test_a_slow_client_is_cut_off_while_others_are_answered(
    impatient: Path, sent: bytes, dripped: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """However busily it sends: it has its time for the whole of a request."""
    with connect(impatient) as connection:
        connection.sendall(sent)
        assert ask(impatient, "/api/v1/status").status == 200
        reply = Reply(_dripped(connection, dripped))
    assert reply.status in {0, 408}
    if reply.status:
        assert reply.json()["error"]["slug"] == "too-slow"
    assert ask(impatient, "/api/v1/status").status == 200
    assert not caplog.records, "nobody fills the log of the agent"


def test_a_silent_client_is_cut_off(impatient: Path) -> None:
    with connect(impatient) as connection:
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b""


def test_a_client_that_never_reads_is_cut_off(impatient: Path) -> None:
    """It asks for more than the buffers of the kernel hold; the agent does not keep the rest for it."""
    request = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(impatient) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.05)
        for _ in range(int(PATIENCE_S / 0.05)):
            assert ask(impatient, "/healthz").status == 200
            try:
                connection.send(request * 20)
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
        else:
            raise AssertionError("the agent still waits for it")


def test_a_thousand_connections(tmp_path: Path) -> None:
    """One peer has half of them; the others are refused at once, and root is answered over the unix socket."""
    config = Config(
        tcp=Tcp(address="127.0.0.1:0"), access=Access(connections=64, seconds=PATIENCE_S)
    )
    with listening(SmallAgent(config), tmp_path) as listeners, contextlib.ExitStack() as open_ones:
        assert listeners.tcp_address is not None
        refused = 0
        for _ in range(1000):
            connection = connect(listeners.tcp_address)
            connection.settimeout(PATIENCE_S)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            reply = Reply(connection.recv(65_536))
            if reply.status == 503:
                refused += 1
                connection.close()
            else:
                assert reply.status == 200
                open_ones.enter_context(connection)
        assert refused == 1000 - 32
        if os.geteuid() == 0:
            assert ask(listeners.socket_path, "/api/v1/status").status == 200
        open_ones.close()
        for _ in range(int(PATIENCE_S / 0.01)):  # the agent notices that they have gone
            if ask(listeners.tcp_address, "/healthz").status == 200:
                break
        else:
            raise AssertionError("places of connections that ended are not free again")


def test_requests_of_one_peer_are_limited_over_a_real_connection(tmp_path: Path) -> None:
    config = Config(tcp=Tcp(address="127.0.0.1:0"), access=Access(requests_per_second=0.5))
    with listening(SmallAgent(config), tmp_path) as listeners:
        assert listeners.tcp_address is not None
        replies = [ask(listeners.tcp_address, "/healthz") for _ in range(3)]
    assert replies[0].status == 200
    assert replies[-1].status == 429
    assert int(replies[-1].headers["retry-after"]) >= 1


def test_what_is_no_http(impatient: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    planted = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        b"POST /api/v1/steps HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    ]
    for number in range(300):
        text = planted[number] if number < len(planted) else rng.randbytes(rng.randrange(1, 200))
        with connect(impatient) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(text)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                reply = Reply(
                    b"".join(iter(lambda connection=connection: connection.recv(65_536), b""))
                )
                assert reply.status in {0, 400, 404, 408}, text
    assert ask(impatient, "/api/v1/status").status == 200
    assert not caplog.records


# Who is let in over TCP.

TOKEN = Token(sha256=hashlib.sha256(b"secret").hexdigest(), name="prometheus")
Certificates = Callable[[str, str], tuple[str, str]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Makes a certificate of a name, signed by the one of another name, or by itself; paths of it and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")

    def make(name: str, issuer: str) -> tuple[str, str]:
        paths = f"{directory}/{name}.pem", f"{directory}/{name}.key"
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
        ]
        command += [
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-out",
            paths[0],
            "-keyout",
            paths[1],
        ]
        if issuer != name:
            command += [
                "-CA",
                f"{directory}/{issuer}.pem",
                "-CAkey",
                f"{directory}/{issuer}.key",
                "-addext",
                "basicConstraints=critical,CA:FALSE",
            ]
        subprocess.run(command, check=True, capture_output=True)
        return paths

    return make


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_nobody_listens_without_tls(address: str) -> None:
    for tokens in ((), (TOKEN,)):
        with pytest.raises(InputError) as raised:
            build_tls_context(Tcp(address=address, tokens=tokens))
        assert raised.value.slug == "tcp-without-tls"


def test_beyond_loopback_nobody_listens_without_tokens_or_client_certificates(
    certificate: Certificates,
) -> None:
    path, key = certificate("server", "server")
    with pytest.raises(InputError) as raised:
        build_tls_context(Tcp(address="0.0.0.0:0", certificate=path, key=key))
    assert raised.value.slug == "tcp-without-tokens"
    for more in ({"tokens": (TOKEN,)}, {"client_ca": path}):
        context, loopback = build_tls_context(
            Tcp(address="0.0.0.0:0", certificate=path, key=key, **more)
        )  # type: ignore[arg-type]
        assert context is not None
        assert not loopback


def test_a_certificate_that_cannot_be_used(certificate: Certificates, tmp_path: Path) -> None:
    path, _ = certificate("first", "first")
    _, key = certificate("second", "second")
    for pair in ((path, key), (str(tmp_path / "none.pem"), key)):
        with pytest.raises(InputError) as raised:
            build_tls_context(Tcp(address="127.0.0.1:0", certificate=pair[0], key=pair[1]))
        assert raised.value.slug == "tls-unusable"


@pytest.mark.parametrize(
    "token", [Token(sha256="abc", name="a"), Token(sha256=TOKEN.sha256, name="a", may="everything")]
)
def test_tokens_that_are_none(token: Token) -> None:
    with pytest.raises(InputError, match="the token `a`"):
        build_tls_context(Tcp(address="127.0.0.1:0", tokens=(token,)))


def test_the_agent_itself_refuses_to_start(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(f'[paths]\nsocket = "{tmp_path}/a.sock"\nhistory = "{tmp_path}/agent.db"\n')
    command = [
        sys.executable,
        "-m",
        "traceloom",
        "agent",
        "run",
        "--tcp",
        "0.0.0.0:0",
        "--config",
        str(config),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "tcp-without-tls" in done.stderr
    assert not (tmp_path / "a.sock").exists()


def _ask_over_tls(
    address: tuple[str, int], trusted: str, client: tuple[str, str] | None = None, **headers: str
) -> Reply:
    context = ssl.create_default_context(cafile=trusted)
    if client is not None:
        context.load_cert_chain(*client)
    lines = {"Host": "localhost", "Connection": "close", **headers}
    with context.wrap_socket(connect(address), server_hostname="localhost") as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        connection.sendall(f"GET /api/v1/processes HTTP/1.1\r\n{head}\r\n".encode())
        return Reply(b"".join(iter(lambda: connection.recv(65_536), b"")))


def test_tls_with_tokens(certificate: Certificates, tmp_path: Path) -> None:
    path, key = certificate("agent", "agent")
    config = Config(tcp=Tcp(address="0.0.0.0:0", certificate=path, key=key, tokens=(TOKEN,)))
    with listening(SmallAgent(config), tmp_path) as listeners:
        assert listeners.tcp_address is not None
        address = "127.0.0.1", listeners.tcp_address[1]
        assert _ask_over_tls(address, path).status == 401
        assert _ask_over_tls(address, path, Authorization="Bearer guess").status == 401
        answer = _ask_over_tls(address, path, Authorization="Bearer secret").json()
        assert [row["command"] for row in answer["processes"]] == ["", ""]
        plain = b""
        with connect(address) as connection, contextlib.suppress(ConnectionResetError):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            plain = connection.recv(65_536)
        assert b"200" not in plain.split(b"\r\n")[0]
        assert b"traceloom_" not in plain


def test_tls_with_client_certificates(certificate: Certificates, tmp_path: Path) -> None:
    ca, _ = certificate("authority", "authority")
    path, key = certificate("host", "authority")
    known, stranger = certificate("prometheus", "authority"), certificate("stranger", "stranger")
    config = Config(tcp=Tcp(address="0.0.0.0:0", certificate=path, key=key, client_ca=ca))
    with listening(SmallAgent(config), tmp_path) as listeners:
        assert listeners.tcp_address is not None
        address = "127.0.0.1", listeners.tcp_address[1]
        assert len(_ask_over_tls(address, ca, known).json()["processes"]) == 2
        for client in (None, stranger):
            with contextlib.suppress(
                ssl.SSLError, ConnectionError
            ):  # or nothing comes, when the alert is late
                assert _ask_over_tls(address, ca, client).status == 0


def test_a_client_that_never_shakes_hands(certificate: Certificates, tmp_path: Path) -> None:
    path, key = certificate("quiet", "quiet")
    config = Config(
        tcp=Tcp(address="127.0.0.1:0", certificate=path, key=key, tokens=(TOKEN,)),
        access=Access(seconds=0.5),
    )
    with listening(SmallAgent(config), tmp_path) as listeners:
        assert listeners.tcp_address is not None
        with connect(listeners.tcp_address) as silent:
            silent.settimeout(PATIENCE_S)
            assert (
                _ask_over_tls(listeners.tcp_address, path, Authorization="Bearer secret").status
                == 200
            )
            assert silent.recv(1) == b""


def test_connections_are_counted_before_they_shake_hands(
    certificate: Certificates, tmp_path: Path
) -> None:
    """Each costs memory from its beginning: who sends nothing has no more of them than others."""
    path, key = certificate("many", "many")
    config = Config(
        tcp=Tcp(address="127.0.0.1:0", certificate=path, key=key, tokens=(TOKEN,)),
        access=Access(connections=16, seconds=600),
    )
    with (
        listening(SmallAgent(config), tmp_path) as listeners,
        contextlib.ExitStack() as silent,
    ):
        assert listeners.tcp_address is not None
        held = [silent.enter_context(connect(listeners.tcp_address)) for _ in range(8)]
        refused = silent.enter_context(connect(listeners.tcp_address))
        refused.settimeout(PATIENCE_S)
        assert refused.recv(1) == b""
        for connection in held:
            connection.close()

        def ask() -> int:
            with contextlib.suppress(OSError):  # until the agent has seen that they are gone
                return _ask_over_tls(
                    listeners.tcp_address, path, Authorization="Bearer secret"
                ).status
            return 0

        until(lambda: ask() == 200)


def test_a_socket_that_can_be_seen_takes_connections(tmp_path: Path) -> None:
    """Scripts wait for the file to appear; the agent answers once it is ready."""
    listener, lock = bind_unix_socket(tmp_path / "s")
    try:
        with connect(tmp_path / "s"):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o666
    finally:
        listener.close()
        os.close(lock)
    again, lock = bind_unix_socket(tmp_path / "s")  # that of an agent that has ended is replaced
    with again, connect(tmp_path / "s"):
        os.close(lock)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError) as refused:
        bind_unix_socket(tmp_path / "file")
    assert refused.value.slug == "socket-unusable"
    assert (tmp_path / "file").read_text() == "precious"
