"""Files of Hugging Face models: their modes, and dtypes that are no weights."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tepo_megatron.base.errors import ConversionError
from tepo_megatron.models.hf_io import HfReader, write_shards


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_shards_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (name,) = write_shards([("a", torch.zeros(2))], tmp_path, "model", 2**20)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_that_a_cast_would_take_for_weights_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {"fine": torch.ones(2, dtype=torch.bfloat16), "quantized": torch.zeros(2).to(dtype)}
    save_file(weights, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    assert reader.get("fine").dtype == torch.bfloat16
    with pytest.raises(ConversionError, match=r"model\.safetensors: tensor quantized is \w+, not floating point"):
        reader.get("quantized")
