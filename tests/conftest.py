"""Set before torch is loaded: one thread a process, and the CPU platform with Megatron-Core imported once for all worlds."""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait must not spin: the ranks of a world share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers refuses threads after a fork, with a warning

from hypothesis import HealthCheck, settings

from tepo_megatron.platform import activate

activate("cpu")

# The same examples in every run, and none fails for the time that it takes: others may use this machine.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A shell starts its background jobs with SIGINT ignored, and so would be every child: some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)
