"""Tests of what runs with Transformer Engine's Python, in a process of their own: `make test-te`.

The other tests' conftest hides Transformer Engine from its process, so that nothing here is collected next to them.
"""

import os
import sys

collect_ignore_glob = ["test_*.py"] if "megatron.core" in sys.modules else []

if not collect_ignore_glob:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # what a run on GPUs sets
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from tests.transformer_engine import without_cpp

    if without_cpp.is_there():
        without_cpp.import_it()
    else:
        from tepo_megatron.dist.platform import activate

        activate("cpu")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of it, with the reason, where Transformer Engine's Python is missing."""
    from tests.transformer_engine import without_cpp

    if not without_cpp.is_there():
        for item in items:
            if "transformer_engine" in item.path.parts[-2]:
                item.add_marker(pytest.mark.skip(reason=without_cpp.MISSING))
