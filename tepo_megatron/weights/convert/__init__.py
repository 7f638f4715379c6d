"""Conversion of checkpoints on disk: Hugging Face directories <-> Megatron-Core's distributed checkpoints (torch_dist).

One tensor group at a time, on a CPU, without a model in memory: `importing` and `exporting` stream through a `plan`, which a
GPTModel on the meta device gives; `verify` proves a conversion, `inspecting` tells what a directory holds. A Megatron
checkpoint carries config, generation config and tokenizer in its folder `hf/`, so that it can be exported without its origin.
"""

# The folder of a Megatron checkpoint that holds what belongs to Hugging Face.
HF_FOLDER = "hf"
