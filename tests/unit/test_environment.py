"""A site's environment variables name proxies that cannot reach this machine, and folders with long paths."""

import os
import socket
import tempfile
import urllib.request
import uuid
from pathlib import Path

import pytest

from tepo_megatron.base import user_file
from tepo_megatron.engines.servers.environment import ServedModel

UNREACHABLE = "http://127.0.0.1:9"


@pytest.mark.parametrize(("exempt", "others"), [("", False), ("corp.example, 10.0.0.1", False), ("*", True)])
def test_a_users_file_reaches_this_machine_without_the_proxy(
    exempt: str, others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, UNREACHABLE)
    monkeypatch.setenv("no_proxy", exempt)
    monkeypatch.setenv("NO_PROXY", exempt)
    file = tmp_path / "agent.py"
    file.write_text(
        "import urllib.request\n"
        "HOSTS = ('127.0.0.1', 'localhost', '::1', 'corp.example', 'elsewhere.example')\n"
        "BYPASSED = [bool(urllib.request.proxy_bypass(host)) for host in HOSTS]\n"
    )
    known = "corp.example" in exempt or others
    assert user_file.load(f"{file}:BYPASSED", "rollout.function").value == [True, True, True, known, others]
    assert urllib.request.getproxies()["http"] == UNREACHABLE


@pytest.mark.parametrize("length", [30, 38, 140])
def test_sockets_of_servers_fit_whatever_the_length_of_tmpdir(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)
        served = ServedModel.create(model)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(served.scratch / str(uuid.uuid4())))  # as vLLM names it
            assert (served.folder.parent == folder) == (length < 38)
            assert served.folder.stat().st_mode & 0o777 == 0o700 and served.folder.stat().st_uid == os.geteuid()
        finally:
            served.remove()
