"""The metrics endpoint of a real run: what a scrape holds, and who may scrape."""

from __future__ import annotations

import json
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tepo_megatron.controller.step_log import KEYS, PHASES
from tepo_megatron.observability.metrics_server import step_name
from tests.e2e.conftest import Command
from tests.e2e.test_faults import SHORT
from tools.grafana import DASHBOARD, LIVE, names_in

pytestmark = [pytest.mark.server, pytest.mark.e2e]


def scrape(run: Path, key: str | None = None) -> str:
    """Return what the endpoint of a run answers, found as Prometheus finds it."""
    (target,) = json.loads((run / "metrics_targets.json").read_text())
    key = (run / "metrics.key").read_text().strip() if key is None else key
    request = urllib.request.Request(f"http://{target['targets'][0]}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.read().decode())


def names_of(text: str) -> set[str]:
    """Return the names of all samples. The parser of Prometheus' own client refuses a malformed text."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def until_steps(command: Command, run: Path, steps: int) -> None:
    def recorded() -> bool:
        path = run / "metrics.jsonl"
        return path.exists() and path.read_text().count("\n") >= steps and (run / "metrics_targets.json").exists()

    command.until(recorded, timeout=240)


def check_endpoint(run: Path) -> set[str]:
    """Check who may scrape, and return the names in a scrape, which is of a step that may be later than the first."""
    for wrong in ("", "wrong"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(run, wrong)
    assert stat.S_IMODE((run / "metrics.key").stat().st_mode) == 0o600
    names = names_of(scrape(run))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[0].keys() >= set(KEYS) | {f"seconds/{phase}" for phase in PHASES}
    measured = [{step_name(key) for key, value in one.items() if value is not None and key != "step"} for one in records]
    assert all(len(each) > 30 for each in measured) and any(each <= names for each in measured)
    return names


def test_a_run_serves_every_live_name(
    tepo: Callable[..., Command], arguments: Callable[..., list[str]], random_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "watched"
    keys = SHORT | {"training__steps": 500, "logging__metrics_port": 0, "name": "watched", "parallel__tp": 1}
    command = tepo(*arguments(random_model, **keys), engine="good")
    until_steps(command, run, 1)
    names = check_endpoint(run)
    assert {name for name in LIVE if not name.startswith(("tepo_server", "tepo_gateway"))} <= names
    command.interrupt()
    command.wait(60)
    command.assert_nothing_left()


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_servers_metrics_are_passed_through(
    tepo: Callable[..., Command], arguments: Callable[..., list[str]], random_model: Path, tmp_path: Path, engine: str
) -> None:
    counter = f"{engine}:generation_tokens_total"
    run = tmp_path / "runs" / "watched"
    keys = SHORT | {"training__steps": 500, "logging__metrics_port": 0, "name": "watched", "rollout__engine": engine}
    command = tepo(*arguments(random_model, **keys))
    until_steps(command, run, 2)
    names = check_endpoint(run)
    assert counter in names and {name for name in LIVE if not name.startswith("tepo_gateway")} <= names
    assert names_in(json.loads(DASHBOARD.read_text())) <= names | {step_name(key) for key in KEYS} | set(LIVE)
    families = list(text_string_to_metric_families(scrape(run)))
    counted = [one for family in families for one in family.samples if one.name == counter]
    assert counted and all("server" in one.labels and one.value > 0 for one in counted)
    command.interrupt()
    command.wait(60)
    command.assert_nothing_left()
