"""The pages agree with the repository: links, anchors, commands, keys, quoted errors, examples, generated pages."""

import ast
import dataclasses
import functools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.layout import lay_out
from launch.profile import load_cluster
from tepo_megatron.actor.layout import check_layout
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config, RewardConfig
from tepo_megatron.config.io import load_config, validate_as
from tepo_megatron.config.objective import ObjectiveParts
from tepo_megatron.engines.engine_api import EngineApi
from tests.lint.docs.pages import PAGES, anchors, commands, fences, inline_code, links
from tools import config_reference, objective_parts
from tools.nested_keys import nested_keys

ELSEWHERE = ("http://", "https://", "mailto:")
COMMANDS = re.findall(r'add_parser\(\s*"(\w+)"', Path("tepo_megatron/command/parsers.py").read_text())
# placeholders for a file of the reader's own
STAND_IN = "examples/template.yaml"


def broken_links(page: Path) -> Iterator[str]:
    """Yield the targets that are no file or no anchor of it."""
    for target in links(page):
        if target.startswith(ELSEWHERE):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            yield target


def test_links_lead_somewhere() -> None:
    assert [(str(page), target) for page in PAGES for target in broken_links(page)] == []


def test_every_page_is_in_the_contents() -> None:
    contents = [page for page in PAGES if fences(page, "{toctree}")]
    listed = {(page.parent / target).resolve() for page in contents for target in links(page)}
    decisions = {path.resolve() for path in Path("docs/decisions").glob("0*.md")}
    results = {path.resolve() for path in Path("benchmarks/results").glob("*.md")}
    assert results <= listed
    assert {page.resolve() for page in PAGES} - listed - decisions == {Path("docs/index.md").resolve()}


@functools.cache
def makefile_targets() -> set[str]:
    return set(" ".join(re.findall(r"^([a-z][\w -]*):", Path("Makefile").read_text(), re.MULTILINE)).split())


def unknown_commands(text: str) -> Iterator[str]:
    """Yield what a text starts that does not exist: `make TARGET`, `tepo COMMAND`, `python -m MODULE` and `python FILE`."""
    yield from (t for t in re.findall(r"(?:^|&& )make ([a-z][\w-]*)", text) if t not in makefile_targets())
    yield from (name for name in re.findall(r"(?:^|bin/)tepo ([a-z]+)", text) if name not in COMMANDS)
    for module in re.findall(r"python -m ((?:tepo_megatron|examples|benchmarks|launch|tools|tests)[\w.]*)", text):
        path = Path(*module.split("."))
        if not path.with_suffix(".py").exists() and not path.is_dir():
            yield module
    yield from (f for f in re.findall(r"python ((?:tools|benchmarks|examples)/\S+\.py)", text) if not Path(f).exists())


def test_commands_exist() -> None:
    texts = [(page, text) for page in PAGES for text in [*inline_code(page), *(" ".join(words) for words in commands(page))]]
    assert [(str(page), text, name) for page, text in texts for name in unknown_commands(text)] == []


def unknown_keys(text: str, known: set[str]) -> Iterator[str]:
    """Yield the `section.key` and `--section.key VALUE` in a text that are no keys of the config."""
    sections = {key.partition(".")[0] for key in known if "." in key}
    for key in re.findall(r"(?:^|[\s\[`(])(?:--)?((?:[a-z_]+\.)+[a-z_]+)(?=[=:]? |[=:]?$|: )", text):
        file_like = re.search(r"\.(py|md|yaml|jsonl?|txt|html|log|csv|png|in|parquet)$", key)
        if key.partition(".")[0] in sections and not file_like and not key.endswith("_") and key not in known:
            yield key


def test_keys_exist() -> None:
    known = {key.replace("[]", "") for key in (*config_reference.all_keys(), *nested_keys())}
    pages = [page for page in PAGES if page != Path("CHANGELOG.md")]  # which tells what became of old keys
    texts = [(page, text) for page in pages for text in inline_code(page)]
    assert [(str(page), text, key) for page, text in texts for key in unknown_keys(text, known)] == []
    assert list(unknown_keys("--training.stepss 3", known)) == ["training.stepss"]


def trainings(page: Path) -> list[tuple[str, list[str]]]:
    """(config, overrides) of what the page's blocks start."""
    found = []
    of_launch = {"--executor", "--cluster", "--after", "--host", "--address"}
    of_launch |= {"--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id"}
    alone = ("--dry-run", "--quick", "--watch")
    for words in commands(page):
        line = " ".join(w for w in words if w not in alone)
        start = re.match(r"(?:\S*bin/)?(?:tepo (?:train|serve|doctor)|python -m launch) (\S+\.yaml)", line)
        if start is None:
            continue
        at = words.index(start[1])
        rest = [w for w in words[at + 1 :] if w not in alone]
        pairs = zip(rest[::2], rest[1::2], strict=True)
        found.append((start[1], [w for key, value in pairs if key not in of_launch for w in (key, value)]))
    return found


def reason(check: Callable[[], object]) -> str | None:
    """Return why a config is refused, None for one that is not."""
    try:
        check()
    except ConfigError as e:
        return str(e)
    return None


def test_what_is_started_has_a_config() -> None:
    started = [(page, config, overrides) for page in PAGES for config, overrides in trainings(page)]
    assert len(started) >= 30
    loads = [functools.partial(load_config, file if Path(file).exists() else STAND_IN, words) for _, file, words in started]
    refused = [
        (str(page), file, words, why) for (page, file, words), load in zip(started, loads, strict=True) if (why := reason(load))
    ]
    assert refused == []


def test_yaml_blocks_are_configs() -> None:
    base = yaml.safe_load(Path(STAND_IN).read_text())
    blocks = [(str(page), yaml.safe_load(block)) for page in PAGES for block in fences(page, "yaml")]
    assert len(blocks) >= 5

    def merged(block: dict[str, Any]) -> dict[str, Any]:
        return base | {name: base.get(name, {}) | part if isinstance(part, dict) else part for name, part in block.items()}

    trees = [(page, merged(block)) for page, block in blocks]
    refused = [(page, why) for page, tree in trees if (why := reason(functools.partial(validate_as, Config, tree, page)))]
    assert refused == []


PAPER = Path("docs/paper.md")
# heads, key-value heads, feed-forward size, layers of the five models
SIZES = {
    "Qwen2.5-7B": (28, 4, 18944, 28),
    "Qwen3-14B": (40, 8, 17408, 40),
    "DeepSeek-R1-Distill-Llama-8B": (32, 8, 14336, 32),
    "Mistral-7B-Instruct-v0.2": (32, 8, 14336, 32),
    "DeepSeek-R1-Distill-Qwen-7B": (28, 4, 18944, 28),
}


def architecture(model: str):
    from tests.unit.models.test_families import PUBLISHED, read

    heads, groups, ffn, layers = SIZES[model]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": ffn}
    return read(PUBLISHED["Llama-3.1-8B"] | sizes | {"num_hidden_layers": layers, "head_dim": 128})


def test_the_layouts_of_the_paper_page_fit() -> None:
    """Every row of its table, for each of its three sizes: model, ranks, servers, machines of 8."""
    cluster = load_cluster("launch/profiles/slurm-h100.yaml")
    rows = re.findall(
        r"^\| (\S+) \| `table\d/.*?\| tp (\d) dp (\d), (\d) x tp (\d) \| (.*?) \| (.*?) \|$", PAPER.read_text(), re.M
    )
    assert {row[0] for row in rows} == set(SIZES)
    recipes = {
        load_config(p).model.path.removeprefix("models/"): p for p in sorted(Path("examples/paper").glob("table?/*.yaml"))
    }
    assert recipes.keys() == SIZES.keys()
    for model, *shared, sixteen, sixty_four in rows:
        others = [re.fullmatch(r"tp (\d) dp (\d) \+ (\d) x tp (\d)", cell).groups() for cell in (sixteen, sixty_four)]
        for gpus, (tp, dp, servers, server_tp) in zip((8, 16, 64), (shared, *others), strict=True):
            words = f"--parallel.tp {tp} --parallel.dp {dp} --rollout.servers {servers} --rollout.server.tp {server_tp}"
            apart = " --rollout.colocate false --rollout.server.rendezvous s --sync.transport.folder w"
            words += " --rollout.colocate true" if gpus == 8 else apart
            cfg = load_config(recipes[model], words.split())
            check_layout(architecture(model), cfg.parallel)
            assert lay_out(cfg, cluster).nodes == gpus // 8
            used = cfg.parallel.world_size + (0 if gpus == 8 else int(servers) * int(server_tp))
            assert used == gpus and int(servers) * int(server_tp) <= 8 * max(1, gpus // 16)


def test_the_commands_of_the_paper_page_take_the_machines_that_it_says() -> None:
    cluster, text = load_cluster("launch/profiles/slurm-h100.yaml"), PAPER.read_text()
    for gpus, section in re.findall(r"^## (\d+) GPUs.*?\n(.*?)(?=^## )", text, re.M | re.S):
        lines = section.replace("\\\n", " ").splitlines()
        words = [shlex.split(line) for line in lines if " examples/paper/" in line or " examples/recipes/" in line]
        assert words
        for line in words:
            at = next(i for i, word in enumerate(line) if word.startswith("examples/"))
            rest = [w for w in line[at + 1 :] if w != "--dry-run"]
            keep = [w for k, v in zip(rest[::2], rest[1::2], strict=True) if "." in k for w in (k, v)]
            assert lay_out(load_config(line[at], keep), cluster).nodes == int(gpus) // 8, line


@functools.cache
def templates() -> list[str]:
    """Every text of the source, `…` for what is filled in; neighbours of a sum are joined."""
    found = []
    for path in [*Path("tepo_megatron").rglob("*.py"), *Path("launch").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted() -> list[str]:
    """The messages on the page of troubles: code in its block quotes."""
    lines = Path("docs/troubleshooting.md").read_text().splitlines()
    found = [line.removeprefix("> ").strip("`").strip() for line in lines if line.startswith("> `")]
    assert len(found) > 30
    return found


def is_said(message: str) -> bool:
    """Return whether a text of the source has the message's pieces."""
    pieces = [piece for piece in re.split("…+", message) if piece.strip()]
    pattern = re.compile(".*".join(re.escape(piece) for piece in pieces), re.S)
    return any(pattern.search(template) for template in templates())


def test_quoted_messages_are_the_code_s() -> None:
    assert [message for message in quoted() if not is_said(message)] == []
    assert not is_said("no message of … the code")


def python_block(page: str) -> dict[str, object]:
    (block,) = fences(Path(page), "python")
    names: dict[str, object] = {}
    exec(compile(block, page, "exec"), names)
    return names


def test_the_example_of_an_objective(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    from tepo_megatron.config import ObjectiveConfig
    from tepo_megatron.losses import build_objective
    from tepo_megatron.losses.surrogate import SURROGATES
    from tests.objective_cases import draw, inputs_of, ours

    monkeypatch.setitem(SURROGATES, "spo", SURROGATES["clip"])  # given back at the end, whatever the block does
    (block,) = fences(Path("docs/add_objective.md"), "python")
    (tmp_path / "mine.py").write_text(block)
    batch = draw(0)
    out, grad, _ = ours(build_objective(ObjectiveConfig(name=f"{tmp_path}/mine.py:SPO")), batch)
    inputs = inputs_of(batch)
    r, a = out.ratio_R, inputs.advantage_R
    torch.testing.assert_close(-grad, (a - a.abs() * (r - 1) / 0.2) * r / inputs.whole.tokens)


def test_the_reward_of_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo_megatron.rewards.build import check_reward

    (block,), (config,) = fences(Path("docs/first_run.md"), "python"), fences(Path("docs/first_run.md"), "yaml")
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text(block)
    check_reward(validate_as(RewardConfig, yaml.safe_load(config)["reward"], "docs/first_run.md"))
    names: dict[str, Any] = {}
    exec(block, names)
    scores = [names["larger"]("", text, "97", {"numbers": [97, 67]}) for text in ("97", "67 or 97", "5", "none")]
    assert scores == [1.0, 0.1, 0.0, 0.0]


def test_the_example_of_a_reward(tmp_path: Path) -> None:
    from tepo_megatron.rewards.build import build_reward, check_reward
    from tests.graded import decode, rollout

    page = Path("docs/add_reward.md")
    (block,), (config,) = fences(page, "python"), fences(page, "yaml")
    (tmp_path / "my_rewards.py").write_text(block)
    tree = yaml.safe_load(config)["reward"] | {"workers": 1}
    tree["terms"][1]["function"] = str(tmp_path / tree["terms"][1]["function"])
    cfg = validate_as(RewardConfig, tree, "docs")
    check_reward(cfg)
    with build_reward(cfg, decode) as reward:
        first, second = reward.score([rollout("2 + 2 = 4\nso\n\\boxed{4}", "4"), rollout("\\boxed{5}", "4")])
    assert (first.score, second.score) == (1.0, 0.0)
    assert first.reward == pytest.approx(1 + 0.2 * 0.5) and second.reward == 0.0


def test_the_example_of_a_family(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, SeedOssConfig

    from tepo_megatron.models.families import read_config
    from tepo_megatron.models.families.family import Family

    family = python_block("docs/add_family.md")["FAMILY"]
    assert isinstance(family, Family)
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    AutoModelForCausalLM.from_config(SeedOssConfig(**sizes, head_dim=10, vocab_size=70)).save_pretrained(tmp_path)
    arch = family.architecture(read_config(tmp_path))
    assert arch.qkv_bias and arch.head_dim == 10
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert set(f.keys()) == family.tensor_names(arch)


def test_the_engine_page_names_every_method_in_order() -> None:
    named = re.findall(r"^\| `(\w+)` \|", Path("docs/add_engine.md").read_text(), re.M)
    assert named == [name for name in vars(EngineApi) if not name.startswith("_")]


def test_the_configuration_reference_is_that_of_the_code() -> None:
    written = config_reference.PAGE.read_text()
    assert written == config_reference.page(), "run `python -m tools.config_reference`"


LIMIT = 140  # keys of the reference


def test_the_reference_stays_short() -> None:
    text = config_reference.PAGE.read_text()
    assert 100 < config_reference.count(text) <= LIMIT
    assert f"This page lists {config_reference.count(text)} keys." in text


def test_the_table_of_parts_is_that_of_the_code() -> None:
    written = objective_parts.PAGE.read_text()
    assert written == objective_parts.with_section(written), "run `python -m tools.config_reference`"
    (named,) = re.findall(r"\n## Parts of an objective\n(.*?)\n## ", written, re.DOTALL)
    assert all(f"| `{field.name}` |" in named for field in dataclasses.fields(ObjectiveParts))


def test_every_key_has_a_meaning() -> None:
    names = {section.name for section in config_reference.sections()}
    for section in config_reference.sections():
        intro, of_key = config_reference.meanings(section.cls)
        for key in config_reference.fields_of(section.cls):
            named = of_key.get(key) or re.search(rf"\b{key}\b", intro)
            assert named or f"{section.prefix}{key}" in names, f"{section.prefix}{key}"
