"""The ragged cache: rows go behind each request's length, and those that are left out are never written."""

import pytest
import torch

from dspark.cache import RaggedKV


def rows(batch, count):
    """[batch, count, 1, 1], every number once."""
    return torch.arange(1.0, batch * count + 1).view(batch, count, 1, 1)


@pytest.mark.parametrize("num_rows", [[2, 0, 3], [3, 3, 3], [0, 0, 1]])
def test_only_the_rows_that_are_kept_are_written(num_rows):
    cache, lengths = RaggedKV(1, 3, "cpu"), [1, 4, 2]
    first = rows(3, 4) * 100
    cache.write(0, first, first, cache.place(lengths))
    cache.advance(lengths)
    new = rows(3, max(num_rows))
    cache.write(0, new, -new, cache.place(num_rows))
    cache.advance(num_rows)
    keys, values = cache.read(0, 8)
    for request, (held, kept) in enumerate(zip(lengths, num_rows, strict=True)):
        expected = torch.cat([first[request, :held], new[request, :kept], torch.zeros(8 - held - kept, 1, 1)])
        assert torch.equal(keys[request, 0], expected[:, 0])
        assert torch.equal(values[request, 0].abs(), expected[:, 0])
    assert cache.lengths.tolist() == cache.host_lengths == [a + b for a, b in zip(lengths, num_rows, strict=True)]


def test_a_cache_that_has_become_empty_takes_requests():
    """Lengths stay integers, which positions are made of."""
    cache, joining = RaggedKV(1, 2, "cpu"), RaggedKV(1, 1, "cpu")
    cache.keep([])
    cache.advance([])
    joining.write(0, rows(1, 2), rows(1, 2), joining.place([2]))
    joining.advance([2])
    cache.append(joining)
    assert cache.lengths.dtype == torch.int64
    assert cache.lengths.tolist() == cache.host_lengths == [2]
