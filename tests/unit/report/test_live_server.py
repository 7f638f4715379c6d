"""The live page's server: who may ask what, samples and tokens as text, and `tepo audit` of one token."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.losses import OBJECTIVES
from tepo_megatron.report.audit.comparison import audit_step
from tepo_megatron.report.audit.reading import read_batch
from tepo_megatron.report.audit.tables import print_audit
from tepo_megatron.report.live import watch
from tepo_megatron.report.live.run import KEEP_SAMPLES, KEEP_TOKENS
from tepo_megatron.report.live.server import LivePage
from tests.audit_runs import FOLDER, write_audit
from tests.objective_cases import draw
from tests.report_runs import measured, record_step, rollout, write_run
from tests.unit.report.test_report_page import HOSTILE, SPECIAL, tokenizer_of_characters


def write_hostile_run(folder: Path, characters: int = 100_000) -> Path:
    """Write a run of hostile tokens with an audited and recorded step, and a later one that is only recorded.

    Args:
        characters: Length of the line that is the later step's response and gold answer.
    """
    ids, run = tokenizer_of_characters(folder / "model"), folder / "run"
    run.mkdir()
    write_run(run, measured(4), model={"path": str(folder / "model")})
    write_audit(run, OBJECTIVES["tepo"], draw(3, (5, 17, 0, 3, 1030, 2)), ids)
    batch = read_batch(run / FOLDER)
    rollouts = []
    for sequence in reversed(range(len(batch))):  # another order than that of the audit
        here = batch.sequence_L == sequence
        made = rollout(int(batch.prompt_ids_B[sequence]), batch.token_ids_L[here].tolist(), [], 1.0, answer=HOSTILE)
        mask_L = torch.from_numpy(batch.response_mask_L[here])
        rollouts.append(dataclasses.replace(made, response_mask_L=mask_L, reward=float(sequence)))
    record_step(run, 1, rollouts)
    long = ids[-1:] + ids[:40] * (characters // 40)
    record_step(run, 3, [rollout(0, ids, long, 0.0, answer="A" * characters)])
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hostile_run(tmp_path_factory.mktemp("live"))


def get(url: str, path: str = "", method: str = "GET", **headers: str) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = HTTPConnection("127.0.0.1", parts.port, timeout=60)
    try:
        connection.request(method, f"{parts.path}{path}", headers=headers)
        answer = connection.getresponse()
        assert "default-src 'none'" in str(answer.headers["Content-Security-Policy"])
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def serving(folders: list[Path], act: Callable[[Callable[..., Awaitable[Any]], str], Awaitable[None]]) -> None:
    """Serve the page of some runs while `act` runs, with a function that gets an answer and the page's URL."""

    async def main() -> None:
        async with LivePage(folders).served() as url:

            async def ask(path: str = "", **how: str) -> tuple[int, str]:
                return await asyncio.to_thread(get, url, path, **how)

            await act(ask, url)

    asyncio.run(main())


def test_only_who_knows_the_secret_may_ask_and_only_for_this_run(run: Path) -> None:
    async def act(ask: Callable[..., Awaitable[Any]], url: str) -> None:
        port, secret = urlsplit(url).port, urlsplit(url).path.strip("/")
        assert urlsplit(url).hostname == "127.0.0.1" and len(secret) >= 32
        files = {"": "<!doctype html>", "style.css": ":root", "plots.js": "followPointer", "watch.js": "EventListener"}
        for name, kind in files.items():
            status, text = await ask(name)
            assert status == 200 and kind in text
        assert (await ask("runs", Host=f"localhost:{port}"))[0] == 200
        hosts = ("evil.example", f"evil.example:{port}", "127.0.0.1", "")
        assert {(await ask("runs", Host=host))[0] for host in hosts} == {403}
        assert {(await ask("runs", method=m))[0] for m in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD")} == {405}
        wrong = ("", "x/", f"{secret[:-1]}/runs", f"{secret}x/runs", "%2e%2e/runs")
        assert {(await asyncio.to_thread(get, f"http://127.0.0.1:{port}/{path}"))[0] for path in wrong} == {403}
        outside = ("../../etc/passwd", "..%2f..%2fetc/passwd", "config.yaml", "watch.css", "runs/0/%2e%2e/samples", "runs/0")
        for path in (*outside, "runs/1/samples", "runs/-1/samples", "runs/0/../../x/samples"):
            status, text = await ask(path)
            assert status in (403, 404) and "root:" not in text, path
        for path in ("samples?step=-1", "samples?step=1e9", "tokens?step=1&place=x", "samples?page=9999999999999999"):
            assert (await ask(f"runs/0/{path}"))[0] == 400, path
        for token in ("", "1", "1:2:3", "--help", "1:2;id", "9" * 50):
            status, text = await ask(f"runs/0/audit?step=1&token={token}")
            assert status == 200 and "SEQUENCE:POSITION" in json.loads(text)["error"], token

    serving([run], act)


@pytest.mark.slow
def test_samples_and_tokens_are_text_one_page_at_a_time(run: Path) -> None:
    async def act(ask: Callable[..., Awaitable[Any]], url: str) -> None:
        async def found(path: str) -> Any:
            status, text = await ask(f"runs/0/{path}")
            assert status == 200, text
            return json.loads(text)

        last = await found("samples")
        assert (last["step"], last["steps"], last["before"], last["after"], last["pages"]) == (3, 2, 1, None, 1)
        (sample,) = last["samples"]
        text = "".join(words for _, words in sample["response"])
        assert len(text) < 13_000 and "characters left out" in text and sum(len(w) for _, w in sample["answer"]) < 13_000
        assert [SPECIAL in words for kind, words in sample["response"] if kind == "special"] == [True]
        best, others = [await found(f"samples?step=2&order=best&page={page}") for page in (0, 1)]
        assert (best["step"], best["pages"], others["page"]) == (1, 2, 1)
        assert [s["facts"][0] for s in best["samples"]] == [f"reward {reward}" for reward in (5, 4, 3, 2)]
        assert "".join(w for _, w in best["samples"][0]["answer"]) == HOSTILE
        assert sorted(s["place"] for page in (best, others) for s in page["samples"]) == list(range(6))
        assert (await found("samples?step=1&page=99"))["page"] == 1
        bare = await found("tokens?step=3&place=0&first=5")
        assert bare["sequence"] is None and bare["note"] == KEEP_TOKENS and list(bare["numbers"]) == ["log-prob of the engine"]
        assert len(bare["tokens"]) == 1000 and bare["count"] == 100_001
        audited = audit_step(run, 1).updates[0]
        for place, sequence in enumerate(reversed(range(6))):
            tokens = await found(f"tokens?step=1&place={place}")
            if sequence == 2:
                assert tokens["tokens"] == []  # it has no response token
                continue
            assert tokens["sequence"] == sequence and tokens["note"] == ""
            here = audited.record.sequence_N == sequence
            for name, term in (("advantage", "advantage"), ("ratio", "ratio"), ("entropy change", "entropy_change")):
                assert tokens["numbers"][name] == pytest.approx(audited.record.used[term][here][:1000], rel=1e-3), name
            mismatch = audited.record.inputs["old_logprob"] - audited.record.inputs["rollout_logprob"]
            assert tokens["numbers"]["mismatch"] == pytest.approx(mismatch[here][:1000], rel=1e-3, abs=1e-9)
        rest = await found("tokens?step=1&place=1&first=1000")
        assert len(rest["tokens"]) == 30 and len(rest["numbers"]["ratio"]) == 30
        assert "error" in await found("tokens?step=1&place=77") and "error" in await found("tokens?step=99&place=0")

    serving([run], act)


@pytest.mark.slow
def test_a_token_is_audited_by_tepo_audit_and_a_run_without_records_says_the_key(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    write_run(bare, measured(2))

    async def act(ask: Callable[..., Awaitable[Any]], url: str) -> None:
        said = json.loads((await ask("runs/0/audit?step=1&token=1:3"))[1])
        assert said["agrees"] and print_audit(run, 1, "1:3") == 0
        assert said["text"] + "\n" == capsys.readouterr().out
        assert "and not 99" in json.loads((await ask("runs/0/audit?step=1&token=1:99"))[1])["error"]
        status, text = await ask("runs/1/samples")
        assert status == 200 and json.loads(text)["notes"] == [KEEP_SAMPLES]
        changes = json.loads((await ask("runs"))[1])
        assert changes["versions"] == [1, 1] and len(changes["comparison"]["charts"]) > 5 and changes["wait"] >= 2
        assert json.loads((await ask("runs?seen=1,1"))[1])["runs"] == {}

    serving([run, bare], act)


def test_what_cannot_be_watched_is_refused(run: Path, tmp_path: Path) -> None:
    for folders, message in (([tmp_path / "none"], "no such folder"), ([run, run / ".." / "run"], "named twice")):
        with pytest.raises(ConfigError, match=message):
            watch(folders, 0, print)

    async def act(ask: Callable[..., Awaitable[Any]], url: str) -> None:
        with pytest.raises(ConfigError, match="--port"):
            async with LivePage([run], int(urlsplit(url).port or 0)).served():
                pass

    serving([run], act)
