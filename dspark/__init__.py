"""Speculative decoding with DSpark drafters.

A drafter proposes a block of tokens from the target model's own hidden states, the target verifies the block in one
pass, and rejection sampling keeps the output distribution exactly the target's.
"""

__version__ = "0.1.0"
