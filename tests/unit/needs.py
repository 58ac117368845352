"""Marks for tests that need what not every machine has. A skipped one prints the reason."""

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")
