"""Run the Triton kernels on the CPU when there is no GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel module is imported


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
