"""Write the Grafana dashboard and the table of names in docs/metrics.md: `python -m tools.grafana`."""

import json
import re
from pathlib import Path
from typing import Any

from tepo_megatron.monitor.metrics_server import step_name

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "launch" / "grafana.json"
PAGE = ROOT / "docs" / "metrics.md"
# name -> meaning, of what is not a value of a step's record
LIVE = {
    "tepo_run_info": "always 1; labels run, engine, platform and objective",
    "tepo_ranks": "ranks that train",
    "tepo_steps": "steps of the whole run",
    "tepo_step": "number of the last step",
    "tepo_start_time_seconds": "when the rollout service started, Unix time",
    "tepo_last_step_time_seconds": "when the last step ended, Unix time",
    "tepo_groups_done": "groups of the present batch that are complete",
    "tepo_groups_wanted": "groups that the present batch needs",
    "tepo_samples_lost_total": "samples lost since the start, by `reason`",
    "tepo_gateway_events_total": "turns, rewrites, branches, template_rewrites and drift of agents' samples, by `event`",
    "tepo_alert_active": "1 while an alert is active, by `alert` ([alerts](alerts.md))",
    "tepo_servers": "inference servers, by `state`: serving, waiting_for_weights, asleep, starting, lost",
    "tepo_requests_queued": "requests that wait for a server",
    "tepo_weights_version": "version of the weights that are to be served",
    "tepo_server_requests_in_flight": "requests in flight, by `server`",
    "tepo_server_weights_version": "version of the weights that a server has, by `server`; below 0: of no step",
    "tepo_server_restarts_total": "restarts, by `server`",
    "tepo_server_answered": "1 if the server's own metrics are in this scrape, by `server`",
}
# title, unit, expressions
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward and accuracy", "none", (step_name("reward/mean"), step_name("accuracy/mean"))),
    ("Entropy, nats", "none", (step_name("actor/entropy"),)),
    ("Alerts", "none", ("tepo_alert_active > 0",)),
    (
        "Log-prob difference, nats",
        "none",
        (step_name("rollout/logprob_diff_mean"), step_name("gate/logprob_diff_worst")),
    ),
    ("Tokens clipped", "percentunit", (step_name("loss/clip_fraction_low"), step_name("loss/clip_fraction_high"))),
    ("KL mask", "percentunit", (step_name("tepo/kl_mask_share"), step_name("tepo/mask_below_noise"))),
    ("Response length, tokens", "none", (step_name("rollout/response_tokens_mean"),)),
    ("Groups of the batch", "none", ("tepo_groups_done", "tepo_groups_wanted")),
    ("Staleness, steps", "none", (step_name("rollout/staleness"),)),
    ("Seconds of a step", "s", tuple(step_name(f"seconds/{phase}") for phase in ("wait", "grading_wait", "update", "sync"))),
    ("Throughput, tokens per second", "none", (step_name("tokens_per_second"),)),
    ("Servers by state", "none", ("tepo_servers",)),
    ("Requests", "none", ("tepo_requests_queued", "tepo_server_requests_in_flight")),
    ("Version behind, by server", "none", ("tepo_weights_version - on() group_right() tepo_server_weights_version",)),
    ("Failures", "none", ("increase(tepo_samples_lost_total[10m])", "increase(tepo_server_restarts_total[10m])")),
    ("Seconds since the last step", "s", ("time() - tepo_last_step_time_seconds",)),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = []
    for number, (title, unit, expressions) in enumerate(PANELS):
        targets = [{"refId": chr(65 + i), "expr": text, "datasource": source} for i, text in enumerate(expressions)]
        panels.append({
            "id": number + 1, "title": title, "type": "timeseries", "datasource": source, "targets": targets,
            "gridPos": {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        })  # fmt: skip
    variable = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "tepo run", "uid": "tepo-run", "schemaVersion": 39, "version": 1, "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"}, "templating": {"list": [variable]}, "panels": panels,
    }  # fmt: skip


def names_in(board: dict[str, Any]) -> set[str]:
    """Return the names of metrics in the expressions of a dashboard."""
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return {name for text in texts for name in re.findall(r"\btepo_\w+", text)}


def table() -> str:
    """Return the table of names in Markdown."""
    return "\n".join(["| name | value |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in LIVE.items())])


def page(text: str) -> str:
    """Return the page with its table written again."""
    head, _, rest = text.partition("<!-- names -->\n")
    tail = rest.partition("<!-- end of names -->")[2]
    return f"{head}<!-- names -->\n{table()}\n<!-- end of names -->{tail}"


if __name__ == "__main__":
    DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text()))
