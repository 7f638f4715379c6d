"""The environment of one server: its variables, built from those of this process, and its folder.

The folder has the model as the server sees it, and temporary files that a killed server would leave in /tmp.
"""

import json
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tepo_megatron.base.errors import ConfigError, ConversionError
from tepo_megatron.base.memory_kills import cpu_threads
from tepo_megatron.base.processes import LAUNCHER, RANK_THREADS, without_proxy
from tepo_megatron.base.scratch import PrivateFolder, make_private_folder
from tepo_megatron.config import RolloutConfig
from tepo_megatron.models import fp8
from tepo_megatron.models.families import find_family, read_config
from tepo_megatron.models.hf_io import INDEX, HfReader

# Variables that describe the world to ranks; a server must not see them.
_WORLD = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TEPO_WORLD_FOLDER", "TEPO_ERROR_FILE", LAUNCHER, "TEPO_ATTEMPT", "TEPO_START_ID"),  # our launcher
}


def without_torchrun(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that are meant for ranks."""
    removed = set(_WORLD)
    if inherited.keys() & {"RANK", LAUNCHER}:
        # A rank sets it for Megatron-Core. With one hardware queue an engine's streams would run one after the other.
        removed.add("CUDA_DEVICE_MAX_CONNECTIONS")
    if RANK_THREADS in inherited or ("RANK" in inherited and LAUNCHER not in inherited):  # ours or torchrun's, not the user's
        removed |= {"OMP_NUM_THREADS", RANK_THREADS}
    return {name: value for name, value in inherited.items() if name not in removed and not name.startswith("TORCHELASTIC_")}


def server_threads(env: Mapping[str, str], model: Path, processes: int) -> dict[str, str]:
    """Return the variables of a server's threads on CPUs, for `processes` of all servers on this machine.

    The servers share all cores, because the ranks wait while they sample. What the user's environment says takes precedence.
    """
    threads = env.get("OMP_NUM_THREADS") or str(cpu_threads(model, processes))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


def on_this_machine(inherited: Mapping[str, str], is_loopback: bool) -> dict[str, str]:
    """Return variables that keep a server's process groups on the loopback interface, and its requests there without a proxy.

    All ranks of the server run on this machine.

    Otherwise gloo binds to whatever address this machine's name resolves to, and accepts every connection.
    """
    env = {"GLOO_SOCKET_IFNAME": "lo"} | without_proxy(inherited)
    if is_loopback and "RANK" in inherited and inherited.get("LOCAL_WORLD_SIZE") == inherited.get("WORLD_SIZE"):
        env["NCCL_SOCKET_IFNAME"] = "lo"
    return env


def new_file(inherited: Mapping[str, str], name: str) -> str:
    """Return a path in TMPDIR that no other start of a server uses. `LocalServer` sets TMPDIR to a folder of mode 0700."""
    return f"{inherited.get('TMPDIR', tempfile.gettempdir())}/{name}-{secrets.token_hex(8)}"


def devices(inherited: Mapping[str, str], first: int, count: int, others: bool = False) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the GPUs of one server."""
    seen = inherited.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(max(first + count, torch.cuda.device_count() if others else 0))]
    taken = names[first : first + count]
    rest = [name for name in names if name not in taken] if others else []
    return {"CUDA_VISIBLE_DEVICES": ",".join([*taken, *rest])}


HIDDEN = "generation_config.json"  # the author's sampling defaults and stop tokens, which every server would apply
CONFIG = "config.json"
# 107 bytes of a UNIX socket's address, less vLLM's file in `scratch` (a UUID), which is the longest name of both engines
_LONGEST = 107 - len("/tmp/") - 36
_FORMATS = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # dtype names of safetensors


class ServedModel:
    """A private folder with links to the files of a model, without the model's sampling defaults (`generation_config.json`)."""

    def __init__(self, private: PrivateFolder) -> None:
        self._private, self.folder = private, private.path
        self.path, self.scratch = self.folder / "model", self.folder / "tmp"

    @classmethod
    def create(cls, model: Path, in_fp8: bool = False) -> "ServedModel":
        """Make the folder and the links."""
        served = cls(make_private_folder("served", longest=_LONGEST))
        served.path.mkdir()
        served.scratch.mkdir()
        for file in model.iterdir():
            if file.name != HIDDEN and not (in_fp8 and (file.suffix == ".safetensors" or file.name in (CONFIG, INDEX))):
                (served.path / file.name).symlink_to(file.resolve())
        if in_fp8:
            _announce_fp8(model, served.path)
        return served

    def remove(self) -> None:
        """Remove the folder. The model's own files stay."""
        self._private.remove()


def _announce_fp8(model: Path, folder: Path) -> None:
    hf_config = read_config(model)
    family = find_family(hf_config)
    arch = family.architecture(hf_config)
    shapes = HfReader(model).shapes()
    ops = {name: row.op for row in family.rows for names in row.instances(arch) for name in names}
    if missing := family.tensor_names(arch) - shapes.keys():
        raise ConversionError(f"{model}: tensor {min(missing)} is missing; the weights do not belong to this config.json")
    announced = [part for name in family.tensor_names(arch) for part in fp8.parts(ops[name], name, shapes[name])]
    names = {name for name, _ in announced}
    whole = [n.removesuffix(".weight") for n in names if n.endswith(".weight") and n + fp8.SCALE_SUFFIX not in names]
    tied = ["lm_head"] if arch.tied_embeddings else []
    changed = hf_config | {"quantization_config": fp8.config([*sorted(whole), *tied])}
    (folder / CONFIG).write_text(json.dumps(changed, indent=2))
    _write_empty(dict(announced), folder / "model.safetensors")


def _write_empty(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file of zeros that uses no disk space: a header, then a hole in the file."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        dtype = _FORMATS[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


def cache_tokens(model_path: Path, precision: str, cache_bytes: int, most: int) -> int:
    """Return the size of a KV cache in tokens: what fits into its memory, but not more than can be requested at once."""
    config = read_config(model_path)
    arch = find_family(config).architecture(config)
    layers = arch.num_layers - (len(arch.linear_attention.layers) if arch.linear_attention is not None else 0)
    token = 2 * layers * arch.num_query_groups * arch.head_dim * (4 if precision == "fp32" else 2)
    return min(cache_bytes // token, most)


def check_cache(rollout: RolloutConfig, model_path: Path, dtype: str, lengths: Mapping[str, int]) -> None:
    """Raise ConfigError if rollout.server.kv_cache_gib cannot hold one sequence. Servers of others have no such key."""
    server = rollout.server
    gib = None if rollout.replay is not None else getattr(server, "kv_cache_gib", None)
    if gib is None:
        return
    tokens = server.tp * cache_tokens(model_path, server.precision or dtype, int(gib * 2**30), 2**31)
    for keys, length in lengths.items():
        if length > tokens:
            raise ConfigError(f"rollout.server.kv_cache_gib={gib:g} holds {tokens} tokens, and {keys} = {length}; raise it")
