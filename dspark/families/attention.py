"""Window and causality of each drafter layer.

Inside its block a row sees every row, unless the config says otherwise; speculators' sliding layers are causal. The
window counts context before the block and is the same for all of its rows.
"""

from dspark.config import LayerConfig
from dspark.families.fields import Fields, Found, integer
from dspark.families.findings import Findings, refusal

KINDS = ("full_attention", "sliding_attention")
NO_WINDOW = "The layer would attend to context that it never saw in training."


def read_layers(backbone: Fields, drafter: Fields, num_layers: int, findings: Findings) -> tuple[LayerConfig, ...]:
    """One `LayerConfig` per layer.

    Args:
        backbone: sections with `layer_types` and `sliding_window`.
        drafter: sections with the drafter's own switches.
        num_layers: L.
        findings: receives notes.

    Raises:
        CheckpointError: layer types do not fit, a sliding layer has no window, or switches contradict one another.
    """
    kinds = _layer_types(backbone, num_layers)
    causal = drafter.flag("is_causal", "causal", "dflash_query_causal")
    all_sliding = drafter.flag("use_swa")
    if all_sliding is not None and all_sliding.value and KINDS[1] not in kinds:
        kinds = [KINDS[1]] * num_layers
        by_type = False
    else:
        non_causal = drafter.flag("sliding_window_non_causal")
        by_type = not (non_causal is not None and non_causal.value)
    window = _window(backbone, kinds) if KINDS[1] in kinds else None
    if causal is not None:
        findings.note(f"{causal} decides for every layer whether block rows see later rows")
    return tuple(
        LayerConfig(
            window=window if kind == KINDS[1] else None,
            causal=causal.value if causal is not None else by_type and kind == KINDS[1],
        )
        for kind in kinds
    )


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    found = next(iter(fields.all("layer_types")), None)  # the drafter's own list beats one copied from the target
    if found is None:
        return [KINDS[0]] * num_layers
    kinds = found.value
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise refusal(
            f"{found.key} has {len(kinds) if isinstance(kinds, list) else kinds!r} entries",
            f"one for each of the {num_layers} layers",
            f"{NO_WINDOW} Correct layer_types or num_hidden_layers.",
        )
    unknown = sorted({str(kind) for kind in kinds} - set(KINDS))
    if unknown:
        raise refusal(
            f"{found.key} contains {', '.join(unknown)}",
            " or ".join(KINDS),
            "The layer would be run as another kind of layer. Other layer types are not supported.",
        )
    return kinds


def _window(fields: Fields, kinds: list[str]) -> int:
    # An own key of the drafter beats `sliding_window`, which may be a copy of the target's.
    found = next(iter(fields.all("swa_window_size") or fields.all("sliding_window")), None)
    if found is None:
        index = kinds.index(KINDS[1])
        found = Found(f"layer {index}: sliding_window", None)
    return integer(found, 1, NO_WINDOW)
