"""How a dense chain is cut into programs, tiles and stages, within the shared memory of a multiprocessor.

A kernel that asks for more shared memory than a block may have does not launch, and programs that wait for one another
must all be resident. So the plan computes an upper bound of what the compiler will ask for, from what it keeps there:

  buffers    the loop over tiles is a pipeline: all that a turn loads, the tile of W2 and the base logits, exists once
             for each stage; without warpgroup products, which read their operands there, once less
  features   the left side of the products, for the whole loop
  exchanges  values on their way from one layout to another: the logits between the product and memory, and an 8-bit W2
             between memory and the product

Coefficients are those of Triton 3.6 and 3.9 for sm_90.
"""

from dataclasses import dataclass

import torch

from dspark.kernels import triton
from dspark.kernels.markov import GROUP, MarkovWeights

FEW = 16  # requests of the narrowest product; more of them take the 64 rows of warpgroup products, or 128
# Each program of a narrow product reads the words of all others, in a block of a power of two of them: for more
# requests than this a few programs less, each with a few tiles more, cost less than a block twice as wide.
READ_AS_ONE = 8
TILE_ELEMENTS = 32768  # of W2: 64 KB of bfloat16
HELD_ELEMENTS = 32768  # elements of W2 a program keeps in registers through the steps

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
    """

    block_r: int
    w1: int
    w2: int
    product: int
    base: int

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
        )

    def shared(self, block_b: int, tile: int, stages: int, held: bool) -> int:
        """Bytes of shared memory, at most, of a program with blocks of `block_b` requests and tiles of `tile` columns.

        A `held` tile of W2 passes through on its way to the registers, once, and nothing is pipelined.
        """
        features = block_b * self.block_r * max(self.w1, self.product)
        exchanges = (2 if self.base == 2 or self.product == 4 else 1) * block_b * tile
        if held:
            return tile * self.block_r * self.product + features + exchanges + REDUCTIONS
        turn = tile * (self.block_r * self.w2 + block_b * self.base + 4 * (self.w2 == 1))
        if block_b == FEW or self.product == 4:
            return (stages - 1) * turn + features + exchanges + REDUCTIONS
        # Warpgroup products leave their logits where they are; an 8-bit W2 passes through once more, widened.
        widened = tile * self.block_r * self.product if self.w2 == 1 else 0
        moved = exchanges if self.base > 2 else 0
        return stages * turn + features + max(widened, moved)


@dataclass(frozen=True)
class DensePlan:
    """How a chain is cut into programs."""

    block_b: int
    num_blocks: int
    tile: int  # columns
    wide: int  # warps side by side along the columns of a product
    span: int  # neighbouring tiles of a program, four groups of columns or one tile
    num_spans: int
    groups_each: int  # of a program, at most
    num_parts: int  # programs of a block of requests
    held: bool  # whether a program keeps its rows of W2 on chip through all steps
    alone: bool  # held, by the kernel for one request
    stages: int
    num_warps: int
    residents: int  # programs of one multiprocessor
    shared: int  # bytes of shared memory a program takes at most

    @property
    def halves(self) -> bool:
        """Whether a warp has only half of a group of columns: it sums that, and halves meet in the race."""
        return not self.held and 2 * self.tile // self.wide == GROUP

    @classmethod
    def choose(cls, weights: MarkovWeights, base: torch.Tensor, num_programs: int | None) -> "DensePlan":
        """For a head and base logits [B, K, D].

        Raises:
            ValueError: a rank of which no tile fits on chip, or more requests than the device can draft together.
        """
        batch, _, columns = base.shape
        sizes, room = RaceSizes.of(weights, base), shared_bytes(base.device)
        block_b = FEW if batch <= FEW else 64 if batch <= 64 else 128
        alone = num_programs or device_programs(base.device, 1)
        tile = triton.next_power_of_2(max(triton.cdiv(columns, alone), 4 * GROUP))
        held = (
            weights.kind == "vanilla"
            and batch <= FEW
            and tile * sizes.block_r * sizes.product <= 2 * HELD_ELEMENTS
            and sizes.shared(block_b, tile, 1, True) + BLOCK_RESERVE <= room
        )
        stages = residents = 1
        if held and batch == 1:
            return cls._alone(sizes, columns, alone)
        if not held:
            block_b, tile, stages, residents = _streamed(sizes, block_b, room)
        limit = num_programs or device_programs(base.device, residents)
        span = max(4 * GROUP // tile, 1)
        num_blocks, num_spans = triton.cdiv(batch, block_b), triton.cdiv(columns, tile * span)
        if not (num_programs or held) and READ_AS_ONE < batch <= FEW:
            limit = fewer_programs(limit, num_spans)
        if num_blocks > limit:
            raise ValueError(
                f"{batch} requests are {num_blocks} blocks of {block_b}, and {limit} programs run at once: they wait"
                " for one another, so that all must run; draft fewer requests at a time"
            )
        spans_each = triton.cdiv(num_spans, min(num_spans, limit // num_blocks))
        num_warps = 4 if block_b == 64 else 8
        return cls(
            block_b=block_b,
            num_blocks=num_blocks,
            tile=tile,
            wide=min(num_warps, tile // 16) if block_b == FEW else 1,
            span=span,
            num_spans=num_spans,
            groups_each=spans_each * span * tile // GROUP,
            num_parts=triton.cdiv(num_spans, spans_each),
            held=held,
            alone=False,
            stages=stages,
            num_warps=num_warps,
            residents=residents,
            shared=sizes.shared(block_b, tile, stages, held),
        )

    @classmethod
    def _alone(cls, sizes: RaceSizes, columns: int, programs: int) -> "DensePlan":
        """One request; a program has some groups of columns, which need not be a power of two."""
        groups = triton.cdiv(columns, GROUP)
        each = triton.cdiv(groups, programs)
        parts, tile = triton.cdiv(groups, each), triton.next_power_of_2(each) * GROUP
        return cls(
            block_b=1, num_blocks=1, tile=tile, wide=1, span=1, num_spans=parts, groups_each=each, num_parts=parts,
            held=True, alone=True, stages=1, num_warps=8, residents=1, shared=sizes.shared(1, tile, 1, True),
        )  # fmt: skip


def _streamed(sizes: RaceSizes, block_b: int, room: int) -> tuple[int, int, int, int]:
    """Requests of a block, columns of a tile, stages and programs of a multiprocessor, for a W2 that is streamed."""
    few = [(FEW, max(min(TILE_ELEMENTS // sizes.block_r, 128), GROUP), 1), (FEW, 64, 1), (FEW, 32, 1)]
    more = [] if block_b == FEW else [(block_b, 64, 2), (block_b, 32, 2), (block_b, 64, 1), (block_b, 32, 1)]
    if block_b > 64:
        del more[1]  # half a tile for as many rows of features costs more than a second program hides
    for least in (3, 2):
        for block, tile, residents in more + few:
            for stages in range(4, least - 1, -1):
                if residents * (sizes.shared(block, tile, stages, False) + BLOCK_RESERVE) <= room:
                    return block, tile, stages, residents
    raise ValueError(
        f"a head of rank {sizes.block_r} (rounded up) needs {sizes.shared(FEW, 32, 2, False)} bytes of shared memory,"
        f" and this device has {room - BLOCK_RESERVE} for a program: no kernel could be launched; use"
        " `dspark.kernels.markov.chain_ref`, or weights of fewer bytes an element"
    )


def device_programs(device: torch.device, residents: int) -> int:
    """Programs that are certain to be resident at once, so many a multiprocessor. The interpreter runs one after
    another: one that waits for another would never end."""
    if device.type != "cuda":
        return 1
    return residents * torch.cuda.get_device_properties(device).multi_processor_count


def fewer_programs(programs: int, num_spans: int) -> int:
    """The largest power of two up to `programs`, unless a program then has over an eighth more spans."""
    power = 1 << (programs.bit_length() - 1)
    return power if 8 * triton.cdiv(num_spans, power) <= 9 * triton.cdiv(num_spans, programs) else programs


def shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor; an H100's where there is no GPU."""
    if device.type != "cuda":
        return H100_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
