"""What runs on vLLM's V2 model runner, decided once from the configuration, with a reason for everything that doesn't.

    --speculative-config '{"method": "dspark", "model": ..., "draft_sample_method": "probabilistic",
                           "rejection_sample_method": "standard", "dspark_draft_topk": 64}'
    --additional-config  '{"dspark": {"w2": "fp8"}}'

`dspark_draft_topk` is vLLM's own field: the Markov head corrects k candidates of each row, and q has k entries. With a
vanilla head half of them are the best base logits and half the tokens of largest bias after the previous one, with
another head all are the best base logits. q is kept as such here, and vLLM's dense cache [max requests, K, vocabulary]
is given back. Our own options stand in vLLM's `additional_config`, under "dspark":

    w2            "checkpoint", or "fp8": the Markov head's W2 in 8 bits with a scale per row. Drafts change a little,
                  the law of the output does not
    chain         "kernels", "reference" (their definition in PyTorch, slow and without CUDA graphs), or "vllm" (vLLM's
                  own loop)
    verification  "kernels", or "vllm"
    sampling_graph  true: what stands between the target's pass and the drafter's is one CUDA graph (`v2_graph`) where a
                  step allows it; false: it is launched
    check_ranks   true: after every step all tensor-parallel ranks compare their drafts and emitted tokens

What vLLM's own loop must do (watermarks, float64 noise, the acceptance estimator) it does, where it computes the
drafter's head; it knows only the vanilla one. Any other head is then refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from dspark.config import DrafterConfig
from dspark.drafter import check_num_draft_tokens
from dspark.families.findings import CheckpointError
from dspark.families.recognise import recognise
from dspark.kernels.markov_candidates import CANDIDATES

logger = init_logger("vllm.dspark")

DTYPES = (torch.bfloat16, torch.float32)
# vLLM's name for drafters with the Qwen3 backbone, whatever wrote them; and ours, while such a drafter is built.
ARCHITECTURE = "Qwen3DSparkModel"
OUR_ARCHITECTURE = "DSparkQwen3DraftModel"
SECTION = "dspark"
W2 = Literal["checkpoint", "fp8"]
Chain = Literal["kernels", "reference", "vllm"]
Verifier = Literal["kernels", "vllm"]


@dataclass(frozen=True)
class Options:
    """`additional_config["dspark"]`; see the module docstring."""

    w2: W2 = "checkpoint"
    chain: Chain = "kernels"
    verification: Verifier = "kernels"
    sampling_graph: bool = True
    check_ranks: bool = False

    @classmethod
    def read(cls, additional_config: Any) -> "Options":
        """Options of a vLLM configuration.

        Args:
            additional_config: vLLM's field of that name; only a mapping can have our section.

        Raises:
            ValueError: an unknown option, or a value that is not one of its choices.
        """
        section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
        known = [each.name for each in fields(cls)]
        where = f'additional_config["{SECTION}"]'
        if not isinstance(section, Mapping) or set(section) - set(known):
            raise ValueError(f"{where}={section!r}: expected a mapping with some of {', '.join(known)}")
        choices = {"w2": W2, "chain": Chain, "verification": Verifier}
        for name, kind in choices.items():
            if name in section and section[name] not in get_args(kind):
                raise ValueError(
                    f"{where}: {name}={section[name]!r}; expected {' or '.join(map(repr, get_args(kind)))}"
                )
        for name in ("sampling_graph", "check_ranks"):
            if not isinstance(section.get(name, False), bool):
                raise ValueError(f"{where}: {name}={section[name]!r}; expected true or false")
        return cls(**section)


@dataclass(frozen=True)
class Plan:
    """What drafts and what verifies.

    Attributes:
        drafter: the checkpoint's record.
        options: the user's.
        probabilistic: drafts are drawn from q; else they are the largest logits and q is one-hot.
        topk: candidates of each row, None for the whole draft vocabulary.
        num_draft_tokens: K.
        chain: who walks the Markov chain.
        chain_reason: why not our kernels; empty where they run.
        verification: whose rejection sampling.
        verification_reason: why not ours; empty where it runs.
    """

    drafter: DrafterConfig
    options: Options
    probabilistic: bool
    topk: int | None
    num_draft_tokens: int
    chain: Chain
    chain_reason: str
    verification: Verifier
    verification_reason: str

    @property
    def sparse(self) -> bool:
        """Whether q is kept as top-k entries and not as a dense row."""
        return self.probabilistic and self.topk is not None and self.chain != "vllm"


def is_ours(config: VllmConfig) -> bool:
    """Whether the drafter is in a packaging that this package serves on V2; vLLM's other DSpark models are left alone.

    vLLM runs several packagings under one architecture name; which one it is stands in the checkpoint's own config.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method != "dspark" or speculative.draft_model_config is None:
        return False
    draft = speculative.draft_model_config
    if not {ARCHITECTURE, OUR_ARCHITECTURE} & set(getattr(draft.hf_config, "architectures", None) or []):
        return False
    family = _packaging(draft.model, draft.revision)
    if family:
        logger.info_once("dspark: %s is in packaging %s, which vLLM's own DSpark runs, unchanged", draft.model, family)
    return not family


@cache
def _packaging(path: str, revision: str | None) -> str:
    """Name of the checkpoint's packaging if this package knows but does not serve it; empty otherwise."""
    raw = get_hf_file_to_dict("config.json", path, revision)
    try:
        family = recognise(raw or {})
    except CheckpointError:
        return ""  # refused with everything else that is wrong with it, when it is resolved
    return "" if family.supported else family.name


def make_plan(config: VllmConfig, drafter: DrafterConfig) -> Plan:
    """Decide what runs.

    Args:
        config: vLLM's configuration, with a speculative one.
        drafter: of `dspark.vllm.requirements.resolve_drafter`.

    Raises:
        ValueError: every reason why this combination would be wrong.
    """
    speculative = config.speculative_config
    options = Options.read(config.additional_config)
    probabilistic = speculative.draft_sample_method == "probabilistic"
    topk = getattr(speculative.draft_model_config.hf_config, "dspark_draft_topk", None)
    loop_reason = _why_vllms_loop(config, drafter, options, topk)
    verification_reason = _why_vllms_verification(config, options, probabilistic, loop_reason)
    if not loop_reason and verification_reason and probabilistic and topk is not None:
        loop_reason = (
            f"top-k proposals are kept sparse, and vLLM's verification reads dense ones ({verification_reason})"
        )
    problems = _problems(config, drafter, options, loop_reason)
    if problems:
        listed = "\n".join(f"  {index}. {problem}" for index, problem in enumerate(problems, 1))
        raise ValueError(f"dspark cannot run on vLLM's V2 model runner as configured:\n{listed}")
    chain, chain_reason = ("vllm", loop_reason) if loop_reason else (options.chain, "")
    if chain == "reference":
        chain_reason = "asked for with chain='reference'"
    return Plan(
        drafter=drafter,
        options=options,
        probabilistic=probabilistic,
        topk=topk,
        num_draft_tokens=speculative.num_speculative_tokens,
        chain=chain,
        chain_reason=chain_reason,
        verification="vllm" if verification_reason else "kernels",
        verification_reason=verification_reason,
    )


def _why_vllms_loop(config: VllmConfig, drafter: DrafterConfig, options: Options, topk: int | None) -> str:
    """Why vLLM's own sampling loop must draft; empty if it need not."""
    if topk is not None and topk not in CANDIDATES and options.chain == "kernels":
        return f"dspark_draft_topk={topk}, and our kernels take {', '.join(map(str, CANDIDATES))}"
    if options.chain == "vllm":
        return "asked for with chain='vllm'"
    if getattr(config, "watermark_config", None) is not None:
        return "drafts are watermarked"
    if config.model_config.dtype not in DTYPES:
        return f"the model runs in {config.model_config.dtype}, and our kernels in bfloat16 and float32"
    if config.model_config.use_fp64_gumbel:
        return "use_fp64_gumbel asks for float64 noise"
    if config.speculative_config.enable_adaptive_verification and drafter.confidence == "none":
        return "the drafter has no confidence head, and vLLM's acceptance estimator reads the logits inside its loop"
    return ""


def _why_vllms_verification(config: VllmConfig, options: Options, probabilistic: bool, loop_reason: str) -> str:
    """Why vLLM's own rejection sampling must verify; empty if ours can."""
    method = config.speculative_config.rejection_sample_method
    if not probabilistic:
        return "drafting is greedy"
    if loop_reason:
        return f"vLLM's loop drafts: {loop_reason}"
    if method != "standard":
        return f"rejection_sample_method={method!r}"
    if options.verification == "vllm":
        return "asked for with verification='vllm'"
    return ""


def _problems(config: VllmConfig, drafter: DrafterConfig, options: Options, loop_reason: str) -> list[str]:
    """Everything that would run wrongly."""
    speculative = config.speculative_config
    problems = []
    try:
        check_num_draft_tokens(drafter, speculative.num_speculative_tokens)
    except ValueError as error:
        problems.append(str(error).replace("num_draft_tokens", "num_speculative_tokens", 1))
    if loop_reason and drafter.markov_kind != "vanilla":
        head = "no Markov head" if drafter.markov_kind == "none" else f"a {drafter.markov_kind} Markov head"
        problems.append(
            f"{loop_reason}: vLLM's own loop would have to draft, and it computes the vanilla Markov head only; this"
            f" drafter has {head}. Leave that option out"
        )
    if loop_reason and options.w2 != "checkpoint":
        problems.append(f"w2={options.w2!r} needs our kernels, but {loop_reason}")
    if options.chain == "reference" and not config.model_config.enforce_eager:
        problems.append("chain='reference' waits for the device, which a CUDA graph cannot capture: set enforce_eager")
    if options.check_ranks and config.parallel_config.enable_batch_sharded_sampling:
        problems.append(
            "check_ranks with enable_batch_sharded_sampling: each rank samples other requests, and there is nothing to"
            " compare; leave one of them out"
        )
    ranks = config.parallel_config.data_parallel_size
    if ranks != 1:
        problems.append(
            f"data_parallel_size={ranks}: the dummy steps of an idle rank would overwrite what waiting requests' drafts"
            " were drawn from, and those would be judged by another law; use 1"
        )
    revision = speculative.draft_model_config.revision
    if revision is not None:
        problems.append(
            f"revision={revision!r}: configuration and calibration of the drafter are read from the default revision,"
            " and its weights would be another's; give a folder that holds this revision, and leave revision out"
        )
    if speculative.quantization is not None:
        problems.append(
            f"quantization={speculative.quantization!r}: the drafter is served as it was stored; leave it out"
        )
    if speculative.use_local_argmax_reduction:
        problems.append("use_local_argmax_reduction: the Markov head needs the logits; leave it out")
    return problems + _layer_problems(drafter)


def _layer_problems(drafter: DrafterConfig) -> list[str]:
    """Block masks that vLLM's backbone cannot express: it has one switch, or else the rule by layer type."""
    causal = [layer.causal for layer in drafter.layers]
    if len(set(causal)) == 1 or causal == [layer.window is not None for layer in drafter.layers]:
        return []
    return [
        f"block rows of layers {[i for i, each in enumerate(causal) if each]} see earlier rows only and the others all"
        " rows; vLLM can do that only where exactly the sliding layers are causal"
    ]


def describe(plan: Plan, *, path: str, plugin: str, vllm: str, kernels: str, calibrated: bool = False) -> str:
    """What runs and what does not, in one line.

    Args:
        plan: the decision.
        path: of the drafter.
        plugin: version of this package.
        vllm: version of vLLM.
        kernels: what the chain's kernels are made of, in words; empty if they do not run.
        calibrated: whether confidences are.
    """
    drafter = plan.drafter
    markov = "none" if drafter.markov_kind == "none" else f"{drafter.markov_kind} (rank {drafter.markov_rank})"
    confidence = drafter.confidence + (", calibrated" if calibrated else "")
    layout = "anchor-first" if drafter.anchor_first else "1+N"
    candidates = "whole vocabulary" if plan.topk is None else f"{plan.topk} candidates"
    q = "one-hot q" if not plan.probabilistic else ("sparse q" if plan.sparse else "dense q")
    drafting = "probabilistic" if plan.probabilistic else "greedy"
    chain = kernels or ("PyTorch" if plan.chain == "reference" else "vLLM's loop")
    chain += f" ({plan.chain_reason})" if plan.chain_reason else ""
    verifier = "our kernels" if plan.verification == "kernels" else f"vLLM's ({plan.verification_reason})"
    notes = [note for note in drafter.notes if "dspark_draft_topk" not in note]  # it is applied here
    if plan.num_draft_tokens < drafter.max_draft_tokens:
        notes.append("vLLM runs only the rows that draft, the trainer ran all: acceptance may be lower")
    if any(layer.window is not None for layer in drafter.layers):
        notes.append("vLLM counts a sliding window from each row, the trainer from the anchor")
    return (
        f"dspark {plugin} on vLLM {vllm}, V2 model runner: {drafter.family} drafter {path}; Markov head {markov},"
        f" confidence head {confidence}; K={plan.num_draft_tokens} of {drafter.max_draft_tokens} trained,"
        f" {layout} layout; {drafting} drafting over {candidates}, {q}; chain: {chain}; verification: {verifier}"
        + "".join(f"; note: {note}" for note in notes)
    )
