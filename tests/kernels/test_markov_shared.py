"""No chain asks for more shared memory than sm_90 has: by the plan's bound everywhere, by the compiler's number here
and there."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import markov_compile
import pytest
import torch

from dspark.kernels import HAS_TRITON, markov_plan
from dspark.kernels.markov import GROUP, MarkovWeights
from dspark.kernels.markov_plan import DensePlan, RaceSizes

BLOCK, MULTIPROCESSOR, RESERVE = 232448, 233472, 1024  # bytes, sm_90

# The shapes whose bound is nearest to the limit or to the compiler's number, of each kind of kernel.
COMPILED = [
    {"kind": "gated", "dtype": "float32", "rank": 128, "batch": 16, "columns": 512},
    {"kind": "vanilla", "dtype": "float32", "rank": 256, "batch": 4, "columns": 512},
    {"kind": "vanilla", "dtype": "bfloat16", "rank": 256, "batch": 16, "columns": 151936},
    {"kind": "vanilla", "dtype": "bfloat16", "rank": 256, "batch": 64, "columns": 151936},
    {"kind": "vanilla", "dtype": "bfloat16", "rank": 256, "batch": 256, "columns": 151936, "fp8": True,
     "base": "float32"},
    {"kind": "vanilla", "dtype": "bfloat16", "rank": 64, "batch": 256, "columns": 49152},
    {"kind": "vanilla", "dtype": "bfloat16", "rank": 64, "batch": 16, "columns": 49152, "fp8": True},
    {"kind": "none", "dtype": "float32", "rank": 1, "batch": 4, "columns": 49152},
    {"kind": "vanilla", "dtype": "float32", "rank": 256, "batch": 4, "columns": 49152, "candidates": 256,
     "kernels": ["_candidates_chain_kernel", "_select_kernel"]},
]  # fmt: skip


def every_shape():
    """All that is supported: what W2 is, what the logits are, and how many of each."""
    for dtype, base, rank, kind, batch, fp8, columns, reduced in itertools.product(
        ("bfloat16", "float16", "float32"), ("bfloat16", "float32"), (5, 16, 64, 128, 200, 256),
        ("none", "vanilla", "gated", "rnn"), (1, 4, 16, 64, 256), (False, True), (512, 49152, 151936), (False, True),
    ):  # fmt: skip
        yield {
            "dtype": dtype, "base": base, "rank": rank, "kind": kind, "batch": batch, "fp8": fp8, "columns": columns,
            "reduced": reduced,
        }  # fmt: skip


def test_every_plan_fits_a_multiprocessor_as_often_as_it_must(monkeypatch):
    monkeypatch.setattr(markov_plan, "device_programs", lambda device, residents: 132 * residents)
    for case in every_shape():
        plan = DensePlan.choose(*markov_compile.head(case), None)
        assert plan.shared <= BLOCK, f"{case}: {plan}"
        assert plan.residents * (plan.shared + RESERVE) <= MULTIPROCESSOR, f"{case}: {plan}"
        assert plan.held or plan.stages >= 2, f"{case}: nothing is loaded ahead"
        assert plan.num_blocks * plan.num_parts <= 132 * plan.residents, f"{case}: {plan}"
        spans = [range(part, plan.num_spans, plan.num_parts) for part in range(plan.num_parts)]
        assert plan.alone or all(0 < len(own) * plan.span * plan.tile // GROUP <= plan.groups_each for own in spans), (
            f"{case}: {plan}"
        )


@pytest.mark.parametrize(
    ("case", "programs"),
    [
        pytest.param({"batch": 8}, 132, id="words-of-few-requests-are-read-as-one"),
        pytest.param({"batch": 9}, 119, id="119-programs-of-10-tiles-instead-of-132-of-9"),
        pytest.param({"batch": 16}, 119, id="as-many-for-16"),
        pytest.param({"batch": 16, "columns": 50304}, 131, id="not-99-of-4-instead-of-131-of-3"),
        pytest.param({"batch": 64}, 238, id="wider-products-read-otherwise"),
        pytest.param({"batch": 2100, "rank": 512, "columns": 512}, 132, id="all-blocks-of-many-requests-must-run"),
    ],
)
def test_programs_are_a_power_of_two_where_that_costs_little(monkeypatch, case, programs):
    monkeypatch.setattr(markov_plan, "device_programs", lambda device, residents: 132 * residents)
    case = {"dtype": "bfloat16", "base": "bfloat16", "rank": 256, "kind": "vanilla", "columns": 151936} | case
    plan = DensePlan.choose(*markov_compile.head(case), None)
    assert plan.num_blocks * plan.num_parts == programs, plan


def test_a_rank_too_large_for_the_chip_is_refused():
    w1 = torch.empty(512, 4096, device="meta")
    with pytest.raises(ValueError, match=r"a head of rank 4096 .* needs .* bytes of shared memory"):
        DensePlan.choose(MarkovWeights("vanilla", w1=w1, w2=w1), torch.empty(1, 1, 512, device="meta"), None)


def test_more_of_anything_takes_more():
    sizes = RaceSizes(block_r=128, w1=4, w2=4, product=4, base=4)
    least = sizes.shared(16, 64, 2, False)
    assert least < sizes.shared(16, 64, 3, False)
    assert least < sizes.shared(16, 128, 2, False)
    assert least < RaceSizes(block_r=256, w1=4, w2=4, product=4, base=4).shared(16, 64, 2, False)
    # The shape that once asked for 233472 bytes: four stages of 128 columns, float32 everywhere.
    assert sizes.shared(16, 128, 4, False) >= 233472


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_bound_is_above_what_the_compiler_asks_for(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = Path(markov_compile.__file__)
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(COMPILED)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, kernels in zip(COMPILED, json.loads(done.stdout), strict=True):
        assert kernels, f"{case}: nothing was launched"
        for name, asked, bound in kernels:
            assert asked <= BLOCK, f"{case}: {name} asks for {asked} bytes"
            if name in ("_chain_kernel", "_held_chain_kernel"):
                assert asked <= bound, f"{case}: {name} asks for {asked} bytes, the plan expects {bound}"
