"""Everything that the plug-in changes in vLLM, each patch with its reason.

On the releases of V1_RELEASES the V1 model runner learns DSpark (patches 1 to 5). On those of V2_RELEASES the V2
runner, which has a DSpark of its own, drafts, verifies and replays KDA layers with our kernels (patches 6 to 9). With
another speculative method each patched function returns what vLLM's own returns.
"""

import sys
from functools import partial, wraps
from typing import Any

import torch
from vllm.config import VllmConfig

V1_RELEASES = ("0.32.0",)
V2_RELEASES = ("0.33.0",)
METHOD = "dspark"
# The words with which vLLM refuses the method on the V1 model runner.
REFUSAL = "dspark speculative decoding"
_MARK = "_patched_by_dspark"


def apply_patches(release: str) -> None:
    """Apply what belongs to a release, once per process; the patches of modules that are heavy to import come later,
    when a runner is about to be built.

    Args:
        release: vLLM's version without build suffix, one of V1_RELEASES or V2_RELEASES.
    """
    if hasattr(VllmConfig, _MARK):
        return
    setattr(VllmConfig, _MARK, True)
    if release in V1_RELEASES:
        _patch_unsupported_features()
        _patch_runner_choice()
    if release in V2_RELEASES:
        _patch_v2_configuration()
        _patch_graph_sizes()
        _patch_v2_runner_choice()


def _uses_method(config: VllmConfig) -> bool:
    return config.speculative_config is not None and config.speculative_config.method == METHOD


def _patch_unsupported_features() -> None:
    """1. The V1 runner no longer counts DSpark as unsupported, and the configuration is checked in its place.

    This runs while the configuration is built, in the process that the user started, before any model is loaded.
    """
    vllms_own = VllmConfig._get_v1_model_runner_unsupported_features

    @wraps(vllms_own)
    def unsupported_features(self: VllmConfig) -> list[str]:
        unsupported = vllms_own(self)
        if _uses_method(self):
            # Imports the library, for which processes with another method need not wait.
            from dspark.vllm.requirements import check_configuration

            check_configuration(self)
            unsupported = [feature for feature in unsupported if feature != REFUSAL]
        return unsupported

    VllmConfig._get_v1_model_runner_unsupported_features = unsupported_features


def _patch_runner_choice() -> None:
    """2. Where the choice falls on the V1 runner, it gets our proposer (3) and two repairs (4, 5).

    Every process asks this property before it builds a runner. Patching its modules here, and not on loading the
    plug-in, keeps their import out of processes that run another method.
    """
    vllms_own = VllmConfig.use_v2_model_runner.fget
    assert vllms_own is not None

    @wraps(vllms_own)
    def use_v2_model_runner(self: VllmConfig) -> bool:
        use_v2 = vllms_own(self)
        if not use_v2 and _uses_method(self):
            _patch_runner_module()
            _patch_verification()
            _patch_seeded_chunks()
        return use_v2

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)


def _patch_runner_module() -> None:
    """3. The V1 runner builds our proposer for DSpark.

    Its constructor sends every method that reads target states, DSpark too, to `EagleProposer`. The name is replaced,
    in that module only, by a subclass that adds nothing for other methods.
    """
    from vllm.v1.worker import gpu_model_runner as module

    if hasattr(module, _MARK):
        return
    setattr(module, _MARK, True)
    vllms_own = module.EagleProposer

    class EagleOrDSparkProposer(vllms_own):  # type: ignore[misc, valid-type]
        def __new__(cls, vllm_config: VllmConfig, device: Any, runner: Any = None) -> Any:
            if _uses_method(vllm_config):
                from dspark.vllm.v1 import DSparkProposer

                return DSparkProposer(vllm_config, device, runner)
            return super().__new__(cls)

    module.EagleProposer = EagleOrDSparkProposer


def _patch_verification() -> None:
    """4. Temperature, top-k and top-p reach the verification of sampled requests on a CPU.

    There `expand_batch_to_tokens` returns memory that was never written: its fallback for machines without Triton fills
    an int64 copy of the buffer and drops it. Any sampled request, with any speculative method, then gets tokens from
    another distribution (https://github.com/vllm-project/vllm/issues/55005, open). Greedy requests do not come here.
    """
    from vllm.v1.sample import rejection_sampler as module

    module.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """One value per draft token from one per request, as vLLM's function of this name promises.

    Args:
        x: [B], any type.
        cu_num_tokens: [B], number of draft tokens of the requests up to and including each.
        num_tokens: T, their sum.
        replace_from: a value of x to be replaced.
        replace_to: its replacement.

    Returns:
        [T], of x's type.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _patch_seeded_chunks() -> None:
    """5. On a CPU a seeded request survives a prompt that is processed in chunks, and keeps its numbers.

    The runner samples unfinished prompts too, drops the token, and rewinds the request's generator by an offset, which
    CPU generators do not have: the engine stops with "CPU Generator does not use offset", with or without speculation.
    Here the generators of unfinished prompts are out of reach while tokens are sampled, and nothing is to be rewound.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not current_platform.is_cpu() or hasattr(GPUModelRunner.sample_tokens, _MARK):
        return
    vllms_own = GPUModelRunner.sample_tokens

    @wraps(vllms_own)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators = self.input_batch.generators
        unfinished = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        held = {row: generators.pop(row) for row in unfinished if row in generators}
        try:
            return vllms_own(self, grammar_output)
        finally:
            generators.update(held)

    setattr(sample_tokens, _MARK, True)
    GPUModelRunner.sample_tokens = sample_tokens


def _patch_v2_configuration() -> None:
    """6. A configuration for the V2 runner is checked before any model is loaded.

    vLLM checks neither the kind of head nor the block width, and would find a gated or recurrent head only when its
    tensors do not fit. This runs in the process that the user started.
    """
    vllms_own = VllmConfig._validate_v2_model_runner

    @wraps(vllms_own)
    def validate_v2_model_runner(self: VllmConfig) -> None:
        vllms_own(self)
        if _uses_method(self):
            # Imports the library, for which processes with another method need not wait.
            from dspark.vllm.requirements import check_v2_configuration

            check_v2_configuration(self)

    VllmConfig._validate_v2_model_runner = validate_v2_model_runner


def _patch_graph_sizes() -> None:
    """9. Every step of decoding runs in a CUDA graph, however many requests it has.

    A step has K + 1 tokens a request, and vLLM captures up to 512 tokens: with K = 8 the 57th request sends every step
    to the layers one by one. Whoever names sizes (`cudagraph_capture_sizes`, `max_cudagraph_capture_size`) gets those.
    """
    vllms_own = VllmConfig._set_cudagraph_sizes

    @wraps(vllms_own)
    def set_cudagraph_sizes(self: VllmConfig) -> None:
        compilation = self.compilation_config
        named = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
        vllms_own(self)
        if named or not _uses_method(self) or not compilation.cudagraph_capture_sizes:
            return
        scheduler = self.scheduler_config
        width = self.speculative_config.num_speculative_tokens + 1
        sizes = compilation.cudagraph_capture_sizes
        wider = wider_graph_sizes(sizes[-1], width, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if wider:
            compilation.max_cudagraph_capture_size = None
            compilation.cudagraph_capture_sizes = [*sizes, *wider]
            vllms_own(self)

    VllmConfig._set_cudagraph_sizes = set_cudagraph_sizes


def wider_graph_sizes(captured: int, width: int, max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Tokens of further graphs: those of every 8th number of requests above `captured` tokens, of every 32nd above 256.

    Args:
        captured: tokens of vLLM's largest graph.
        width: K + 1, tokens of a request.
        max_num_seqs: most requests of a step; a size of its own.
        max_num_tokens: most tokens of a step.
    """
    most = min(max_num_seqs, max_num_tokens // width)
    requests = {*range(8, min(most, 256) + 1, 8), *range(288, most + 1, 32), most}
    return sorted(number * width for number in requests if number * width > captured)


def _patch_v2_runner_choice() -> None:
    """7. Where a worker chooses the V2 runner, that runner builds our speculator and our rejection sampler, samples in
    CUDA graphs, and its adaptive verification reckons with the time of whole steps.

    The runner's module has all three under names of its own, which are replaced by functions that fall back to vLLM's
    for everything that is not ours. Only workers have `gpu_worker` imported when they ask; other processes ask too, and
    need not import a runner for it.
    """
    vllms_own = VllmConfig.use_v2_model_runner.fget
    assert vllms_own is not None

    @wraps(vllms_own)
    def use_v2_model_runner(self: VllmConfig) -> bool:
        use_v2 = vllms_own(self)
        if use_v2 and _uses_method(self) and "vllm.v1.worker.gpu_worker" in sys.modules:
            patch_v2_runner_module()
            from dspark.vllm.kda_choice import prepare_kda_layers

            prepare_kda_layers(self)  # 8. KDA layers of the target replay their step with our kernels
        return use_v2

    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)


def patch_v2_runner_module() -> None:
    """The second half of 7."""
    from vllm.v1.worker.gpu import model_runner as module

    if hasattr(module, _MARK):
        return
    setattr(module, _MARK, True)
    from dspark.vllm.v2 import make_rejection_sampler, make_speculator
    from dspark.vllm.v2_adaptive import make_manager
    from dspark.vllm.v2_graph import sampling_in_graphs

    module.init_speculator = partial(make_speculator, module.init_speculator)
    module.RejectionSampler = partial(make_rejection_sampler, module.RejectionSampler)
    name = "maybe_create_adaptive_verification_manager"
    setattr(module, name, partial(make_manager, getattr(module, name)))
    module.GPUModelRunner.sample = sampling_in_graphs(module.GPUModelRunner.sample)
