"""Whether a target's KDA layers run our kernels; decided from the configuration, without importing a model of vLLM.

--use-replayssm --speculative-config '{"method": "dspark", ...}'      ours, where vLLM has Triton kernels
--additional-config '{"dspark_kda": "vllm"}'                          vLLM's own all the same, for comparison
"""

import sys
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger("vllm.dspark")

OPTION = "dspark_kda"
METHOD = "dspark"
ARCHITECTURES = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")
WORKER_MODULE = "vllm.v1.worker.gpu_worker"


def wants_our_kernels(config: Any) -> bool:
    """Whether KDA layers of this configuration run our kernels where vLLM would run RecoverSSM's Triton kernels.

    Raises:
        ValueError: the option is neither "kernels" nor "vllm".
    """
    extra = config.additional_config
    choice = extra.get(OPTION, "kernels") if isinstance(extra, dict) else "kernels"
    if choice not in ("kernels", "vllm"):
        raise ValueError(
            f"additional_config: {OPTION}={choice!r}; expected 'kernels' (verify and commit of dspark) or 'vllm' (its"
            " own)"
        )
    uses_method = config.speculative_config is not None and config.speculative_config.method == METHOD
    return choice == "kernels" and uses_method and config.cache_config.use_kda_recoverssm


def prepare_kda_layers(config: Any) -> None:
    """Replace the KDA layer classes before the target is built, or say why its states are not replayed.

    Only in the process that runs the model: the others ask for the runner too, and need not import a model.
    """
    model = config.model_config
    if WORKER_MODULE not in sys.modules or model is None or model.architecture not in ARCHITECTURES:
        return
    if wants_our_kernels(config) and current_platform.is_cuda():
        from dspark.vllm.kda import replace_layers

        replace_layers()
    elif not config.cache_config.use_replayssm:
        states = 1 + config.num_speculative_tokens
        logger.info_once(
            "dspark: %s keeps %d recurrent states for each request, one per draft token, because --use-replayssm is not"
            " given; with it one is kept, and a step's inputs are replayed up to the last accepted token",
            model.architecture,
            states,
        )
