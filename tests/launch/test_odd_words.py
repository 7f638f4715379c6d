"""Odd names in profile, config and checkout reach srun and sbatch as one word each, or are refused; secrets reach no script."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.checks import check_paths, check_words
from launch.profile import Cluster, is_secret_name
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config.io import validate, validate_as
from tests.launch import cases

ODD = 'a b\'s "c" $HOME;x*'
OF_SBATCH = {"account": ODD, "partition": "it's", "qos": "a b", "constraint": "[h100&nvme]", "reservation": ODD}
PROFILE: dict[str, Any] = {
    "python": f"/opt/{ODD}/python",
    "gpus_per_node": 8,
    "environment": {"NOTE": ODD},
    "container": {"image": f"/images/{ODD}.sqsh", "mounts": ["/it's;$x:/data"], "node_mounts": ["/raid(1):/raid"]},
    "slurm": {**OF_SBATCH, "options": {"comment": ODD}},
}
# writes its words, and passes the node check
SRUN = """#!/bin/bash
{ printf '%s\\0' "$@"; echo; } >> {calls}
case "$*" in *node_check*)
  mkdir -p "$LAUNCH_CHECK"; echo n1 > "$LAUNCH_CHECK/good"; echo 127.0.0.1 1234 > "$LAUNCH_CHECK/endpoint";; esac
"""


@pytest.mark.slow
def test_each_odd_word_reaches_srun_and_sbatch_as_it_is(tmp_path: Path) -> None:
    folder, bin, calls = tmp_path / "project", tmp_path / "bin", tmp_path / "calls"
    folder.mkdir(), bin.mkdir()
    config = {**cases.CONFIG, "model": {"path": f"/data/{ODD}"}, "data": {"train": f"/data/{ODD}.jsonl"}}
    for name, tree in (("run", config), ("odd", PROFILE)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    words = ["run.yaml", "--cluster", "odd.yaml", "--executor", "slurm", "--dry-run"]
    ((status, text, said),) = cases.call(folder, {"odd": words}).values()
    assert status == 0, said
    script = text.split("#==== ")[1].partition("\n")[2]
    flags = dict(
        shlex.split(line[8:])[0][2:].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH --")
    )
    assert {name: flags[name] for name in OF_SBATCH} == OF_SBATCH and flags["comment"] == ODD

    for name, body in (("srun", SRUN.replace("{calls}", shlex.quote(str(calls)))), ("scontrol", "#!/bin/bash\necho n1\n")):
        (bin / name).write_text(body)
        (bin / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "HOME": "/nowhere"}
    script = script.replace("sleep 5", "sleep 0")
    subprocess.run(["bash", "-c", script], env=environment, cwd=folder, capture_output=True, timeout=60, check=False)
    found = [call.split("\0") for call in calls.read_text(errors="replace").split("\0\n")]
    check = next(call for call in found if "node_check" in call)
    task = next(call for call in found if "--container-image" in call)
    image, mounts = PROFILE["container"]["image"], f"{folder}:{folder},/it's;$x:/data,/raid(1):/raid"
    assert f"--container-image={image}" in check and f"--container-mounts={mounts}" in check
    assert task[task.index("--container-image") + 1] == image
    assert task[task.index("--container-mounts") + 1].startswith(mounts)
    assert any(shlex.quote(PROFILE["python"]) in word for word in check)


def test_what_cannot_be_quoted_is_refused_by_name() -> None:
    for key, value in (
        ("python", "~/venv/bin/python"),
        ("python", "a\nb"),
        ("container", {"image": "~/a.sqsh"}),
        ("container", {"image": "a\nb"}),
        ("environment", {"HF_HOME": "~/hf"}),
        ("slurm", {"account": "lab", "partition": "batch\n"}),
        ("slurm", {"account": "lab", "options": {"comment": "a\tb"}}),
    ):
        with pytest.raises(ConfigError, match=rf"{key}.*(no shell replaces ~ there|control character)"):
            validate_as(Cluster, {key: value}, "cluster.yaml")
    with pytest.raises(ConfigError, match="options: 'mail type' is no name of an option"):
        validate_as(Cluster, {"slurm": {"account": "lab", "options": {"mail type": "END"}}}, "cluster.yaml")
    assert validate_as(Cluster, {"slurm": {"account": "lab", "setup": ["~/env.sh"]}}, "c").slurm is not None  # bash replaces it
    for odd in " '\"$;%:,*~\n":
        with pytest.raises(ConfigError, match="in a path would be taken apart on srun's command line"):
            check_paths([Path(f"/home/a{odd}b")], slurm=True)
    check_paths([Path("/home/München_1.2-x@y")], slurm=True)
    tree = {"name": "a", "model": {"path": "/m"}, "data": {"train": "/d"}}
    for key in ("output", "model.path", "data.train", "rollout.server.rendezvous"):
        changed = json.loads(json.dumps(tree))
        *sections, last = key.split(".")
        section = changed
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = "~/x"
        with pytest.raises(ConfigError, match=rf"{key}=~/x: no shell replaces ~ there; write the whole path"):
            validate(changed)


SECRET_NAMES = "MY_PASS WANDB_APIKEY HF_AUTH GITHUB_PAT HF_TOKEN AWS_SECRET_ACCESS_KEY DB_PASSWORD_PROD API_KEY GPG_PASSPHRASE"
OTHER_NAMES = "PATH PWD TOKENIZERS_PARALLELISM SSH_AUTH_SOCK NCCL_DEBUG HF_HOME VLLM_MAX_TOKENS HF_TOKEN_PATH PASSWORD_FILE"
SECRET_VALUES = (
    "postgres://u:pw@h/db", "http://me:pw@proxy:3128", "hf_abcdefghijkl", "sk-abcdefghijkl", "ghp_0123456789abc",
    "Bearer abcdefghijk", "-----BEGIN RSA PRIVATE KEY-----",
)  # fmt: skip


def test_secrets_are_refused_by_name_and_by_value_and_not_printed() -> None:
    assert all(map(is_secret_name, SECRET_NAMES.split())) and not any(map(is_secret_name, OTHER_NAMES.split()))
    account = {"account": "lab"}
    for value in SECRET_VALUES:
        profiles: list[dict[str, Any]] = [
            {"environment": {"SETTING": value}},
            {"container": {"image": f"docker://{value}"}},
            {"slurm": {**account, "setup": [f"export X='{value}'"]}},
            {"slurm": {**account, "options": {"comment": value}}},
        ]
        for profile in profiles:
            with pytest.raises(ConfigError, match="looks like a secret") as e:
                validate_as(Cluster, profile, "cluster.yaml")
            assert value not in str(e.value)
        with pytest.raises(ConfigError, match="looks like a secret") as e:
            check_words(["models/one", f"--url={value}"])
        assert value not in str(e.value)
    with pytest.raises(ConfigError, match="looks like a secret"):
        validate_as(Cluster, {"slurm": {**account, "setup": ["export WANDB_API_KEY=abc"]}}, "cluster.yaml")
    for fine in ("export WANDB_API_KEY=$(cat ~/key)", 'export HF_TOKEN="$TOKEN"', "module load cuda/13.0"):
        validate_as(Cluster, {"slurm": {**account, "setup": [fine]}}, "cluster.yaml")
    for fine in ("http://proxy:3128", "docker://$oauthtoken@nvcr.io#nvidia/pytorch:24.01", "git@github.com:a/b"):
        validate_as(Cluster, {"environment": {"SETTING": fine}}, "cluster.yaml")
