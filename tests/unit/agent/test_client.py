"""The agent's client: what was cut is no answer."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from traceloom.agent.client import AgentClient
from traceloom.errors import InputError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's")


@pytest.mark.parametrize("sent", [1000, 10])
def test_a_file_that_is_cut_on_its_way_is_no_file(sent: int) -> None:
    """As of an agent that is killed while it sends."""
    folder = Path(tempfile.mkdtemp(prefix="tl"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * sent)

        thread = threading.Thread(target=answer)
        thread.start()
        client = AgentClient(folder / "s", 30)
        try:
            if sent == 1000:
                client.fetch("requests/1/files/a", folder / "a")
                assert (folder / "a").stat().st_size == 1000
            else:
                with pytest.raises(InputError, match="does not answer"):
                    client.fetch("requests/1/files/a", folder / "a")
        finally:
            thread.join()
            shutil.rmtree(folder)
