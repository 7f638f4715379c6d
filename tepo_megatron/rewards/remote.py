"""Rewards from a server elsewhere: one HTTP request for each batch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence

from tepo_megatron.errors import ConfigError, RewardError
from tepo_megatron.escaping import excerpt
from tepo_megatron.exchange import Answer, BadAnswer, BlockingHttp, ExchangeFailed, TimedOut
from tepo_megatron.rewards.terms import Response, Verdict

ANSWER_BYTES, SAMPLE_BYTES = 2**20, 4096  # the largest answer: the first, and the second for each sample
_PASSING = frozenset({408, 425, 429})  # errors of the request that are not the request's fault


class HttpTerm:
    """Posts {"samples": [{"prompt", "response", "answer"}, ...]}, expects {"rewards": [number, ...]}, one for each, in order.

    timeout_seconds: for one whole exchange, from the look-up of the name to the last byte of the answer; attempts: to get one,
    `backoff_seconds` and then twice as long apart; key_variable: the environment variable with the key that goes along as a
    bearer token. Status: graded. Redirects are not followed.

    Whatever is no such answer is a failure, and the last one a RewardError: a sample is never graded 0 because a server was
    away. Compressed answers, and those above ANSWER_BYTES + SAMPLE_BYTES for each sample, are none. Errors of the request (4xx
    but for 408, 425, 429) are not tried again.
    """

    def __init__(
        self, url: str, *, timeout_seconds: float, attempts: int, backoff_seconds: float, key_variable: str | None
    ) -> None:
        self._url, self._timeout_seconds, self._attempts, self._backoff = url, timeout_seconds, attempts, backoff_seconds
        self._http = BlockingHttp(url, key_from(key_variable))

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
        most = ANSWER_BYTES + SAMPLE_BYTES * samples
        try:
            answer = self._http.exchange("POST", self._url, seconds=self._timeout_seconds, most_bytes=most, body=payload)
            if answer.ok:
                return _rewards(answer, samples)
        except TimedOut:
            raise _Failure(f"did not answer within {self._timeout_seconds:g} s") from None
        except BadAnswer as e:
            raise _Failure(f"answered with {e}") from None
        except ExchangeFailed as e:
            raise _Failure(f"broke off ({e})") from None
        final = 400 <= answer.status < 500 and answer.status not in _PASSING
        moved = " (redirects are not followed)" if 300 <= answer.status < 400 else ""
        raise _Failure(f"answered with {answer.status}{moved}: {excerpt(answer.text)}", final=final)


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


def _rewards(answer: Answer, samples: int) -> list[float]:
    """Raises _Failure unless the answer is one finite number for each sample, BadAnswer."""
    try:
        found = answer.json()["rewards"]
    except BadAnswer as e:
        raise _Failure(f'answered with something other than {{"rewards": [...]}}: {e}') from None
    except (KeyError, TypeError, IndexError):
        raise _Failure('answered with something other than {"rewards": [...]}') from None
    if not isinstance(found, list) or len(found) != samples:
        count = len(found) if isinstance(found, list) else "no list of"
        raise _Failure(f"answered with {count} rewards for {samples} samples")
    for place, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Failure(
                f"answered with {excerpt(str(value), 40)!r} as the reward of sample {place}, which is no finite number"
            )
    return [float(value) for value in found]
