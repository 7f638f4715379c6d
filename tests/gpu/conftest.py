"""Tests on a GPU, in a process of their own: `python -m pytest tests/gpu --confcutdir=tests/gpu`.

The other tests' conftest hides GPUs from its process, and so nothing here is collected beside them, nor where there is no GPU.
Without one the kernels run in Triton's interpreter: tests/unit/test_triton_interpreter.py.
"""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
