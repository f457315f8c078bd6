"""Files that other programs read: compose, Prometheus, Grafana, README."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics import Metrics
from service.settings import variable_names

ROOT = Path(__file__).resolve().parents[3]


def _yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_compose_binds_to_loopback_only_and_knows_every_setting() -> None:
    compose = _yaml("compose.yaml")
    assert set(compose["services"]) == {"kafka", "redis", "service", "prometheus", "grafana"}
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert ("image" in service) != ("build" in service)
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in compose["volumes"]
    assert set(compose["services"]["service"]["environment"]) <= set(variable_names())
    assert (ROOT / compose["services"]["service"]["build"]["dockerfile"]).is_file()


def _metric_names() -> set[str]:
    names = {"up", "process_resident_memory_bytes"}
    for family in Metrics(process=False).registry.collect():
        names |= {family.name, *(family.name + suffix for suffix in ("_total", "_bucket", "_sum", "_count"))}
    return names


def _used(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:tailrace|process)_[a-z0-9_]+|\bup\b", expression))


def test_alerts_and_dashboard_use_metrics_that_exist() -> None:
    alerts = [rule["expr"] for group in _yaml("ops/alerts.yml")["groups"] for rule in group["rules"]]
    dashboard = json.loads((ROOT / "ops/grafana/tailrace.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in alerts + panels:
        assert _used(expression)
        assert _used(expression) <= _metric_names(), expression


@pytest.mark.process
def test_readme_lists_the_settings_of_the_code() -> None:
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['table'](), end='')"
    made = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "ops/settings-table")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout in (ROOT / "README.md").read_text(), "run ops/settings-table"


@pytest.mark.process
def test_settings_table_takes_no_arguments() -> None:
    before = (ROOT / "README.md").stat().st_mtime_ns
    ended = subprocess.run(
        [sys.executable, str(ROOT / "ops/settings-table"), "--check"], capture_output=True, check=False
    )
    assert ended.returncode == 2
    assert (ROOT / "README.md").stat().st_mtime_ns == before


def test_virtual_environment_is_ignored_as_folder_and_as_link() -> None:
    assert ".venv" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.process
@pytest.mark.parametrize("name", ["ops/setup", "ops/demo", "ops/test", ".ci/run"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    assert (ROOT / name).stat().st_mode & 0o111 == 0o111
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def test_locks_pin_every_dependency() -> None:
    for name in ("ops/requirements.lock", "ops/requirements-dev.lock"):
        lines = (ROOT / name).read_text().splitlines()[1:]
        assert all(re.fullmatch(r"[a-z0-9-]+==[^ ;]+(; .*)?", line) for line in lines)
    assert "torch==2.13.0" in (ROOT / "ops/requirements.lock").read_text().splitlines()


def test_samples_are_varied_documents() -> None:
    lengths = [len(path.read_text().split()) for path in sorted((ROOT / "ops/samples").iterdir())]
    assert len(lengths) >= 5
    assert min(lengths) >= 300
    assert max(lengths) <= 3_000
