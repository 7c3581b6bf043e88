"""The canonical record of a DSpark drafter: what every checkpoint packaging resolves to.

Packagings spell the same facts differently (layer taps off by one, block layout implied or stated, dimensions nested
or not). `dspark.families` reads those spellings once; everything after loading reads a `DrafterConfig` and never raw
JSON.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # owner/name, how drafters on the Hub are named

MarkovKind = Literal["none", "vanilla", "gated", "rnn"]
ConfidenceKind = Literal["none", "hidden", "hidden+markov"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the drafter, neox halves over the whole head.

    `rope_type` is a name of transformers' `ROPE_INIT_FUNCTIONS` or "default"; `scaling` holds that type's own
    parameters.
    """

    theta: float
    rope_type: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict, hash=False)  # part of ==, which is enough for a hash


@dataclass(frozen=True)
class LayerConfig:
    """Attention of one drafter layer.

    `window`: None, or the number of context positions before the anchor that the block sees; all rows of the block
    share that range, as in the trainer. `causal`: row k sees rows 0..k of its block only; otherwise every row sees
    every row.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter, fully resolved.

    `tap_ids` index Hugging Face `hidden_states`: 0 is the embedding output, k the raw output of decoder layer k-1
    (also for the last layer, where Hugging Face itself would return the normed state). `vocab_size` counts input
    embedding and `markov_w1` rows, `draft_vocab_size` the rows of the output head. `block_size` is the number of rows
    the drafter was trained with. With `anchor_first` row 0 predicts the token after the anchor; otherwise row 0 only
    re-states the anchor ("1+N") and row 1 predicts. `notes` are the choices that loading made where the checkpoint
    left something open.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    anchor_first: bool
    mask_token_id: int
    tap_ids: tuple[int, ...]
    target_hidden_size: int
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    markov_kind: MarkovKind = "vanilla"
    markov_rank: int = 0
    confidence: ConfidenceKind = "none"
    owns_embedding: bool = True
    owns_head: bool = True
    attention_bias: bool = False
    num_target_layers: int | None = None
    verifier_name: str | None = None
    logit_scale: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def max_draft_tokens(self) -> int:
        """Largest K: every row drafts in the anchor-first layout, all but row 0 in 1+N."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def first_draft_row(self) -> int:
        """Block row that predicts the token right after the anchor."""
        return 0 if self.anchor_first else 1

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether draft ids need the `d2t` table to become target ids."""
        return self.draft_vocab_size < self.vocab_size
