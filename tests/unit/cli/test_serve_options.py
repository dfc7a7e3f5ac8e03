"""Options of the service come from environment variables too."""

from __future__ import annotations

import argparse

import pytest

from traceloom.cli import serve


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    return parser.parse_args(words)


def test_a_variable_stands_for_an_option_and_the_option_goes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = parsed()
    for name, text in {
        "STORE": "s3://bucket/fleet",
        "WORKERS": "3",
        "LEASE": "2.5",
        "DEMO": "true",
        "QUIET": "no",
        "WEBHOOKS_TO": "10.1.0.0/16,10.2.0.0/16",
        "UNHEARD": "x",
    }.items():
        monkeypatch.setenv(f"TRACELOOM_SERVE_{name}", text)
    args = parsed("--store", "here")
    assert (args.store, args.workers, args.lease) == ("here", 3, 2.5)
    assert (args.demo, args.quiet, args.webhooks_to) == (
        True,
        False,
        ["10.1.0.0/16", "10.2.0.0/16"],
    )
    assert parsed().store == "s3://bucket/fleet"
    assert (args.address, args.proxy_role) == (plain.address, plain.proxy_role)


def test_a_variable_that_is_no_value_is_refused_as_the_option_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACELOOM_SERVE_WORKERS", "many")
    with pytest.raises(SystemExit):
        parsed()
    assert "--workers" in capsys.readouterr().err
