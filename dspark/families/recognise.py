"""Which packaging a checkpoint is, by its config and tensor names; the first that fits in a fixed order.

`architectures` alone decides nothing: `DSparkDraftModel` is used by three unrelated packagings. Packagings that are
known but not implemented are refused by name, because a loader that tries its luck with them builds a drafter that
runs and is never accepted.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dspark.families.fields import section
from dspark.families.findings import CheckpointError, refusal

DEEPSPEC_ARCHITECTURES = frozenset({"Qwen3DSparkModel", "LingDSparkModel", "Qwen3OmniDSparkModel"})
BUNDLED_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")


@dataclass(frozen=True)
class Traits:
    """What recognition looks at: the config, and stored tensor names (empty where the weights are not read yet)."""

    raw: Mapping[str, Any]
    names: frozenset[str]

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type") or "")

    @property
    def architectures(self) -> frozenset[str]:
        value = self.raw.get("architectures")
        return frozenset(map(str, value)) if isinstance(value, list) else frozenset()

    def is_one_of(self, *names: str) -> bool:
        """Whether `model_type` or one of the architectures is among the names."""
        return not (self.architectures | {self.model_type}).isdisjoint(names)

    def has_tensor_under(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self.names)


@dataclass(frozen=True)
class Family:
    """A packaging. `lacking` says what this library would need to run it; empty for supported ones."""

    name: str
    matches: Callable[[Traits], bool]
    lacking: str = ""

    @property
    def supported(self) -> bool:
        return not self.lacking


def _is_bundled_v4(traits: Traits) -> bool:
    stated = any(traits.raw.get(key) is not None for key in BUNDLED_KEYS)
    return stated and (
        traits.model_type in {"deepseek_v4", "deepseek_v41"} or traits.has_tensor_under("mtp.0.main_proj.")
    )


def _is_specforge(traits: Traits) -> bool:
    projector = section(traits.raw, "dflash_config").get("projector_type")
    return traits.model_type == "qwen3" and (projector == "dspark" or "DSparkDraftModel" in traits.architectures)


def _is_nemotron(traits: Traits) -> bool:
    raw = traits.raw
    return (
        traits.model_type == "qwen3"
        and raw.get("has_embed_tokens") is True
        and raw.get("has_lm_head") is False
        and section(raw, "quantization_config").get("quant_algo") == "W4A16_NVFP4"
        and raw.get("target_layer_ids") is not None
        and raw.get("eagle_aux_hidden_state_layer_ids") is not None
        and raw.get("sample_from_anchor") is False
    )


BUNDLED = (
    "this is a target model with an embedded drafter; pass it as the target. Its drafter (latent attention, "
    "mixture of experts, hyper-connections) is not implemented"
)
FAMILIES = (
    Family("DeepSeek-V4 bundled", _is_bundled_v4, BUNDLED),
    Family(
        "MiniMax-M3.1",
        lambda it: (
            it.is_one_of("DSparkMiniMaxDraftModel")
            or it.has_tensor_under("language_model.model.dspark.", "model.dspark.", "dspark.")
        ),
        "its nested tensor layout and offset norms are not implemented",
    ),
    Family("speculators", lambda it: it.raw.get("speculators_model_type") is not None),
    Family(
        "K3 MLA",
        lambda it: it.is_one_of("k3_dspark", "K3DSparkModel"),
        "multi-head latent attention with interleaved rotary embedding is not implemented",
    ),
    Family(
        "Muse Spark",
        lambda it: it.is_one_of("muse_spark_dspark", "MuseSparkDSparkModel"),
        "gated attention, weightless head norms and the per-layer context norm are not implemented",
    ),
    Family(
        "DeepSpec Gemma4",
        lambda it: it.is_one_of("gemma4_text", "gemma4_unified_text", "Gemma4DSparkModel"),
        "scaled embeddings, shared key/value projections and capped logits are not implemented",
    ),
    Family(
        "Qwen3.5-native",
        lambda it: it.is_one_of("qwen3_5", "Qwen35DSparkModel") or it.raw.get("enable_qwen35_gated_q_proj") is True,
        "gated queries, offset norms and partial rotary are not implemented",
    ),
    Family("LFM2", lambda it: it.is_one_of("Lfm2DSparkDraftModel"), "interleaved rotary embedding is not implemented"),
    Family("SpecForge", _is_specforge, "its field layout has not been checked against its trainer"),
    Family("Nemotron-3.5", _is_nemotron, "attention sinks and NVFP4 weights are not implemented"),
    Family("DeepSpec Qwen3", lambda it: it.model_type == "qwen3" and it.is_one_of(*DEEPSPEC_ARCHITECTURES)),
)


def recognise(raw: Mapping[str, Any], names: Iterable[str] = ()) -> Family:
    """The family of a checkpoint.

    Args:
        raw: parsed config.json.
        names: stored tensor names, where known; a few packagings can only be told by them.

    Raises:
        CheckpointError: nothing matches, so this is no DSpark drafter that is known here.
    """
    traits = Traits(raw, frozenset(names))
    for family in FAMILIES:
        if family.matches(traits):
            return family
    raise _unknown(traits)


def refuse_unsupported(family: Family) -> None:
    """Refuse a family that is known but not implemented (CheckpointError naming it and what is missing)."""
    if not family.supported:
        names = " and ".join(f'"{known.name}"' for known in FAMILIES if known.supported)
        raise refusal(
            f'recognised as packaging "{family.name}": {family.lacking}',
            f"{names}, the supported packagings",
            "Loaded as one of those it would run and hardly ever be accepted.",
            "Use a drafter in a supported packaging for this target.",
        )


def _unknown(traits: Traits) -> CheckpointError:
    stated = f"model_type={traits.model_type!r}, architectures={sorted(traits.architectures)}"
    markov = [name for name in traits.names if "markov" in name]
    if traits.architectures & DEEPSPEC_ARCHITECTURES:
        return refusal(
            f"architectures={sorted(traits.architectures)} with model_type={traits.model_type!r}",
            "model_type='qwen3', the backbone of DeepSpec's Qwen3 drafters",
            "Another backbone's weights would be run through Qwen3 layers. Check which trainer wrote this checkpoint.",
        )
    if any(traits.raw.get(key) is not None for key in BUNDLED_KEYS):
        return refusal(
            f"not a standalone DSpark drafter: {stated}, but it has dspark_* keys",
            "the drafter's own folder",
            "Only the target's tensors would be found here.",
            "If this is a target model with an embedded drafter, pass it as the target.",
        )
    found = f"Markov tensors {markov[:3]} in an unknown packaging" if markov else "no Markov head found"
    return refusal(
        f"not a DSpark drafter: {stated}, {found}",
        'a DeepSpec Qwen3 config (model_type "qwen3", architectures ["Qwen3DSparkModel"]) or a speculators config '
        '(speculators_model_type "dspark")',
        "A plain DFlash, EAGLE-3 or MTP drafter has other inputs and other heads.",
        "Pass a DSpark drafter; if the repository keeps it in a subfolder such as dspark/, pass that folder.",
    )
