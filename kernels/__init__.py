"""Triton kernels, each beside its torch reference, which is the definition.

Triton is optional: without it every module here still imports, the references and the CPU paths work, and launching a
kernel raises an error that says what is missing. Kernel modules take `triton` and `tl` from here.
"""

from typing import Any


class _MissingTriton:
    """Stands in for `triton` and `triton.language`: a kernel can be defined with it, but not launched."""

    def __getattr__(self, name: str) -> "_MissingTriton":
        if name.startswith("__"):  # protocols that other libraries probe for must stay absent
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_MissingTriton":
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(
            "a Triton kernel was launched, but Triton is not installed, so there is nothing to run it: install the"
            " `triton` package (CUDA builds of PyTorch on Linux bring it along), or call the function with CPU tensors"
        )


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":  # a broken Triton is not a missing one
        raise
    triton = tl = _MissingTriton()
    HAS_TRITON = False
else:
    HAS_TRITON = True

__all__ = ["HAS_TRITON", "tl", "triton"]
