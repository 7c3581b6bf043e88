"""Muon for many small matrices: the same update as `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, one
batched product for all matrices of a shape.

A drafter has some twenty matrices of five shapes; one after the other their Newton-Schulz products are five hundred
launches of microseconds each, a tenth of a training step.

Source: K. Jordan, Muon (the quintic iteration and its coefficients); the factor on the learning rate is that of
Moonshot's "Muon is scalable for LLM training".
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz towards U V^T of each matrix: [n, rows, columns] -> the same shape, bfloat16."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class BatchedMuon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; every parameter is a matrix and has a gradient at every step."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        """As `torch.optim.Muon`."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters from their gradients."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                buffers = [self._momentum(parameter) for parameter in parameters]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                directions = orthogonalise(torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"])))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_(parameters, list(directions.to(parameters[0].dtype).unbind()), alpha=-scale)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]
