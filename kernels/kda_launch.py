"""How KDA kernels are launched: overlap with the kernel before, and the registers that a thread may have.

On Hopper a kernel may be started while the one before it still runs ("programmatic dependent launch"). It then waits
for the end of that kernel before it reads what that kernel wrote, and until then does what does not depend on it.
"""

from typing import Any

import torch

from dspark.kernels.together import launches_together

# 0: off. 1: a kernel's launch overlaps the end of the one before. 2: so do the reading of rows and the fetching of
# states into the L2 cache, where the caller says that the kernel right before did not write the rows.
OVERLAP = 2


def launch_options(
    x: torch.Tensor, num_warps: int, registers: int | None = None, *, rows_settled: bool = False
) -> dict[str, Any]:
    """Options of a kernel launch on the device of `x`; `OVERLAP` is the kernel's own parameter."""
    overlap = min(OVERLAP, 2 if rows_settled else 1) if launches_together(x.device) else 0
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": 1, "OVERLAP": overlap}
    if overlap:
        options["launch_pdl"] = True
    if registers is not None:
        options["maxnreg"] = registers
    return options
