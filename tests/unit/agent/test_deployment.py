"""What lies in deploy/agent agrees with the code: names, paths, ports, keys, rights."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import traceloom
from traceloom.agent.config import AgentPaths, Config, load, resolve_paths
from traceloom.agent.daemon import notify_ready
from traceloom.cli import build_parser
from traceloom.server.settings import Tcp, host_and_port

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy" / "agent"
UNIT = DEPLOY / "traceloom-agent.service"


def unit() -> dict[str, str]:
    text = ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    text.optionxform = str  # type: ignore[assignment,method-assign]
    text.read(UNIT, encoding="utf-8")
    return dict(text["Service"])


def manifests() -> dict[str, Any]:
    return {
        document["kind"]: document
        for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }


def docker(instruction: str) -> list[str]:
    """What stands behind each such instruction."""
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{instruction} ")]


def understood(words: Sequence[str]) -> Any:
    """What our command line makes of the words after `traceloom`."""
    return build_parser(["agent"]).parse_args(list(words))


@pytest.fixture
def of_root(monkeypatch: pytest.MonkeyPatch) -> AgentPaths:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return resolve_paths(Config())


def test_the_unit_starts_the_agent_where_it_keeps_its_files(of_root: AgentPaths) -> None:
    service = unit()
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "traceloom"
    assert understood(words).action == "run"
    assert (
        Path("/run", service["RuntimeDirectory"]) == of_root.socket.parent == of_root.kineto.parent
    )
    assert Path("/var/lib", service["StateDirectory"]) == of_root.history.parent
    assert Path("/var/log", service["LogsDirectory"]) == of_root.audit.parent
    commands = (ROOT / "docs" / "how-to" / "agent.md").read_text(encoding="utf-8")
    assert (
        f"{Path(program).parent}/pip install" in commands
    )  # the page puts it where the unit looks for it


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = UNIT.read_text(encoding="utf-8").replace("/opt/traceloom/bin/traceloom", sys.executable)
    (tmp_path / UNIT.name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_hears_when_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unit()["Type"] == "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_ready()
        assert listener.recv(100) == b"READY=1"


def test_with_the_rights_of_the_unit_a_trace_is_read_as_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    rights = ",".join(
        f"+{name.removeprefix('CAP_').lower()}" for name in unit()["CapabilityBoundingSet"].split()
    )
    code = "import os, subprocess, sys; print(subprocess.run(['id', '-u'], user=65534, group=65534, extra_groups=[], capture_output=True, text=True).stdout)"
    done = subprocess.run(
        ["setpriv", "--no-new-privs", f"--bounding-set=-all,{rights}", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("65534", "")


def test_the_configuration_of_the_map_is_one(tmp_path: Path) -> None:
    text = manifests()["ConfigMap"]["data"]["agent.toml"].replace(
        "replace-with-the-sha256-of-your-token", "0" * 64
    )
    (tmp_path / "agent.toml").write_text(text, encoding="utf-8")
    config = load(tmp_path / "agent.toml")
    assert config.compat == ("dcgm",)
    assert [(token.name, token.may, len(token.sha256)) for token in config.tcp.tokens] == [
        ("prometheus", "read", 64)
    ]


def test_the_daemon_set_agrees_with_its_map_and_the_code(of_root: AgentPaths) -> None:
    documents = manifests()
    config: Tcp = load_tcp(documents["ConfigMap"]["data"]["agent.toml"])
    template = documents["DaemonSet"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    port = host_and_port(config.address)[1]
    assert container["ports"] == [{"name": "metrics", "containerPort": port, "hostPort": port}]
    notes = template["metadata"]["annotations"]
    assert (notes["prometheus.io/port"], notes["prometheus.io/scheme"]) == (str(port), "https")
    assert (
        documents["DaemonSet"]["spec"]["selector"]["matchLabels"].items()
        <= template["metadata"]["labels"].items()
    )
    assert container["image"].rpartition(":")[2] == traceloom.__version__

    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["config"]["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    args = understood(["agent", *container["args"]])
    assert (args.action, args.config) == ("run", mounts["config"])
    assert {str(Path(config.certificate).parent), str(Path(config.key).parent)} == {mounts["tls"]}
    places = {"run": of_root.socket, "state": of_root.history, "log": of_root.audit}
    for name, path in {**places, "pod-resources": Path(Config().owners.kubelet)}.items():
        assert volumes[name]["hostPath"]["path"] == mounts[name] == str(path.parent)
    probe = container["readinessProbe"]["exec"]["command"]
    assert (probe[0], understood(probe[1:]).action) == ("traceloom", "status")


def load_tcp(toml: str) -> Tcp:
    return msgspec.convert(tomllib.loads(toml), Config).tcp


def test_the_pod_has_the_rights_of_the_unit() -> None:
    (container,) = manifests()["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    rights = container["securityContext"]["capabilities"]
    assert rights["drop"] == ["ALL"]
    assert {f"CAP_{name}" for name in rights["add"]} == set(unit()["CapabilityBoundingSet"].split())


def test_the_image_has_extras_that_exist_and_starts_the_agent(of_root: AgentPaths) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"\[([a-z,]+)\]", "".join(docker("RUN")))
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    program, *words = [*json.loads(docker("ENTRYPOINT")[0]), *json.loads(docker("CMD")[0])]
    assert (program, understood(words).action) == ("traceloom", "run")
    check = json.loads(docker("HEALTHCHECK")[0].partition("CMD ")[2])
    assert understood(check[1:]).action == "status"
    places = {str(path.parent) for path in (of_root.socket, of_root.history, of_root.audit)}
    assert set(json.loads(docker("VOLUME")[0])) == places
    command = re.search(
        r"docker run .*", (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n#", "")
    )
    assert command is not None
    assert set(re.findall(r"-v (\S+):\1", command[0])) == places
