"""Set before torch is loaded: one thread a process, and the CPU platform with Megatron-Core imported once for all worlds."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait must not spin: the ranks of a world share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers refuses threads after a fork, with a warning

from tepo_megatron.platform import activate

activate("cpu")
