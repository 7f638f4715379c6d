"""The metrics endpoint over real HTTP, the text of servers that are not to be trusted, and the documented names."""

import json
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.engines.engine import EngineReport, ServerReport
from tepo_megatron.monitor.alerts import RULES
from tepo_megatron.monitor.metrics_server import (
    KEY_FILE,
    TARGETS_FILE,
    as_text,
    merged,
    parsed,
    serve_metrics,
    step_name,
)  # fmt: skip
from tepo_megatron.rollout.collector import Progress
from tepo_megatron.service.opening import LiveMetrics
from tepo_megatron.trainer.driver import KEYS, PHASES
from tools import grafana

VLLM = """# HELP vllm:tokens Number of tokens.
# TYPE vllm:tokens counter
vllm:tokens_total{engine="0",model_name="a\\"b,c}"} 7.0
# HELP vllm:wait Seconds.
# TYPE vllm:wait histogram
vllm:wait_bucket{le="+Inf",server="me"} 3.0
vllm:wait_sum 1.5
vllm:wait_count 3.0
"""
HOSTILE = """tepo_step 99
vllm:tokens_total{engine="1"} 1.0
# TYPE tepo histogram
tepo_sum 3
"""
BROKEN = ("oops{ 1", 'evil{a="b"} 1\\n tepo_step 99', 'a{b="c', "a one", "# TYPE a zebra")


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what Prometheus' own client reads: value by name and sorted labels."""
    families = list(text_string_to_metric_families(text))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def live(report: EngineReport) -> LiveMetrics:
    return LiveMetrics(
        "watched", "vllm", "cpu", "tepo", 2, 40, Progress(3, 8), lambda seconds: report, lambda: {"turns": 5, "drift": 0}
    )


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_only_the_key_reads_the_metrics(tmp_path: Path) -> None:
    with serve_metrics(tmp_path, "127.0.0.1", 0, lambda: "tepo_step 1.0\n") as url:
        key = (tmp_path / KEY_FILE).read_text().strip()
        ((target,),) = [one["targets"] for one in json.loads((tmp_path / TARGETS_FILE).read_text())]
        assert url == f"http://{target}/metrics" and stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
        assert get(url, Authorization=f"Bearer {key}") == (200, "tepo_step 1.0\n")
        assert [get(url)[0], get(url, Authorization="Bearer x")[0], get(url, Authorization=key)[0]] == [401] * 3
        assert get(url.replace("/metrics", "/other"), Authorization=f"Bearer {key}")[0] == 404
        port = int(target.rpartition(":")[2])
        with (
            pytest.raises(ConfigError, match=r"logging.metrics_port=.*set it to 0"),
            serve_metrics(tmp_path, "127.0.0.1", port, str),
        ):
            pass
    with serve_metrics(tmp_path, "127.0.0.1", 0, str):
        assert (tmp_path / KEY_FILE).read_text().strip() == key, "a resumed run keeps its key"
    (tmp_path / KEY_FILE).chmod(0o644)
    with serve_metrics(tmp_path, "127.0.0.1", 0, str):
        assert (tmp_path / KEY_FILE).read_text().strip() != key, "others could read it"
    assert not (tmp_path / TARGETS_FILE).exists()


def test_the_metrics_of_servers_become_one_text() -> None:
    text = as_text(merged({'vLLM "a"': parsed(VLLM), "b": parsed(VLLM), "c": parsed(HOSTILE)}))
    found = samples(text)
    assert found["vllm:tokens_total", (("engine", "0"), ("model_name", 'a"b,c}'), ("server", 'vLLM "a"'))] == 7.0
    assert found["vllm:wait_bucket", (("exported_server", "me"), ("le", "+Inf"), ("server", "b"))] == 3.0
    assert found["vllm:tokens_total", (("engine", "1"), ("server", "c"))] == 1.0
    assert text.count("# TYPE vllm:wait ") == 1 and "tepo_" not in text


@pytest.mark.parametrize("line", BROKEN)
def test_a_server_whose_metrics_cannot_be_read_has_none(line: str) -> None:
    assert parsed(VLLM) and parsed(f"{VLLM}{line}\n{VLLM}") == []


def test_a_scrape_holds_every_documented_name() -> None:
    servers = [ServerReport("one", "serving", 3, 2, 0), ServerReport("two", "lost", -1, 0, 4)]
    metrics = live(EngineReport(servers, 6, 3, {"one": VLLM}))
    keys = [*KEYS, *(f"seconds/{phase}" for phase in PHASES), "seconds/total", "tokens_per_second"]
    assert len({step_name(key) for key in keys}) == len(keys)
    record: dict[str, float | None] = dict.fromkeys(keys, 0.5) | {"rollout/samples_raised": 2.0, "alert/clip_high": 1.0}
    metrics.record(1, record)
    metrics.record(2, record)
    metrics.record(2, {"evaluation/amc/accuracy": 0.25, "evaluation/amc/standard_error": None})
    found = samples(metrics.text())
    assert found.pop(("tepo_step_evaluation_amc_accuracy", ())) == 0.25
    assert {name for name, _ in found if name.startswith("tepo_")} == {*grafana.LIVE, *map(step_name, keys)}
    assert found["tepo_step", ()] == 2 and found["tepo_samples_lost_total", (("reason", "raised"),)] == 4
    assert found["tepo_alert_active", (("alert", "clip_high"),)] == 1
    assert sum(value for (name, _), value in found.items() if name == "tepo_alert_active") == 1
    assert sum(name == "tepo_alert_active" for name, _ in found) == len(RULES)
    assert found["tepo_groups_done", ()] == 3 and found["tepo_gateway_events_total", (("event", "turns"),)] == 5
    assert found["tepo_servers", (("state", "lost"),)] == 1 and found["tepo_server_weights_version", (("server", "one"),)] == 3
    assert found["tepo_server_answered", (("server", "two"),)] == 0 and ("vllm:wait_sum", (("server", "one"),)) in found
    board = grafana.names_in(grafana.dashboard())
    assert len(board) > 25 and board <= {name for name, _ in found}
    assert json.loads(grafana.DASHBOARD.read_text()) == grafana.dashboard(), "run `python -m tools.grafana`"
    assert grafana.PAGE.read_text() == grafana.page(grafana.PAGE.read_text()), "run `python -m tools.grafana`"
