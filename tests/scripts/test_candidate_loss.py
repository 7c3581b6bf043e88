"""What candidates lose: nothing if they are all there is, and never more with more of them."""

import torch
from candidate_loss import SIZES, overlaps

from dspark.sampling import SamplingParams


def test_all_tokens_as_candidates_lose_nothing_and_fewer_lose_more():
    generator = torch.Generator().manual_seed(0)
    base, bias = (torch.randn(4, max(SIZES), generator=generator) * 2 for _ in range(2))
    p = (base + bias).softmax(-1)
    found = overlaps(base, bias, p, SamplingParams(temperature=1.0))
    assert torch.allclose(found["all"], torch.ones(4))
    for kind in ("base", "best"):
        assert torch.allclose(found[f"{kind} {max(SIZES)}"], found["all"])
    for kind in ("base", "lists", "best"):
        kept = torch.stack([found[f"{kind} {k}"] for k in SIZES])
        assert (kept.diff(dim=0) > -1e-6).all()
    assert (found["best 16"] > found["lists 16"]).all()


def test_the_greedy_proposal_is_one_token_of_the_candidates():
    base, bias = torch.zeros(1, max(SIZES)), torch.zeros(1, max(SIZES))
    base[0, 3], bias[0, 200] = 1.0, 5.0
    p = torch.nn.functional.one_hot(torch.tensor([200]), max(SIZES)).float()
    found = overlaps(base, bias, p, SamplingParams(temperature=0.0))
    assert [found[f"{kind} 16"].item() for kind in ("base", "lists", "best")] == [0.0, 1.0, 1.0]
