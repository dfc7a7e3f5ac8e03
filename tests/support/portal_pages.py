"""Where each page of the portal is in a store of the demo: one address for each pattern of a page."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from traceloom.cli.upload import FleetClient
from traceloom.fleet.portal.app import PAGES


def addresses(client: FleetClient) -> dict[str, str]:
    """The pattern of each page -> its address; a page whose parts nothing here names is an error."""
    change = client.get("regressions", top="1")["changes"][0]
    [capture] = [of for of in client.get("captures")["captures"] if of["state"] == "committed"][:1]
    query = {
        "/regressions/change": {
            "kernel": change["kernel"],
            "at": str(change["since_ns"]),
            **{
                name: change[name]
                for name in ("shapes", "device_model")
                if change[name] is not None
            },
        },
        "/kernels/history": {"kernel": change["kernel"]},
        "/compare": {"base": change["healthy_capture"], "new": change["capture"]},
    }
    names = {
        "/captures/{id}": {"id": capture["id"]},
        "/jobs/{job:path}": {"job": client.get("jobs")["jobs"][0]["job"]},
        "/hosts/{host}": {"host": client.get("hosts")["hosts"][0]["host"]},
        "/requests/{id}": {"id": client.get("requests")["requests"][0]["id"]},
    }
    paths = {}
    for page in PAGES:
        parts = {name: quote(value, safe="") for name, value in names.get(page.path, {}).items()}
        path = page.path.replace(":path}", "}").format(**parts)
        paths[page.path] = f"{path}?{urlencode(query[page.path])}" if page.path in query else path
    return paths
