"""Rewards by HTTP, from a real server that fails on request."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from tepo_megatron.base.errors import ConfigError, RewardError
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import RewardConfig
from tepo_megatron.config.io import validate_as
from tepo_megatron.rewards import remote
from tepo_megatron.rewards.build import build_reward, check_reward
from tests.graded import decode, rollout


class Handler(BaseHTTPRequestHandler):
    """A reward server with a script.

    Attributes:
        script: Behaviour of each of the next requests. None: answer; a status; bytes as the body; or seconds to sleep.
    """

    script: ClassVar[list[Any]] = []
    seen: ClassVar[list[tuple[str | None, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.headers.get("Authorization"), body))
        what = self.script.pop(0) if self.script else None
        if what == "hang up":
            self.connection.close()
            return
        if isinstance(what, float):
            time.sleep(what)
        answer = json.dumps({"rewards": [len(s["response"]) for s in body["samples"]]}).encode()
        self.send_response(what if isinstance(what, int) else 200)
        self.end_headers()
        self.wfile.write(what if isinstance(what, bytes) else answer)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Handler.script, Handler.seen = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    server.server_close()
    thread.join()


def score(url: str, rollouts: list[Rollout], attempts: int = 3, **settings: Any) -> list[Rollout]:
    cfg = validate_as(RewardConfig, {"terms": [{"type": "http", "url": url, "timeout_seconds": 20.0, **settings}]}, "config")
    check_reward(cfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "ATTEMPTS", attempts)
        patch.setattr(remote, "BACKOFF_SECONDS", 0.05)
        with build_reward(cfg, decode) as reward:
            return reward.score(rollouts)


ROLLOUTS = [rollout("aaa", "7", prompt="why"), rollout("b", "8"), rollout("\ud800é\0", "9")]


def test_one_request_for_a_batch_in_order(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    graded = score(url, ROLLOUTS, key_variable="MY_KEY")
    assert [(r.reward, r.score, r.status) for r in graded] == [(3, 3, "graded"), (1, 1, "graded"), (3, 3, "graded")]
    ((key, body),) = Handler.seen
    assert key == "Bearer secret"
    assert [list(sample.values()) for sample in body["samples"]] == [
        ["why", "aaa", "7"],
        ["?", "b", "8"],
        ["?", "\ud800é\0", "9"],
    ]


FAILURES = [
    (500, "answered with 500"),
    (503, "answered with 503"),
    (429, "answered with 429"),
    ("hang up", "broke off"),
    (3.0, r"did not answer within 1 s"),
    (b"not JSON", r'something other than \{"rewards": \[\.\.\.\]\}'),
    (b"[1, 2, 3]", "something other than"),
    (b'{"rewards": 3}', "answered with no list of rewards for 3 samples"),
    (b'{"rewards": [1, 2]}', "answered with 2 rewards for 3 samples"),
    (b'{"rewards": [1, null, 2]}', "answered with 'None' as the reward of sample 1, which is no finite number"),
    (b'{"rewards": [1, NaN, 2]}', "NaN is no number of JSON"),
    (b'{"rewards": [1, 1' + b"0" * 400 + b", 2]}", r"1000000\S* is beyond all floating-point numbers"),
    (b'{"rewards": [1, true, 2]}', "'True' as the reward"),
    (b'{"rewards": ["1", 1, 2]}', "'1' as the reward of sample 0"),
    (302, "answered with 302"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "message"), FAILURES, ids=[str(f)[:40] for f, _ in FAILURES])
def test_a_failure_is_tried_again_and_at_last_an_error(url: str, failure: Any, message: str) -> None:
    limit = {"timeout_seconds": 1.0} if isinstance(failure, float) else {}
    Handler.script = [failure, failure]
    assert [r.reward for r in score(url, ROLLOUTS, **limit)] == [3, 1, 3] and len(Handler.seen) == 3
    Handler.script = [failure] * 2
    with pytest.raises(RewardError, match=rf"the reward server {url} .*{message}.*\(attempt 2 of 2\); fix the server"):
        score(url, ROLLOUTS, attempts=2, **limit)


def test_a_server_behind_a_proxy_is_told_from_one_that_is_down(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    far = "http://reward.invalid/"
    with pytest.raises(RewardError, match=r"broke off \([^;]*\) \(attempt 1 of 1\)"):
        score(far, ROLLOUTS, attempts=1)
    monkeypatch.setenv("http_proxy", "http://me:password@127.0.0.1:9")
    with pytest.raises(RewardError, match=r"broke off \(.*; the proxy in http_proxy is not used: this machine must reach") as e:
        score(far, ROLLOUTS, attempts=1)
    assert "password" not in str(e.value)
    assert [r.reward for r in score(url, ROLLOUTS)] == [3, 1, 3]
    monkeypatch.setenv("no_proxy", ".invalid")
    with pytest.raises(RewardError, match=r"broke off \([^;]*\) \(attempt 1 of 1\)"):
        score(far, ROLLOUTS, attempts=1)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_wrong_request_is_not_repeated(url: str, status: int) -> None:
    Handler.script = [status]
    with pytest.raises(RewardError, match=rf"answered with {status}.*attempt 1 of 3"):
        score(url, ROLLOUTS)
    assert len(Handler.seen) == 1


def test_the_key_is_required_before_the_run_and_never_printed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="key_variable=MY_KEY: this environment variable is not set; export the key in it"):
        score(url, ROLLOUTS, key_variable="MY_KEY")
    monkeypatch.setenv("MY_KEY", "secret")
    Handler.script = [401]
    with pytest.raises(RewardError) as error:
        score(url, ROLLOUTS, key_variable="MY_KEY")
    assert "secret" not in str(error.value)
