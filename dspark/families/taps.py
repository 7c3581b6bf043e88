"""Which target states the drafter reads, as Hugging Face `hidden_states` indices.

Trainers count differently: DeepSpec's id x is the output of layer x (-1 the embedding), speculators' id x is the
`hidden_states` index itself. Off by one, a drafter still runs and loses a part of its acceptance, which no shape
reveals.
"""

from itertools import pairwise

from dspark.families.fields import Fields, Found, integers
from dspark.families.findings import refusal

LAYER_OUTPUT_KEYS = ("target_layer_ids", "dspark_target_layer_ids")
INDEX_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
GUESSED = "Engines would guess layers, and the drafter would read states it was not trained on."


def read_taps(fields: Fields) -> tuple[int, ...]:
    """Canonical tap ids, from whichever of the two conventions the config uses.

    Raises:
        CheckpointError: no ids, ids that are not strictly increasing integers, or two lists that name different states.
    """
    outputs, indices = fields.find(*LAYER_OUTPUT_KEYS), fields.find(*INDEX_KEYS)
    if outputs is None and indices is None:
        raise refusal(
            f"{LAYER_OUTPUT_KEYS[0]} is missing (also looked for {', '.join((*LAYER_OUTPUT_KEYS[1:], *INDEX_KEYS))})",
            "a list of target layers",
            f"{GUESSED} Add the list the drafter was trained with.",
        )
    taps = None if outputs is None else _checked(outputs, offset=1)
    if indices is None:
        assert taps is not None
        return taps
    by_index = _checked(indices, offset=0)
    if taps is not None and taps != by_index:
        raise refusal(
            f"{outputs} and {indices}",
            f"aux ids one more than the layer ids, that is {list(taps)}",
            "The two lists name different states of the target. Remove the wrong one.",
        )
    return by_index


def _checked(found: Found, offset: int) -> tuple[int, ...]:
    ids = integers(found, GUESSED)
    if any(earlier >= later for earlier, later in pairwise(ids)):
        raise refusal(
            str(found),
            "strictly increasing ids",
            "Features are concatenated in this order; engines that capture in layer order would permute them.",
            "Sort the list only if the drafter was trained with the sorted order.",
        )
    if ids[0] + offset < 0:
        raise refusal(str(found), f"ids >= {-offset} ({-offset} is the embedding output)", GUESSED, "Correct the list.")
    return tuple(layer + offset for layer in ids)
