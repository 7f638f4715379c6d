"""Old names of config keys: each is translated with a message, and a removed key may only have the value that is used now."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_megatron.config import Config, GroupTransportConfig, ShmTransportConfig, UrlServerConfig
from tepo_megatron.config.io import load_config, plain, under_new_names, validate
from tepo_megatron.config.renamed_keys import RENAMED
from tepo_megatron.errors import ConfigError

MINIMAL: dict[str, Any] = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
SECTIONS = {"rollout", "sync", "reward", "data", "checkpoint", "evaluation", "logging"}
# old key, its value, what the resolved config then has: {key: value}
RENAMES: list[tuple[str, Any, dict[str, Any]]] = [
    ("rollout.in_flight", "finish", {"rollout.on_weight_update": "finish"}),
    ("rollout.max_refills", 2, {"rollout.max_generation_rounds": 3}),
    ("rollout.max_refills", None, {"rollout.max_generation_rounds": None}),
    ("rollout.server.silent_seconds", 90, {"rollout.server.heartbeat_timeout": 90}),
    ("parallel.silent_seconds", 90, {"parallel.heartbeat_timeout": 90}),
    ("sync.folder", "weights", {"sync.transport": {"type": "shm", "folder": "weights"}}),
    ("sync.folder", None, {"sync.transport": {"type": "shm", "folder": None}}),
    ("reward.hard_seconds", 9, {"reward.timeout_seconds": 9}),
    ("reward.type", "answer_line", {"reward.terms": [{"type": "answer_line", "weight": 1.0}]}),
]
OF_A_GROUP: list[tuple[str, Any, str]] = [
    ("sync.address", "10.0.0.1", "address"),
    ("sync.timeout_seconds", 20, "timeout_seconds"),
]
REMOVED: dict[str, tuple[Any, Any]] = {  # old key: (the value that is used now, another value)
    "rollout.attempts": (3, 5),
    "rollout.max_sequence_tokens": (None, 4096),
    "rollout.server.port": (0, 8000),
    "rollout.server.backoff_seconds": (1.0, 2.0),
    "sync.join_seconds": (None, 60.0),
    "reward.soft_seconds": (2, 3),
    "reward.max_answer_chars": (512, 100),
    "reward.memory_mib": (1024, 2048),
    "reward.overlong_penalty": (0.5, 1.0),
    "data.deduplicate": (True, False),
    "checkpoint.timeout_seconds": (1800.0, 60.0),
}
IN_A_LIST = {"reward.terms[].attempts": (4, 2), "reward.terms[].backoff_seconds": (1.0, 0.5)}


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return {a: {b: value}} for the key "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    tree: dict[str, Any] = value
    return tree


def with_key(key: str, value: Any) -> dict[str, Any]:
    """Return MINIMAL with one more key."""
    ((section, keys),) = nested(key, value).items()
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), **keys}}


def value_of(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


def written(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def test_every_entry_of_the_table_has_an_example() -> None:
    table = {key.old for key in RENAMED if key.old.partition(".")[0] in SECTIONS} | {"parallel.silent_seconds"}
    assert table == {key for key, *_ in (*RENAMES, *OF_A_GROUP)} | REMOVED.keys() | IN_A_LIST.keys()


@pytest.mark.parametrize(("old", "value", "resolved"), RENAMES)
def test_an_old_name_works(
    old: str, value: Any, resolved: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file, on the command line, and in a tree without a file."""
    tree = {**MINIMAL, **nested(old, value)}
    file = load_config(written(tmp_path / "mine.yaml", tree))
    assert {key: value_of(plain(file), key) for key in resolved} == resolved and validate(tree) == file
    new = next(key.new for key in RENAMED if key.old == old)
    assert capsys.readouterr().err == f"warning: {tmp_path}/mine.yaml: {old} is now {new}; the old name works for one release\n"
    words = [f"--{old}", "null" if value is None else str(value)]
    assert load_config(written(tmp_path / "bare.yaml", MINIMAL), words) == file
    assert capsys.readouterr().err == f"warning: command line: {old} is now {new}; the old name works for one release\n"


@pytest.mark.parametrize(("old", "value", "name"), OF_A_GROUP)
def test_old_names_of_one_transport(
    old: str, value: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have an effect with it alone, and are dropped in a layer that names another."""
    tree = {**MINIMAL, "sync": {"transport": "group", name: value}}
    group = validate(tree).sync.transport
    assert isinstance(group, GroupTransportConfig) and getattr(group, name) == value
    in_base = written(tmp_path / "base.yaml", {**MINIMAL, **nested(old, value)})
    assert load_config(in_base, ["--sync.transport", "group"]).sync.transport == group
    other = written(tmp_path / "other.yaml", {**MINIMAL, "sync": {"transport": "ipc", name: value}})
    capsys.readouterr()
    assert load_config(other).sync.transport.type == "ipc"
    assert capsys.readouterr().err == (
        f"warning: {other}: {old} is now sync.transport.{name}, which has no effect here; remove it\n"
    )


@pytest.mark.parametrize("old", REMOVED)
def test_a_removed_key_may_have_the_value_that_is_used_now(
    old: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    constant, other = REMOVED[old]
    path = written(tmp_path / "mine.yaml", with_key(old, constant))
    assert load_config(path) == validate(MINIMAL)
    assert f"warning: {path}: {old} was removed (" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=rf"{old}={other!r}: this key was removed \(.*\); remove it"):
        validate(with_key(old, other))


@pytest.mark.parametrize("old", IN_A_LIST)
def test_a_removed_key_in_a_list(old: str) -> None:
    name, (constant, other) = old.rpartition(".")[2], IN_A_LIST[old]
    term = {"type": "http", "url": "http://host/score"}
    assert validate({**MINIMAL, "reward": {"terms": [{**term, name: constant}]}}) == validate(
        {**MINIMAL, "reward": {"terms": [term]}}
    )
    with pytest.raises(ConfigError, match=rf"reward\.terms\[\]\.{name}={other}: this key was removed"):
        validate({**MINIMAL, "reward": {"terms": [{"type": "math"}, {**term, name: other}]}})


def test_half_of_the_wall_time_is_the_processor_time() -> None:
    cfg = validate({**MINIMAL, "reward": {"soft_seconds": 15, "hard_seconds": 30}})
    assert (cfg.reward.timeout_seconds, cfg.reward.processor_seconds) == (30, 15)


def test_both_names_in_one_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.in_flight and its new name rollout\.on_weight_update are both set"):
        validate({**MINIMAL, "rollout": {"in_flight": "finish", "on_weight_update": "finish"}})
    with pytest.raises(ConfigError, match=r"sync\.folder and its new name sync\.transport\.folder are both set"):
        validate({**MINIMAL, "sync": {"folder": "a", "transport": {"type": "shm", "folder": "b"}}})


def test_an_old_name_below_and_the_new_one_above(tmp_path: Path) -> None:
    base = written(tmp_path / "base.yaml", {**MINIMAL, "rollout": {"max_refills": 4}, "sync": {"folder": "a"}})
    cfg = load_config(base, ["--rollout.max_generation_rounds", "2", "--sync.transport.folder", "b"])
    assert (cfg.rollout.max_generation_rounds, cfg.sync.shared_folder) == (2, "b")
    cfg = load_config(base, ["--rollout.max_refills", "null", "--sync.folder", "null"])
    assert (cfg.rollout.max_generation_rounds, cfg.sync.shared_folder) == (None, None)


def test_a_message_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terms = [{"type": "http", "url": f"http://host/{i}", "attempts": 4} for i in range(3)]
    load_config(written(tmp_path / "mine.yaml", {**MINIMAL, "reward": {"terms": terms}}))
    assert capsys.readouterr().err.count("\n") == 1


def test_a_value_of_the_wrong_type_names_both_keys() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_refills='many' is not valid; set its new name rollout\.max_gen"):
        validate({**MINIMAL, "rollout": {"max_refills": "many"}})


OLD_RUN: dict[str, Any] = {  # sections of a config.yaml as the last version resolved it
    "parallel": {"silent_seconds": 60.0},
    "data": {"train": "train.jsonl", "deduplicate": True},
    "rollout": {
        "attempts": 3, "in_flight": "finish", "max_refills": None, "max_sequence_tokens": None,
        "server": {
            "python": None, "urls": None, "rendezvous": None, "tp": 1, "port": 0, "ready_seconds": None,
            "silent_seconds": 60.0, "backoff_seconds": 1.0, "kv_cache_gib": 1.0, "extra_args": [], "precision": None,
        },
    },
    "reward": {
        "type": "math", "terms": None, "soft_seconds": 2, "hard_seconds": 4.0, "memory_mib": 1024, "max_answer_chars": 512,
        "overlong_buffer_tokens": None, "overlong_penalty": 0.5,
    },
    "sync": {"transport": "shm", "folder": None, "address": None, "timeout_seconds": 30.0, "join_seconds": None},
    "checkpoint": {"timeout_seconds": 1800.0},
}  # fmt: skip


def test_a_config_that_an_old_run_left_can_be_used(tmp_path: Path) -> None:
    """It is resolved as a new one is; other servers and transports can be set on top."""
    now = {**MINIMAL, "rollout": {"server": {"kv_cache_gib": 1.0}}}
    path = written(tmp_path / "config.yaml", {**MINIMAL, **OLD_RUN})
    assert load_config(path) == validate(now)
    assert under_new_names({**MINIMAL, **OLD_RUN}) == plain(validate(now))
    found = load_config(path, ["--rollout.server.urls", "[http://127.0.0.1:1]"])
    assert found.rollout.server == UrlServerConfig(urls=["http://127.0.0.1:1"])
    assert load_config(path, ["--rollout.server.rendezvous", "r", "--sync.folder", "w"]).rollout.server.rendezvous_folder == "r"
    assert load_config(path, ["--sync.transport", "group"]).sync.transport == GroupTransportConfig(type="group")
    several = {**MINIMAL, **OLD_RUN, "sync": {"transport": "group", "folder": None, "timeout_seconds": 20.0}}
    assert validate(several).sync.transport == GroupTransportConfig(type="group", timeout_seconds=20.0)
    terms = OLD_RUN["reward"] | {"terms": [{"type": "answer_line"}]}
    assert validate({**MINIMAL, "reward": terms}).reward.terms[0].type == "answer_line"


def test_a_config_that_no_version_can_resolve_stays_as_it_is() -> None:
    assert under_new_names({"name": "a", "rollout": {"attempts": 7}}) == {"name": "a", "rollout": {"attempts": 7}}


# sections with variants


def test_a_plain_string_is_short_for_a_transport() -> None:
    for kind in ("shm", "group", "ipc"):
        short, long = (validate({**MINIMAL, "sync": {"transport": value}}) for value in (kind, {"type": kind}))
        assert short == long and short.sync.transport.type == kind
    with pytest.raises(ConfigError, match=r"sync\.transport: must be one of shm, group and ipc"):
        validate({**MINIMAL, "sync": {"transport": "rdma"}})
    with pytest.raises(ConfigError, match=r"sync\.transport\.folder: only type shm has this key, and the type is group"):
        validate({**MINIMAL, "sync": {"transport": {"type": "group", "folder": "w"}}})


def test_another_type_replaces_the_section(tmp_path: Path) -> None:
    base = written(tmp_path / "base.yaml", {**MINIMAL, "sync": {"transport": {"type": "group", "timeout_seconds": 9}}})
    assert load_config(base, ["--sync.transport", "shm"]).sync.transport == ShmTransportConfig()
    again = load_config(base, ["--sync.transport.address", "10.0.0.1"]).sync.transport
    assert again == GroupTransportConfig(type="group", timeout_seconds=9, address="10.0.0.1")
    for words in (
        ["--sync.transport.folder", "w", "--sync.transport", "shm"],
        ["--sync.transport", "shm", "--sync.transport.folder", "w"],
    ):
        assert load_config(base, words).sync.transport == ShmTransportConfig(folder="w")


def test_a_key_decides_who_starts_the_servers(tmp_path: Path) -> None:
    base = written(tmp_path / "base.yaml", {**MINIMAL, "rollout": {"server": {"kv_cache_gib": 2, "concurrency": 8}}})
    found = load_config(base, ["--rollout.server.urls", "[http://127.0.0.1:1]"]).rollout.server
    assert found == UrlServerConfig(urls=["http://127.0.0.1:1"], concurrency=8)
    urls = written(tmp_path / "urls.yaml", {**MINIMAL, "rollout": {"server": {"urls": ["http://10.0.0.1:1"], "tp": 2}}})
    words = ["--rollout.server.rendezvous", "r", "--sync.transport", "group"]
    server = load_config(urls, words).rollout.server
    assert (server.rendezvous_folder, server.tp) == ("r", 2)
    assert not load_config(urls, ["--rollout.server.urls", "null"]).rollout.server.others


def test_a_key_without_effect_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.server\.kv_cache_gib: has no effect on the servers of rollout\.server\.urls"
    ):
        validate({**MINIMAL, "rollout": {"server": {"urls": ["http://127.0.0.1:1"], "kv_cache_gib": 1}}})


def test_every_variant_survives_the_resolved_config() -> None:
    for server in ({}, {"rendezvous": "r", "python": "p"}, {"urls": ["http://10.0.0.1:1"], "tp": 4}):
        for transport in ({"type": "shm", "folder": "f"}, {"type": "group", "address": "10.0.0.2"}):
            cfg: Config = validate({**MINIMAL, "rollout": {"server": server}, "sync": {"transport": transport}})
            assert validate(plain(cfg)) == cfg and dataclasses.replace(cfg, name="run") == cfg
