"""Texts and their scores for tests of draft quality: of generations, or all that a tiny target can write."""

import numpy as np

from dspark.evals.block_scores import ScoringRule, score_paths
from dspark.evals.target_states import StateStore, TargetPath, compute_states

VOCAB, PROMPT = 4, (1, 3, 0, 2)


def paths_of(generations, max_new_tokens):
    return [TargetPath(i, tuple(g.prompt_ids), tuple(g.token_ids), max_new_tokens) for i, g in enumerate(generations)]


def score(target, drafter, paths, folder, rule):
    store = StateStore(folder, {"test": 1})
    compute_states(target, store, paths, drafter.config.tap_ids, progress=False)
    return score_paths(target, drafter, store, paths, rule)


def score_all_texts(target, drafter, enumeration, folder, rule_options, num_draft_tokens=2):
    """Scores of every text, and the texts' probabilities."""
    params = enumeration.params
    paths, weights = [], []
    for index, (tokens, weight) in enumerate(enumeration.paths().items()):
        prompt = tuple(enumeration.prompt)
        paths.append(TargetPath(index, prompt, tokens, params.max_new_tokens))
        weights.append(weight)
    store = StateStore(folder, {"test": 1})
    compute_states(target, store, paths, drafter.config.tap_ids, progress=False)
    rule = ScoringRule(params, num_draft_tokens, **rule_options)
    return score_paths(target, drafter, store, paths, rule), np.array(weights)
