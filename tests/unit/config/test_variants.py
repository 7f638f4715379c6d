"""Sections with variants: which variant is meant, which keys stay when a layer names another."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import GroupTransportConfig, ShmTransportConfig, UrlServerConfig
from tepo_megatron.config.io import load_config, validate

MINIMAL: dict[str, Any] = {"name": "run", "model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def written(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


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
