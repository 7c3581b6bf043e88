"""How a dense chain is cut into programs, tiles and stages, within the shared memory of a multiprocessor.

A kernel that asks for more shared memory than a block may have does not launch, and programs that wait for one another
must all be resident. So the plan computes an upper bound of what the compiler will ask for, from what it keeps there:

  buffers    the loop over tiles is a pipeline: all that a turn loads, the tile of W2 and the base logits, exists once
             for each turn that is under way, which is one fewer than there are stages
  features   the left side of the products, for the whole loop
  exchanges  values on their way from one layout to another: the logits between the product and memory, and the
             products without tensor cores (float32), whose sum over padding rows crosses warps

Coefficients are those of Triton 3.6 and 3.9 for sm_90; the bound of a streamed W2 is 1 to 23 KB above their numbers.
"""

from dataclasses import dataclass

import torch

from dspark.kernels import triton
from dspark.kernels.markov import MarkovWeights

HELD_BATCH = 16  # requests up to which W2 may stay on chip; more of them need the registers for the race
# At 64 Triton takes warpgroup products and one program fits a multiprocessor; from the times of two shapes a tile took
# about twice what its instructions need. Why was not profiled.
MAX_BLOCK_B = 32
TILE_ELEMENTS = 32768  # of W2: 64 KB of bfloat16
FEATURE_ELEMENTS = 16384  # of a block of requests: 32 KB
HELD_ELEMENTS = 32768  # elements of W2 a program keeps in registers through the steps
INTERPRETED_PROGRAMS = 3  # the interpreter runs programs one by one; a few of them still join their words
SMALLEST_TILE = 16  # columns; tensor cores take 8 at a time, and `weight_tile` pairs them
STAGES = (4, 3, 2)  # of the loop over tiles, best first; two stages keep one tile, fewer would keep no less

H100_SHARED = 228 * 1024  # bytes of a multiprocessor
BLOCK_RESERVE = 1024  # of which the system takes this much for every resident block
REDUCTIONS = 4096  # bytes for maxima and sums across warps, and the exchange of race words


@dataclass(frozen=True)
class RaceSizes:
    """What the shared memory of a race depends on besides its cut; sizes in bytes an element.

    Attributes:
        block_r: rank, rounded up to a power of two.
        w1: of the features as they are gathered; 0 without a head.
        w2: as stored; 0 without a head.
        product: of W2 as it is multiplied; an 8-bit one is widened to float16.
        base: of the logits before the bias.
        reduced: whether columns have target ids of their own.
    """

    block_r: int
    w1: int
    w2: int
    product: int
    base: int
    reduced: bool

    @classmethod
    def of(cls, weights: MarkovWeights, base: torch.Tensor) -> "RaceSizes":
        """For a head and base logits [B, K, D]."""
        w1 = 0 if weights.w1 is None else weights.w1.element_size()
        w2 = 0 if weights.w2 is None else weights.w2.element_size()
        return cls(
            block_r=triton.next_power_of_2(max(weights.rank, 16)),
            w1=w1,
            w2=w2,
            product=2 if w2 == 1 else w2,
            base=base.element_size(),
            reduced=weights.target_ids is not None,
        )

    def shared(self, block_b: int, tile: int, stages: int, held: bool) -> int:
        """Bytes of shared memory, at most, of a program with blocks of `block_b` requests and tiles of `tile` columns.

        A `held` tile of W2 passes through on its way to the registers, once, and nothing is pipelined.
        """
        features = max(block_b, 16) * self.block_r * max(self.w1, self.product)
        if held:
            buffers = tile * self.block_r * self.product
        else:
            scales, ids = 4 * (self.w2 == 1), 8 * self.reduced
            turn = tile * (self.block_r * self.w2 + block_b * self.base + scales + ids)
            buffers = (stages - 1) * turn
        # Four bfloat16 logits are one 8-byte word; float32 ones move in four blocks, one after another.
        exchanges = (2 if self.base == 2 or self.product == 4 else 1) * block_b * tile
        if self.product == 4 and block_b < 16:
            exchanges += 4 * 16 * tile + 2 * block_b * tile
        return buffers + features + exchanges + REDUCTIONS


@dataclass(frozen=True)
class DensePlan:
    """How a chain is cut into programs."""

    persistent: bool
    block_b: int
    num_blocks: int
    block_g: int
    stride: int  # see `weight_tile`
    num_tiles: int
    num_parts: int
    held: bool  # whether a program keeps its rows of W2 on chip through all steps
    stages: int
    num_warps: int
    residents: int  # programs of one multiprocessor
    shared: int  # bytes of shared memory a program takes at most

    @classmethod
    def choose(
        cls, weights: MarkovWeights, base: torch.Tensor, persistent: bool | None, num_programs: int | None
    ) -> "DensePlan":
        """For a head and base logits [B, K, D].

        Raises:
            ValueError: a persistent chain of a head that has none, or a rank of which no tile fits on chip.
        """
        batch, _, columns = base.shape
        simple = weights.kind in ("none", "vanilla")
        if persistent is None:
            persistent = simple and base.device.type == "cuda"
        if persistent and not simple:
            raise ValueError(f"a {weights.kind} head has no persistent form: its features cost a matrix product")
        sizes = RaceSizes.of(weights, base)
        block_r, wide = sizes.block_r, 2 if sizes.w1 > 2 else 1
        block_b = min(triton.next_power_of_2(batch), MAX_BLOCK_B, max(FEATURE_ELEMENTS // wide // block_r, 16))
        residents = 2 if block_b > 16 else 1
        limit = num_programs or residents * device_programs(base.device)
        room = shared_bytes(base.device) // residents - BLOCK_RESERVE
        tile = triton.next_power_of_2(max(triton.cdiv(columns, limit), 64))
        held = (
            persistent
            and weights.rank > 0
            and batch <= HELD_BATCH
            and tile * block_r * wide <= HELD_ELEMENTS
            and sizes.shared(block_b, tile, 1, True) <= room
        )
        stages = 1
        if not held:
            tile, stages = _tile_and_stages(sizes, block_b, room)
        num_blocks = triton.cdiv(batch, block_b)
        num_tiles = triton.cdiv(columns, tile)
        parts = max(min(num_tiles, limit // num_blocks), 1)
        parts = triton.cdiv(num_tiles, triton.cdiv(num_tiles, parts))  # no more than it takes in that many rounds
        if held and batch == 1:
            parts = min(limit, columns)  # its rows need not be a power of two
        return cls(
            persistent=persistent,
            block_b=block_b,
            num_blocks=num_blocks,
            block_g=tile // 4,
            stride=min(64, tile // 2),  # the eight warps have 8 columns each of every 64, or of every 32
            num_tiles=num_tiles,
            num_parts=parts,
            held=held,
            stages=stages,
            num_warps=8,
            residents=residents,
            shared=sizes.shared(block_b, tile, stages, held),
        )


def _tile_and_stages(sizes: RaceSizes, block_b: int, room: int) -> tuple[int, int]:
    """Columns of a streamed tile, and stages: the largest tile of which `room` bytes hold two stages or more."""
    wide = 2 if sizes.w1 > 2 else 1
    tile = max(min(TILE_ELEMENTS // wide // sizes.block_r, 128), SMALLEST_TILE)
    usual = STAGES if sizes.w2 else STAGES[1:]  # base logits alone are little, and three stages cover their latency
    while True:
        for stages in usual:
            if sizes.shared(block_b, tile, stages, False) <= room:
                return tile, stages
        if tile == SMALLEST_TILE:
            raise ValueError(
                f"a head of rank {sizes.block_r} (rounded up) needs {sizes.shared(block_b, tile, 2, False)} bytes of"
                f" shared memory, and this device has {room} for a program: no kernel could be launched; use"
                " `dspark.kernels.markov.chain_ref`, or weights of fewer bytes an element"
            )
        tile //= 2


def device_programs(device: torch.device) -> int:
    """Programs that are certain to be resident at once."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor; an H100's where there is no GPU."""
    if device.type != "cuda":
        return H100_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
