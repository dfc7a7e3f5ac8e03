"""`traceloom serve`: runs the service of the fleet."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from traceloom.cli import options as types
from traceloom.errors import UsageError

if TYPE_CHECKING:
    from traceloom.fleet.portal.app import ProxyUsers

DESCRIPTION = (
    "Run the fleet's service until Ctrl-C: it takes captures of whole jobs, analyses them by itself, and keeps their "
    "files, reports and numbers. On a laptop it needs nothing else; state and files may lie in PostgreSQL and an "
    "object store, and several services may share them."
)
EXAMPLES = """\
examples:
  traceloom serve                        all of it in ~/.local/share/traceloom
  traceloom serve --demo                 a made fleet to look at, in a store that goes with Ctrl-C
  traceloom serve --store /data/fleet --workers 8
  traceloom serve --store s3://bucket/fleet --state postgresql://fleet@db/fleet \\
                  --address 0.0.0.0:9466 --certificate fleet.pem --key fleet.key
  traceloom serve --engine dask://scheduler:8786 --engine-ca ca.pem --engine-certificate fleet.pem \\
                  --engine-key fleet.key
then: traceloom upload run
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        metavar="URL",
        default="",
        help="where files and tables lie: a directory, s3://bucket/prefix, gs://..., az://... (default: this user's "
        "data directory)",
    )
    parser.add_argument(
        "--state",
        metavar="URL",
        default="",
        help="the database: a file of SQLite, or postgresql://USER@HOST/NAME (default: state.db in the store's "
        "directory)",
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="serve ten days of a made fleet, in a temporary store; with --store in a directory that is empty or such "
        "a demo's",
    )
    parser.add_argument(
        "--engine",
        metavar="ENGINE",
        default="processes",
        help="what analyses: processes of this host, or a Dask cluster, dask://HOST:PORT; beyond this host only with "
        "TLS (default: processes)",
    )
    parser.add_argument(
        "--engine-ca",
        metavar="FILE",
        default="",
        help="PEM file of the authority that cluster trusts",
    )
    parser.add_argument(
        "--engine-certificate", metavar="FILE", default="", help="PEM file of a certificate for it"
    )
    parser.add_argument(
        "--engine-key", metavar="FILE", default="", help="PEM file of the key of that certificate"
    )
    parser.add_argument(
        "--workers",
        type=types.parse_count,
        metavar="N",
        help="so many captures at once (default: cores but one; 16 with a cluster)",
    )
    parser.add_argument(
        "--lease",
        type=types.parse_positive,
        metavar="SECONDS",
        help="after so long without a word from a service others of the same state take over its work (default: 30)",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        default="127.0.0.1:9466",
        help="where it answers; beyond this host only with TLS (default: 127.0.0.1:9466)",
    )
    parser.add_argument(
        "--advertise",
        metavar="URL",
        default="",
        help="where other services of the same state reach it (default: its address)",
    )
    parser.add_argument(
        "--certificate", metavar="FILE", default="", help="PEM file of its TLS certificate"
    )
    parser.add_argument(
        "--key", metavar="FILE", default="", help="PEM file of its key, where that is another file"
    )
    parser.add_argument(
        "--webhooks-to",
        metavar="NETWORK",
        action="append",
        default=[],
        help="webhooks may lead into this network, as 10.1.0.0/16 or 127.0.0.1; several times (default: only to public "
        "addresses)",
    )
    parser.add_argument(
        "--proxy-user-header",
        metavar="NAME",
        default="",
        help="of the pages: a proxy has checked who asks, and names the user in this header",
    )
    parser.add_argument(
        "--proxy-from",
        metavar="ADDRESS",
        default="",
        help="the proxy's address or network, which alone is believed",
    )
    parser.add_argument(
        "--proxy-role",
        choices=("viewer", "requester", "operator", "admin"),
        default="requester",
        help="what users whom the proxy names may do, where no token of that name says it (default: requester)",
    )
    types.add_verbosity_options(parser, "no line when it is ready")
    types.take_environment(parser, "TRACELOOM_SERVE")


def run(args: argparse.Namespace) -> int:
    """Runs the service; returns the exit code."""
    import asyncio
    import contextlib
    import importlib.util
    import logging
    import resource

    needed = (
        "htpy",
        "sqlalchemy",
        "obstore",
        "deltalake",
        "starlette",
        "uvicorn",
        "prometheus_client",
    )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the service needs {', '.join(missing)}",
            slug="missing-packages",
            hint="pip install 'traceloom[fleet]'",
        )
    from platformdirs import user_data_path

    from traceloom.cli.upload import get_token_path
    from traceloom.fleet.portal.app import build_portal
    from traceloom.fleet.service.committer import WriterProcess
    from traceloom.fleet.service.executors import EngineTls, create_engine
    from traceloom.fleet.service.pipeline import COMMIT_INTERVAL_S, LEASE_S
    from traceloom.fleet.service.service import FleetService, ensure_local_token, serve
    from traceloom.fleet.service.webhooks import WebhookAddressPolicy
    from traceloom.fleet.store.captures import ServiceState
    from traceloom.fleet.store.database import is_news
    from traceloom.fleet.store.objects import ObjectStore
    from traceloom.fleet.store.tables import Tables
    from traceloom.server.settings import Tcp
    from traceloom.system.service_address import ServiceAddress

    os.umask(0o077)  # what hosts and people send is for nobody else on this host
    proxy = _read_proxy_users(args)
    if args.advertise:
        ServiceAddress.of(args.advertise)  # other services send tokens there
    files = (args.engine_ca, args.engine_certificate, args.engine_key)
    tls = EngineTls(*files) if any(files) else None
    targets = WebhookAddressPolicy(args.webhooks_to)
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # each connection needs one
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(is_news)

    def write_line(text: str) -> None:
        if not args.quiet:
            print(f"{text} ...", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        demo = None
        if args.demo:
            from traceloom.fleet.demo import DemoFleet

            demo = stack.enter_context(DemoFleet.open_store(args.store, args.state))
        store = args.store if demo is None else str(demo.directory.path)
        objects = ObjectStore(store or str(user_data_path("traceloom") / "fleet"))
        if not args.state and objects.directory is None:
            raise UsageError(
                "files in an object store need a state beside them",
                slug="wrong-usage",
                hint="--state postgresql://USER@HOST/NAME, or a file of SQLite where one service runs",
            )
        state_at = args.state or str(Path(objects.directory or ".") / "state.db")
        state = ServiceState(state_at)
        stack.callback(state.close)
        store_at = objects.url if objects.directory is None else str(objects.directory)
        tables = Tables(store_at)
        writer = WriterProcess(state_at, store_at)
        stack.callback(writer.close)
        writer.create()
        if demo is not None:
            demo.fill(state, objects, tables, write_line)
        engine = create_engine(args.engine, args.workers, tls)
        stack.callback(engine.close)

        def ready(url: str) -> None:
            if demo is None:
                ensure_local_token(state, get_token_path(url))
            if demo is not None or not args.quiet:
                print(
                    _format_welcome(url, objects.url, "" if demo is None else demo.token),
                    flush=True,
                )

        async def live() -> None:
            service = FleetService(
                state,
                objects,
                tables,
                engine,
                lease_s=args.lease or LEASE_S,
                commit_s=COMMIT_INTERVAL_S,
                incoming_directory=(objects.directory or user_data_path("traceloom") / "fleet")
                / "from-hosts",
                webhook_policy=targets,
                writer=writer,
            )
            tcp = Tcp(address=args.address, certificate=args.certificate, key=args.key)
            async with contextlib.AsyncExitStack() as exit_stack:
                if demo is not None:
                    await exit_stack.enter_async_context(demo.hosts(service))
                await serve(service, tcp, ready, build_portal(service, proxy), url=args.advertise)

        asyncio.run(live())
    return 0


def _read_proxy_users(args: argparse.Namespace) -> ProxyUsers | None:
    """Returns the proxy that authenticates users and its header for the name; None without one."""
    from traceloom.fleet.portal.app import ProxyUsers

    if bool(args.proxy_user_header) != bool(args.proxy_from):
        raise UsageError("--proxy-user-header and --proxy-from go together", slug="wrong-usage")
    if not args.proxy_from:
        return None
    try:
        return ProxyUsers(
            header=args.proxy_user_header, source=args.proxy_from, role=args.proxy_role
        )
    except ValueError as error:
        raise UsageError(f"no such proxy: {error}", slug="wrong-usage") from error


def _format_welcome(url: str, store: str, demo_token: str) -> str:
    """Returns the text that is printed once the service responds at its URL."""
    from traceloom.cli.upload import DEFAULT_SERVER, get_token_path

    if demo_token:  # it is printed nowhere else
        return (
            f"A made fleet is served at {url}/\n"
            f"Its token, for the browser and for commands: {demo_token}\n"
            f"Try: TRACELOOM_SERVER={url} TRACELOOM_TOKEN={demo_token} traceloom fleet captures"
        )
    server = "" if url == DEFAULT_SERVER else f" --server {url}"
    return (
        f"The fleet's service answers at {url}, and keeps its files in {store}.\n"
        f"Its pages are there too; sign in with the token in {get_token_path(url)}.\n"
        f"Try: traceloom upload CAPTURE{server}; traceloom fleet check{server}"
    )
