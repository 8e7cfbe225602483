"""What holds for every test: those marked ``gpu`` are skipped where there is none."""

import pytest
import torch


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
