"""Rewards from a server elsewhere: one HTTP request for each batch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence

import httpx

from tepo_megatron.errors import ConfigError, RewardError
from tepo_megatron.rewards.terms import Response, Verdict

CONNECT_SECONDS = 10.0
_PASSING = frozenset({408, 425, 429})  # errors of the request that are not the request's fault


class HttpTerm:
    """Posts {"samples": [{"prompt", "response", "answer"}, ...]}, expects {"rewards": [number, ...]}, one for each, in order.

    timeout_seconds: for one answer; attempts: to get one, `backoff_seconds` and then twice as long apart; key_variable: the
    environment variable with the key that goes along as a bearer token. Status: graded. Redirects are not followed.

    Whatever is no such answer is a failure, and the last one a RewardError: a sample is never graded 0 because a server was
    away. Errors of the request (4xx but for 408, 425, 429) are not tried again.
    """

    def __init__(
        self, url: str, *, timeout_seconds: float, attempts: int, backoff_seconds: float, key_variable: str | None
    ) -> None:
        self._url, self._timeout_seconds, self._attempts, self._backoff = url, timeout_seconds, attempts, backoff_seconds
        key = key_from(key_variable)
        self._http = httpx.Client(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds)),
            # servers close connections that were idle, and a request that meets a closed one fails
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,  # no proxy stands between us and the server
            verify=url.startswith("https"),  # loading certificates takes a while
        )

    def grade(self, responses: Sequence[Response]) -> list[Verdict]:
        """See `Term.grade`."""
        if not responses:
            return []
        body = {"samples": [{"prompt": r.prompt, "response": r.text, "answer": r.answer} for r in responses]}
        payload = json.dumps(body).encode()
        for attempt in range(1, self._attempts + 1):
            try:
                return [Verdict(value, "graded") for value in self._ask(payload, len(responses))]
            except _Failure as e:
                if e.final or attempt == self._attempts:
                    raise RewardError(
                        f"the reward server {self._url} {e} (attempt {attempt} of {self._attempts}); mend the server, or raise "
                        "attempts, backoff_seconds or timeout_seconds of its entry in reward.terms"
                    ) from None
            time.sleep(self._backoff * 2 ** (attempt - 1))
        raise AssertionError("attempts is at least 1")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, payload: bytes, samples: int) -> list[float]:
        """One request. Raises _Failure."""
        try:
            response = self._http.post(self._url, content=payload, headers={"Content-Type": "application/json"})
        except httpx.TimeoutException:
            raise _Failure(f"did not answer within {self._timeout_seconds:g} s") from None
        except httpx.HTTPError as e:
            raise _Failure(f"broke off ({str(e) or type(e).__name__})") from None
        if not response.is_success:
            told = " ".join(response.text.split())[:200]
            final = response.is_client_error and response.status_code not in _PASSING
            raise _Failure(f"answered with {response.status_code}: {told}", final=final)
        return _rewards(response, samples)


class _Failure(Exception):
    """What the server did instead of answering, to be put after its name; final: asking again is in vain."""

    def __init__(self, what: str, *, final: bool = False) -> None:
        super().__init__(what)
        self.final = final


def key_from(variable: str | None) -> str | None:
    """The key in that environment variable; None where none is named. Raises ConfigError where it is not set."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"reward.terms: key_variable={variable}: this environment variable is not set; export the key in it")
    return key


def _rewards(response: httpx.Response, samples: int) -> list[float]:
    """Raises _Failure unless the answer is one finite number for each sample."""
    try:
        found = response.json()["rewards"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _Failure('answered with something other than {"rewards": [...]}') from None
    if not isinstance(found, list) or len(found) != samples:
        count = len(found) if isinstance(found, list) else "no list of"
        raise _Failure(f"answered with {count} rewards for {samples} samples")
    for place, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Failure(f"answered with {str(value)[:40]!r} as the reward of sample {place}, which is no finite number")
    return [float(value) for value in found]
