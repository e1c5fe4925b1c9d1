"""What ``deploy/`` ships, as far as it can be exercised without systemd, a container engine or a cluster."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from streamtap.cli.main import main
from streamtap.engines.demo_model import WHEEL
from streamtap.server.config import Timing
from streamtap.server.toml.config_file import read_config
from streamtap.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CONFIG, DATA, CACHE = "/etc/streamtap/streamtap.toml", "/var/lib/streamtap", "/var/cache/streamtap"
#: What an engine's keeper allows it before it is killed.
KEEPER_SECONDS = 10


def _unit() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in (DEPLOY / "streamtap.service").read_text().splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = found.setdefault(header[1], {})
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert re.fullmatch(r"[A-Z]\w+=", name + equals), line
            section.setdefault(name, []).append(value)
    return found


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """The options that the command line understands from ``arguments``; nothing is run."""
    command: click.Command = main
    context = click.Context(main)
    rest = list(arguments)
    while isinstance(command, click.Group):
        found = command.get_command(context, rest[0])
        assert found is not None, f"there is no command {rest[0]}"
        command, rest = found, rest[1:]
    return command.make_context(command.name, rest).params


def _compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def _documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in MANIFESTS:
        yield from ((file.name, document) for document in yaml.safe_load_all(file.read_text()))


def _manifest(kind: str) -> dict[str, Any]:
    (found,) = [document for _, document in _documents() if document["kind"] == kind]
    return found


def _gateway() -> dict[str, Any]:
    (container,) = _manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def _config_of(text: str, folder: Path) -> Any:
    file = folder / "streamtap.toml"
    file.write_text(text, encoding="utf-8")
    return read_config(file)


class TestExample:
    TEXT = (DEPLOY / "streamtap.example.toml").read_text()

    def test_it_serves_the_demo_model_as_it_is(self, tmp_path: Path) -> None:
        config = _config_of(self.TEXT, tmp_path)

        assert [(model.id, model.checkpoint) for model in config.models] == [("demo", "demo")]
        assert config == _config_of("", tmp_path)

    def test_every_line_of_it_is_a_setting_that_there_is(self, tmp_path: Path) -> None:
        (tmp_path / "engine.key").write_text("key")

        config = _config_of(re.sub(r"^#(?=[\[\w])", "", self.TEXT, flags=re.MULTILINE), tmp_path)

        assert [model.id for model in config.models] == ["demo", "llama-8b", "llama-405b", "elsewhere"]
        assert [model.engine for model in config.models] == ["transformers", "transformers", "vllm", "url"]
        assert config.database.startswith("postgresql+psycopg://")

    def test_the_defaults_that_it_tells_are_the_defaults(self, tmp_path: Path) -> None:
        (tmp_path / "engine.key").write_text("key")
        plain = _config_of("", tmp_path)

        told = _config_of(re.sub(r"^#(?=[\[\w])(?!database)", "", self.TEXT, flags=re.MULTILINE), tmp_path)

        assert (told.limits, told.timing) == (plain.limits, plain.timing)
        names = ("host", "port", "data_dir", "engines", "max_engines", "database")
        assert [getattr(told, name) for name in names] == [getattr(plain, name) for name in names]


class TestUnit:
    def test_it_runs_a_command_that_there_is(self) -> None:
        program, *arguments = shlex.split(_unit()["Service"]["ExecStart"][0])

        assert program == "/opt/streamtap/bin/streamtap"
        options = _parsed(arguments)
        assert options["config_file"] == Path(CONFIG)
        assert options["data_dir"] == Path(DATA)
        assert options["host"] is None

    def test_what_it_writes_to_is_made_for_it(self) -> None:
        service = _unit()["Service"]
        variables = dict(each.split("=", 1) for each in service["Environment"])

        assert service["StateDirectory"] == service["CacheDirectory"] == ["streamtap"]
        assert service["WorkingDirectory"] == [DATA]
        assert Settings.from_environment({"HOME": DATA} | variables).cache_dir == Path(CACHE)
        assert Settings.from_environment({"HOME": DATA} | variables).hub_cache_dir == Path(CACHE) / "huggingface/hub"

    def test_it_is_no_root_and_may_do_little(self) -> None:
        service = _unit()["Service"]
        shut = ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelModules", "RestrictNamespaces")

        assert service["User"] == service["Group"] == ["streamtap"]
        assert [name for name in shut if service[name] != ["yes"]] == []
        assert (service["ProtectSystem"], service["CapabilityBoundingSet"]) == (["strict"], [""])
        assert service["SystemCallFilter"] == ["@system-service"]
        assert not any("PASSWORD=" in value or "TOKEN=" in value for value in service["Environment"])

    def test_it_lets_requests_end_and_leaves_no_engine(self) -> None:
        service = _unit()["Service"]

        assert service["KillMode"] == ["mixed"]
        assert int(service["TimeoutStopSec"][0]) >= Timing().stop_seconds + KEEPER_SECONDS
        assert service["Restart"] == ["on-failure"]
        assert _unit()["Install"]["WantedBy"] == ["multi-user.target"]


class TestImage:
    TEXT = (DEPLOY / "Dockerfile").read_text()

    def _instructions(self, name: str) -> list[str]:
        lines = re.sub(r"\\\n\s*", "", self.TEXT).splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{name} ")]

    def test_it_runs_a_command_that_there_is_as_no_root(self) -> None:
        assert self._instructions("ENTRYPOINT") == ['["streamtap"]']
        arguments = yaml.safe_load(self._instructions("CMD")[-1])
        assert _parsed(arguments)["host"] == "0.0.0.0"
        assert self._instructions("USER") == ["10001:10001"]
        assert "--uid 10001" in self.TEXT

    def test_what_it_copies_is_there_and_let_through(self) -> None:
        copied = [name for line in self._instructions("COPY") if "--from" not in line for name in line.split()[:-1]]
        let_through = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()

        assert [name for name in copied if not (ROOT / name).exists()] == []
        assert {f"!{name.removeprefix('./')}" for name in copied} <= set(let_through)
        assert let_through[0] == "*"

    def test_the_extras_that_it_installs_are_there(self) -> None:
        project = (ROOT / "pyproject.toml").read_text()
        (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", self.TEXT, re.MULTILINE)

        assert [extra for extra in extras.split(",") if not re.search(rf"^{extra} = \[", project, re.MULTILINE)] == []
        assert WHEEL in (ROOT / "constraints.txt").read_text().splitlines()
        assert f"--no-deps {WHEEL.partition('==')[0]}" in self.TEXT

    def test_its_folders_are_those_of_the_manifests(self) -> None:
        variables = dict(each.split("=", 1) for each in shlex.split(" ".join(self._instructions("ENV"))))
        mounts = {mount["mountPath"] for mount in _gateway()["volumeMounts"]}

        assert Settings.from_environment({"HOME": "/x", **variables}).cache_dir == Path(CACHE)
        assert {"/etc/streamtap", DATA, CACHE, "/tmp"} == mounts


class TestCompose:
    def test_it_is_a_gateway_and_its_database(self) -> None:
        services = _compose()["services"]

        assert sorted(services) == ["db", "gateway"]
        assert services["gateway"]["depends_on"] == {"db": {"condition": "service_healthy"}}
        assert (DEPLOY / services["gateway"]["build"]["context"]).resolve() == ROOT
        assert (ROOT / services["gateway"]["build"]["dockerfile"]).is_file()
        assert all("healthcheck" in service for service in services.values())

    def test_only_this_machine_reaches_it(self) -> None:
        services = _compose()["services"]
        ports = [port for service in services.values() for port in service.get("ports", [])]

        assert ports == ["127.0.0.1:8000:8000"]

    def test_it_runs_a_command_that_there_is(self) -> None:
        options = _parsed(_compose()["services"]["gateway"]["command"])

        assert (options["config_file"], options["host"], options["port"]) == (Path(CONFIG), "0.0.0.0", 8000)

    def test_every_volume_is_declared_and_every_file_there(self) -> None:
        compose = _compose()
        mounts = [mount.split(":") for service in compose["services"].values() for mount in service["volumes"]]
        named = {mount[0] for mount in mounts if not mount[0].startswith(".")}

        assert named == set(compose["volumes"])
        assert [mount[0] for mount in mounts if mount[0].startswith(".") and not (DEPLOY / mount[0]).is_file()] == []
        assert ["./compose.toml", CONFIG, "ro"] in mounts

    def test_its_config_is_for_that_database(self) -> None:
        config = read_config(DEPLOY / "compose.toml")
        environment = _compose()["services"]["db"]["environment"]

        user, name = environment["POSTGRES_USER"], environment["POSTGRES_DB"]
        assert config.database_url == f"postgresql+psycopg://{user}@db/{name}"
        assert config.data_dir == Path(DATA)

    def test_its_password_must_be_given(self) -> None:
        services = _compose()["services"]
        given = [services["db"]["environment"]["POSTGRES_PASSWORD"], services["gateway"]["environment"]["PGPASSWORD"]]

        assert given == ["${POSTGRES_PASSWORD:?set it to a password of your own}"] * 2

    def test_it_lets_requests_end(self) -> None:
        gateway = _compose()["services"]["gateway"]

        assert int(gateway["stop_grace_period"].removesuffix("s")) >= Timing().stop_seconds + KEEPER_SECONDS
        assert gateway["init"] is True
        assert (gateway["read_only"], gateway["cap_drop"]) == (True, ["ALL"])


class TestManifests:
    @pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
    def test_they_fit_their_schemas(self, file: Path) -> None:
        documents = list(yaml.safe_load_all(file.read_text()))

        assert documents
        for document in documents:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)

    def test_a_slip_would_be_seen(self) -> None:
        slip = _manifest("Service")
        slip["spec"]["port"] = slip["spec"].pop("ports")

        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(slip, kubernetes_validate.latest_version(), strict=True)

    def test_there_is_one_of_each_that_is_needed(self) -> None:
        kinds = sorted(document["kind"] for _, document in _documents())

        assert kinds == [
            "ConfigMap",
            "Deployment",
            "PersistentVolumeClaim",
            "PersistentVolumeClaim",
            "Secret",
            "Service",
        ]

    def test_what_the_pod_names_is_there(self) -> None:
        pod = _manifest("Deployment")["spec"]["template"]
        names = {(document["kind"], document["metadata"]["name"]) for _, document in _documents()}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "emptyDir" not in volume and "configMap" not in volume
        }

        assert {mount["name"] for mount in _gateway()["volumeMounts"]} == set(volumes)
        assert {("PersistentVolumeClaim", claim) for claim in claims} <= names
        assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in names
        assert ("Secret", _gateway()["envFrom"][0]["secretRef"]["name"]) in names
        assert _manifest("Service")["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert _manifest("Deployment")["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()

    def test_the_pod_runs_a_command_that_there_is(self) -> None:
        options = _parsed(_gateway()["args"])

        assert (options["config_file"], options["host"]) == (Path(CONFIG), "0.0.0.0")
        assert [port["containerPort"] for port in _gateway()["ports"]] == [options["port"]]
        assert _manifest("Service")["spec"]["ports"][0]["targetPort"] == _gateway()["ports"][0]["name"]

    def test_its_config_is_read(self, tmp_path: Path) -> None:
        data = _manifest("ConfigMap")["data"]
        text = data["streamtap.toml"]

        assert list(data) == [Path(CONFIG).name]
        assert _config_of(text, tmp_path).data_dir == Path(DATA)
        on_postgres = _config_of(text.replace("# database", "database"), tmp_path)
        assert on_postgres.database_url == "postgresql+psycopg://streamtap@postgres/streamtap"

    def test_health_is_asked_and_requests_may_end(self) -> None:
        pod = _manifest("Deployment")["spec"]["template"]["spec"]
        probes = [_gateway()[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
        before_stop = int(_gateway()["lifecycle"]["preStop"]["exec"]["command"][-1])

        assert probes == [{"path": "/health", "port": "http"}] * 3
        assert pod["terminationGracePeriodSeconds"] >= before_stop + Timing().stop_seconds + KEEPER_SECONDS

    def test_the_pod_is_no_root_and_may_do_little(self) -> None:
        pod, own = _manifest("Deployment")["spec"]["template"]["spec"], _gateway()["securityContext"]

        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        assert pod["automountServiceAccountToken"] is False
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }

    def test_no_secret_is_shipped(self) -> None:
        assert set(_manifest("Secret")["stringData"].values()) == {""}


def test_every_command_of_its_readme_is_one_that_there_is() -> None:
    text = (DEPLOY / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    commands = re.findall(r"(?:bin/streamtap|-- streamtap|run --rm gateway) (.+)$", blocks, re.MULTILINE)

    assert len(commands) == 4
    assert [_parsed(shlex.split(command))["config"] for command in commands] == [Path(CONFIG)] * 4
    named = re.findall(r"(?<!exec )deploy/([\w./-]+)", text)
    assert [name for name in named if not (DEPLOY / name).exists()] == []
