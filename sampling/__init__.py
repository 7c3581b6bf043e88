"""Distributions, random streams, draft sampling and rejection sampling; import as `dspark.sampling`.

In the order of a step: `to_distribution` makes q, `draft_token` draws from it, `make_proposal` collects a block
(`BlockDraws` does it all), and `rejection_sample` verifies it against the target's p (`verify_logits` from the target's
logits, with kernels on a GPU).
All are pure functions of tensors; randomness comes from `Streams`.
"""

from dspark.sampling.draft import BlockDraws, Drafting, draft_token
from dspark.sampling.params import SamplingParams, SamplingTensors, to_distribution
from dspark.sampling.proposal import DenseProposal, OneHotProposal, Proposal, SparseProposal, make_proposal
from dspark.sampling.rejection import Verification, rejection_sample, verify_logits
from dspark.sampling.streams import Purpose, Streams, sample, sample_in_groups

__all__ = [
    "BlockDraws",
    "DenseProposal",
    "Drafting",
    "OneHotProposal",
    "Proposal",
    "Purpose",
    "SamplingParams",
    "SamplingTensors",
    "SparseProposal",
    "Streams",
    "Verification",
    "draft_token",
    "make_proposal",
    "rejection_sample",
    "sample",
    "sample_in_groups",
    "to_distribution",
    "verify_logits",
]
