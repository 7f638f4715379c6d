"""Convert checkpoints on disk: Hugging Face directories <-> Megatron-Core's distributed checkpoints (torch_dist).

A conversion runs on a CPU, without a model in memory: `importing` and `exporting` stream parameter by parameter through a
`plan`, which a GPTModel on the meta device provides. `verify` checks a conversion, and `dist_reader` describes what a directory
holds. A Megatron checkpoint carries config, generation config and tokenizer in its folder `hf/`, so it can be exported without
the model that it was imported from.
"""

# The folder of a Megatron checkpoint that holds the files of the Hugging Face model other than weights.
HF_FOLDER = "hf"
