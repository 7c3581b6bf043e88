"""Launches that overlap: the blocks of a kernel start where the one before it leaves room, and wait there for its end.

Saves the time between two launches and the first loads of the second (programmatic dependent launch, from sm_90 on).
The first of two kernels calls `start_next` early; the second calls `wait_for_previous` before it reads anything that
the first writes, and before it writes anything; it is launched with `launch_pdl=True`. Both do nothing unless TOGETHER.
"""

from functools import lru_cache

import torch

from dspark.kernels import tl, triton


@lru_cache(maxsize=16)
def launches_together(device: torch.device) -> bool:
    """Whether the device can do it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def start_next(TOGETHER: tl.constexpr):
    """Let the next launch begin once all blocks of this one have come here."""
    if TOGETHER:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(TOGETHER: tl.constexpr):
    """Return when the launch before has ended and its results can be read."""
    if TOGETHER:
        tl.extra.cuda.gdc_wait()
