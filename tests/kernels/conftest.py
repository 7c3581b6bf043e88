"""Poison what a kernel must overwrite, so that a cell it forgets to write is seen."""

import pytest
import torch


def poisoned(allocate):
    def allocate_and_fill(*args, **kwargs):
        out = allocate(*args, **kwargs)
        if out.dtype == torch.bool:
            return out.fill_(True)
        return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)

    return allocate_and_fill


@pytest.fixture
def on_device(device):
    """Tensors are made on the device unless a test says otherwise."""
    with torch.device(device):
        yield


@pytest.fixture(autouse=True)
def poison_empty(monkeypatch):
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
