"""What is in `deploy/` fits what is in the package, and the formats of those who read it."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from slipstream.server.ray.arguments import Arguments
from tests.invoking import ROOT, invoke

DEPLOY = ROOT / "deploy"
LINES = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def of(instruction: str) -> list[str]:
    """What follows an instruction of the Dockerfile, each time."""
    return [line.removeprefix(instruction).strip() for line in LINES if line.startswith(instruction + " ")]


def understood(command: list[str]) -> None:
    """All options are known: what is refused is a model that does not exist. Nothing listens outside this machine."""
    here = [{"0.0.0.0": "127.0.0.1", "8000": "0"}.get(part, part) for part in command]
    refused = invoke(*here, "--model", "/nowhere")
    assert refused.exit_code == 2 and "/nowhere" in refused.output


def test_the_image_is_made_of_what_there_is_and_runs_a_verb_that_there_is() -> None:
    kept = set(re.findall(r"^!(\S+)", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M))
    copied = {name for line in of("COPY") for name in line.split()[:-1]}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M)
    assert of("ARG")[0] == "EXTRA=serve" and {"serve", "ray"} <= set(extras)
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    assert json.loads(entry) == ["slipstream"] and 'slipstream = "' in project
    understood(json.loads(command))
    assert of("USER") == ["10001"], "not root"


def test_compose_starts_a_server_its_metrics_and_the_dashboard() -> None:
    found = read("compose.yaml")
    jsonschema.validate(found, get_builtin_schema("vendor.compose-spec"))
    services = found["services"]
    understood(services["slipstream"]["command"])
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith("./") else source in found["volumes"]
    (job,) = read("prometheus.yml")["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["slipstream:8000"] and job["metrics_path"] == "/metrics"
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    (provider,) = read("grafana/provisioning/dashboards/slipstream.yml")["providers"]
    mounted = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    assert any(str(Path(path).parent) == provider["options"]["path"] for path in mounted)


def test_the_manifest_names_an_application_and_arguments_that_it_takes() -> None:
    spec = read("rayservice.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    given = Arguments.read(application["args"])
    assert given.autoscaling is not None
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        given.autoscaling["min_replicas"],
        given.autoscaling["max_replicas"],
    ), "a worker for each replica"
    (container,) = workers["template"]["spec"]["containers"]
    assert given.cpus < float(container["resources"]["requests"]["cpu"])
    assert given.shutdown_timeout < workers["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.filterwarnings("ignore")  # Ray has some
def test_ray_serve_reads_the_manifest() -> None:
    ray = pytest.importorskip("ray")
    from ray.serve.schema import ServeDeploySchema

    from slipstream.server.ray import app

    spec = read("rayservice.yaml")["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    built = app(config.applications[0].args)
    assert built._bound_deployment.name == "Front"
    assert spec["rayClusterConfig"]["rayVersion"].split(".")[:2] <= ray.__version__.split(".")[:2]
