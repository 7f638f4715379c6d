"""Load the weights of an update inside SGLang, which calls `load_sources` because of its `--custom-weight-loader` option.

Facts about SGLang are of 0.5.23.
"""

import json
import os
from collections.abc import Sequence

import torch

from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.receiver.receiver import RankReceiver

LOADER = "tepo_megatron.wire.receiver.sglang_loader.load_sources"
MODEL_VARIABLE = "TEPO_MODEL_PATH"  # model folder that the server was started with
# Commands, sent in the place of a source: the loader has no hook for the begin and end of an update, for joining groups, or for
# the tensors that an update leaves unchanged.
BEGIN, FINISH, JOIN, KEEP = "tepo:begin", "tepo:finish", "tepo:join", "tepo:keep"

_receiver = RankReceiver()  # of this process


def load_sources(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load one round, or run a command that comes in the place of a round. All tensor-parallel ranks take all tensors.

    Commands:
        BEGIN: forget what an earlier update gave.
        FINISH: raise ValueError unless all tensors of the model's checkpoint were given since BEGIN, except unchanged ones.
        JOIN and the JSON of a `GroupSpec`: join its groups.
        KEEP and the JSON of an `UnchangedTensors`: note the tensors that stay; raise ValueError if they are not here in that
            version.

    Raises ValueError if the round holds a tensor that the model does not have, that has another shape, or that was given
    before. The model is unchanged then, and SGLang ends.
    """
    names = [name for name, _ in named_tensors]
    if names == [BEGIN]:
        _receiver.begin(os.environ[MODEL_VARIABLE], model.config.tie_word_embeddings, next(model.parameters()).device)
    elif names == [FINISH]:
        _receiver.finish()
    elif names[:1] == [JOIN]:
        _receiver.join_groups(GroupSpec(**json.loads(names[1])), next(model.parameters()).device)
    elif names[:1] == [KEEP]:
        _receiver.keep_unchanged(UnchangedTensors(**json.loads(names[1])))
    else:
        if (arrived := _receiver.take(names)) is not None:
            model.load_weights(arrived)
