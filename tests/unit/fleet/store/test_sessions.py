"""Sessions of the portal: they end with their time, with signing out, and with their token."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind
from support.postgres import database
from traceloom.fleet.store.captures import ServiceState
from traceloom.fleet.store.database import hash_secret


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_is_that_of_its_token_until_it_ends(kind: Kind, tmp_path: Path) -> None:
    state = ServiceState(str(tmp_path / "state.db") if kind == "alone" else database())
    try:
        token = state.add_token("ana", "requester")
        secret, other = state.open_session(token, 3600), state.open_session(token, 3600)
        assert secret != other
        assert state.session(secret) == hash_secret(token)
        assert state.session(token) is None, "a token is no session"
        record = state.find_token_by_hash(hash_secret(token))
        assert record is not None
        assert (record.name, record.role) == ("ana", "requester")
        over = state.open_session(token, -1)
        assert state.session(over) is None
        state.close_session(secret)
        assert state.session(secret) is None
        assert state.session(other) is not None
        state.revoke_token("ana")
        assert state.find_token_by_hash(hash_secret(token)) is None
    finally:
        state.close()
