"""The vLLM plugin copies only the tensors of a round that vLLM's own loader keeps waiting; no server."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROUND = """
import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload, record_metadata_for_reloading
from tepo_megatron.weight_sync.receiver.vllm_plugin import own_waiting_tensors

class Joined(torch.nn.Module):  # as a linear module whose parameter comes in two parts
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param, loaded_weight, part):
        param.data[2 * part : 2 * part + 2].copy_(loaded_weight)

model = torch.nn.ModuleList([Joined(), Joined()])
record_metadata_for_reloading(model)
initialize_layerwise_reload(model)
whole, half = model
row = torch.arange(18.0).reshape(3, 2, 3)  # a round: both parts of one module, one of the other
for module, part, tensor in ((whole, 0, row[0]), (whole, 1, row[1]), (half, 0, row[2])):
    module.weight.weight_loader(module.weight, tensor, part)
own_waiting_tensors(model)
(kept,) = [call.arguments["loaded_weight"] for _, call in get_layerwise_info(half).loaded_weights]
assert not get_layerwise_info(whole).loaded_weights
inside = row.data_ptr() <= kept.data_ptr() < row.data_ptr() + row.nbytes
own_waiting_tensors(model)  # the next round has nothing of it
(again,) = [call.arguments["loaded_weight"] for _, call in get_layerwise_info(half).loaded_weights]
copied_once = again is kept
row.zero_()  # its memory is another's
half.weight.weight_loader(half.weight, torch.ones(2, 3), 1)
print("inside" if inside else "own", copied_once, half.weight.tolist(), whole.weight.tolist())
"""


@pytest.mark.full
def test_only_what_a_module_still_waits_with_is_copied() -> None:
    done = subprocess.run([sys.executable, "-c", ROUND], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    half = [[12.0, 13.0, 14.0], [15.0, 16.0, 17.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    whole = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert done.stdout.splitlines()[-1] == f"own True {half} {whole}"
