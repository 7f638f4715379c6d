"""Set before torch is loaded: one thread a process, and the CPU platform with Megatron-Core imported once for all worlds."""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait must not spin: the ranks of a world share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers refuses threads after a fork, with a warning

from tepo_megatron.platform import activate

activate("cpu")

# A shell starts its background jobs with SIGINT ignored, and so would be every child: some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)
