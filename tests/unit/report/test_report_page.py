"""`report.html` is self-contained, shows what was recorded, and no text of a run becomes markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.command import parsers
from tepo_megatron.report import panels
from tepo_megatron.report.comparison import compare, names, overlays
from tepo_megatron.report.evaluations import read_held_out
from tepo_megatron.report.live.run import LiveRun, compared
from tepo_megatron.report.run import read_run
from tepo_megatron.report.write import write_comparison, write_page, write_report
from tests.report_runs import SUMMARY, measured, record_step, rollout, write_run

HOSTILE = """</pre></script><script>document.title='owned'</script><img src=x onerror="document.title='owned'">{{7*7}}&lt;'\\"""
ROWS = [row | {"actor/entropy": None} if row["step"] == 3 else row for row in measured(5)]
SPECIAL = "<|end|><svg onload=document.title='owned'>"


class Page(HTMLParser):
    """A page as a browser parses it: its elements and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.said = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            (self.scripts if self._inside == "script" else self.styles)[-1] += data
        else:
            self.said += data

    def charts(self) -> list[dict[str, Any]]:
        """The axes of all charts."""
        return [axis for script in self.scripts[:-1] for axis in json.loads(script).get("axes", ())]

    def series(self, label: str) -> list[list[float]]:
        (found,) = [s for axis in self.charts() for s in axis["series"] if s["label"] == label]
        return found["y"]


def tokenizer_of_characters(folder: Path) -> list[int]:
    """Save one that knows every character of HOSTILE; returns HOSTILE as ids, and then that of a hostile special token."""
    known = sorted(set(HOSTILE))
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<unk>", *known])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=SPECIAL)
    fast.save_pretrained(folder)
    return [*(1 + known.index(c) for c in HOSTILE), len(known) + 1]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str]:
    """The page of a run all of whose texts are hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "run").mkdir()
    ids = tokenizer_of_characters(folder / "model")
    lines = [{"prompt": f"{HOSTILE} \ud800", "answer": HOSTILE}, {"prompt": "2", "answer": "3"}]
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"train": HOSTILE, "eval": str(folder / "eval.jsonl")}
    write_run(folder / "run", ROWS, model={"path": str(folder / "model")}, data=data)
    (folder / "run" / "summary.json").write_text(json.dumps(SUMMARY))
    scores = [{"problem": 0, "before": 0.0, "after": 1.0}, {"problem": 1, "before": 1.0, "after": 1.0}]
    (folder / "run" / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    record_step(folder / "run", 1, [rollout(0, ids, ids, 0.0, answer=HOSTILE, status=HOSTILE), rollout(0, ids, ids, 1.0)])
    text = write_report(folder / "run").read_text()
    return Page(text), text


def test_no_text_of_a_run_becomes_markup(hostile: tuple[Page, str]) -> None:
    page, _ = hostile
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "title", "style", "body", "nav", "strong", "a", "main", "article", "header", "section",
        "footer", "h1", "h2", "h3", "p", "b", "small", "mark", "noscript", "script",
        "code", "pre", "span", "details", "summary", "figure", "div", "table", "thead", "tbody", "tr", "th", "td",
    }  # fmt: skip
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.said.count(HOSTILE) >= 5, "the samples, their answer and status, the problem and its answer, as they are"
    assert SPECIAL in page.said and "U+D800" in page.said


def test_one_script_may_run_and_it_is_the_pages_own(hostile: tuple[Page, str]) -> None:
    page, _ = hostile
    kinds = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    assert kinds[:-1] == ["application/json"] * (len(kinds) - 1) and kinds[-1] is None
    (policy,) = [str(a["content"]) for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


def test_the_page_is_self_contained(hostile: tuple[Page, str]) -> None:
    page, text = hostile
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert "src" not in attributes and tag != "link"
        assert attributes.get("href") is None or str(attributes["href"])[1:] in ids, attributes
    assert not re.search(r"url\((?!#)|@import", text)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_seconds_of_a_step_add_up(tmp_path: Path, ahead: bool) -> None:
    """Rollouts that are sampled concurrently with training take none of its time."""
    phases = {
        "wait": 0.2 if ahead else 3.5,
        "rollout": 3.0,
        "grading_wait": 0.5,
        "old_stats": 0.15,
        "reference": 0.1,
        "update": 1.0,
        "sync": 0.125,
    }
    total = 1.75 if ahead else 5.0
    row = {f"seconds/{name}": value for name, value in phases.items()} | {"seconds/total": total}
    rows = [{"step": step, **row} for step in (1, 2, 5)]
    write_run(tmp_path, rows, rollout={"max_staleness": 1} if ahead else {})
    (axis,) = panels.seconds(read_run(tmp_path)).axes
    stacked = {s.label: s.rows[1] - s.rows[0] for s in axis.series if s.kind == "bar"}
    assert sum(stacked.values()) == pytest.approx([total] * 3)
    assert ("rollout" in stacked, "wait" in stacked) == (not ahead, ahead)
    shares = panels.time_shares(read_run(tmp_path))
    assert all(share in shares for share in (("wait 11%", "reference 6%") if ahead else ("rollout 60%", "reference 2%")))
    assert [(s.label, list(s.rows[0])) for s in axis.series if s.kind == "line"] == [("rollout", [3.0] * 3)][:ahead]
    assert stacked["other"][0] == pytest.approx(0.175 if ahead else 0.125)


def two_runs(folder: Path) -> list[Path]:
    runs = [folder / "a", folder / "b"]
    for run, shift in zip(runs, (0.0, 0.25), strict=True):
        run.mkdir()
        rows = [row | {"accuracy/mean": row["accuracy/mean"] + shift} for row in measured(6)]
        write_run(run, rows, optimizer={"lr": 1e-6 + shift * 4e-6})
        scores = [{"problem": p, "before": 0.0, "after": float(p < 2 or (shift > 0 and p < 6))} for p in range(8)]
        (run / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
        (run / "summary.json").write_text(json.dumps(SUMMARY))
    return runs


@pytest.mark.full
def test_several_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = two_runs(tmp_path)
    assert parsers.main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    assert not (runs[0] / "report.html").exists()
    page, records = Page((tmp_path / "comparison.html").read_text()), [read_run(run) for run in runs]
    shown = compare(dict(zip("ab", records, strict=True)), [read_held_out(run) for run in records])
    assert shown["headings"] == ["", "a", "b"] and ("accuracy of rollouts", "24.0%", "49.0% (+25.0 points)") in shown["rows"]
    assert ("optimizer.lr", "1e-06", "2e-06") in shown["settings"] and "name" not in dict(row[:2] for row in shown["settings"])
    # four of eight problems better: 50 points, and 1.96 * 53.45 / sqrt(8) = 37.0 to each side
    said = "paired by problem: +50.0 points [+5.3, +94.7] (95 %), beyond the noise of these problems; 4 problems better"
    assert said in shown["differences"][0][1] and said in page.said and "49.0% (+25.0 points)" in page.said
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    curves = [(series["label"], series["color"]) for series in page.charts()[0]["series"] if series["label"]]
    assert curves == [("a", "var(--blue)"), ("b", "var(--orange)")]


def test_evaluations_of_several_runs_share_axes(tmp_path: Path) -> None:
    folders = two_runs(tmp_path)
    with (folders[1] / "metrics.jsonl").open("a") as file:
        for step in (0, 6):
            keys = {"held_out/accuracy": 0.1 * step, "held_out/standard_error": 0.1, "aime24/accuracy": 0.2}
            file.write(json.dumps({"step": step} | {f"evaluation/{key}": value for key, value in keys.items()}) + "\n")
    live = [LiveRun(folder, place) for place, folder in enumerate(folders)]
    for run in live:
        run.refresh()
    for runs in ([read_run(folder) for folder in folders], [run.thinned for run in live]):
        held_out, aime, *_ = overlays(runs)
        of_first, of_second = held_out.axes[0].series[1::2]
        assert [(s.label, s.x.tolist(), s.rows[0].tolist()) for s in (of_first, of_second)] == [
            ("a", [0, 4], [0.19, 0.81]),  # of summary.json, where an earlier version recorded no steps
            ("b", [0, 6], [0, pytest.approx(0.6)]),
        ]
        assert held_out.axes[0].series[2].rows[1].tolist() == [pytest.approx(-0.1), pytest.approx(0.5)]
        assert [(s.label, s.color) for s in aime.axes[0].series] == [("", "orange"), ("b", "orange")]
    shown = compared(live)["charts"]
    assert [chart["title"] for chart in shown[:2]] == [held_out.title, aime.title]


def test_runs_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "x" / "a", tmp_path / "y" / "a"]
    for folder in folders:
        folder.mkdir(parents=True)
        write_run(folder, measured(1))
    runs = [read_run(folder) for folder in folders]
    assert names(runs) == [str(folder) for folder in folders] and names(runs[:1]) == ["a"]


def test_a_comparison_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is named twice; a run is compared with others"):
        write_comparison([tmp_path, tmp_path / "x" / ".."], tmp_path / "c.html")
    with pytest.raises(ConfigError, match=r"no/c\.html: the page cannot be written \(No such file or directory\)"):
        write_page(tmp_path / "no" / "c.html", "text")


def test_no_record_at_all_is_an_error_and_the_older_page_stays(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    (tmp_path / "report.html").write_text("older")
    with pytest.raises(DataError, match=r"metrics\.jsonl: no step has been recorded"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "older"


def test_the_page_of_one_run_lies_in_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsers.main(["report", "runs/a", "--out", "x.html"]) == 1
    assert "--out x.html: the page of one run is written into its folder" in capsys.readouterr().err
