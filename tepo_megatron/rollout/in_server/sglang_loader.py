"""How SGLang loads the weights of an update: it calls `load_sources`, by its `--custom-weight-loader` option.

Runs inside SGLang. Facts about SGLang are of 0.5.23.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch

from tepo_megatron.channel import Kept, Meeting
from tepo_megatron.rollout.in_server.inbox import Inbox

LOADER = "tepo_megatron.rollout.in_server.sglang_loader.load_sources"
MODEL_VARIABLE = "TEPO_MODEL_PATH"  # the folder that the server was started with
# instead of a source: the loader has no hook of its own for the two ends of an update, nor for a meeting or what an update
# leaves out (with their fields)
BEGIN, FINISH, JOIN, KEEP = "tepo:begin", "tepo:finish", "tepo:join", "tepo:keep"

_inbox = Inbox()  # of this process


def load_sources(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the round whose sources are the names (see `Inbox.take`); their tensors are empty. Every tensor-parallel rank takes
    all.

    BEGIN alone forgets what an earlier update gave; FINISH alone raises ValueError unless all tensors of the model's checkpoint
    were given since; JOIN with a `Meeting` joins it; KEEP with a `Kept` says what stays, and raises it where that is not here.
    A round raises it, and leaves the model as it was, if it holds a tensor that is not the model's, has not its shape, or was
    given before. SGLang ends on it.
    """
    names = [name for name, _ in named_tensors]
    if names == [BEGIN]:
        _inbox.begin(os.environ[MODEL_VARIABLE], model.config.tie_word_embeddings, next(model.parameters()).device)
    elif names == [FINISH]:
        _inbox.finish()
    elif names[:1] == [JOIN]:
        _inbox.join(Meeting(**json.loads(names[1])), next(model.parameters()).device)
    elif names[:1] == [KEEP]:
        _inbox.keep(Kept(**json.loads(names[1])))
    else:
        arrived = _inbox.take(names)
        if arrived is not None:
            model.load_weights(arrived)
