"""Entry point of the plug-in; vLLM calls `register` once in each of its processes.

What it activates depends on the vLLM release, because it reaches into vLLM: on a release that it was not checked
against it changes nothing and says so.
"""

from importlib.metadata import version

from packaging.version import Version
from vllm import __version__ as vllm_version
from vllm.logger import init_logger

from dspark.vllm.patches import V1_RELEASES, V2_RELEASES, apply_patches

# vLLM configures the loggers below its own name only; under another name the messages would not be shown.
logger = init_logger("vllm.dspark")


def register() -> None:
    """Let vLLM run DSpark drafters with this package. Safe to call more than once."""
    release = Version(vllm_version).base_version
    if release in (*V1_RELEASES, *V2_RELEASES):
        apply_patches(release)
        return
    logger.warning(
        "dspark %s was checked with vLLM %s (V1 model runner) and %s (V2), this is vLLM %s: nothing was activated."
        " vLLM's own DSpark support (V2 model runner) is not affected; on the V1 model runner --speculative-config"
        " with method dspark will be refused by vLLM. Install one of the versions above, or a newer dspark.",
        version("dspark"),
        ", ".join(V1_RELEASES),
        ", ".join(V2_RELEASES),
        vllm_version,
    )
