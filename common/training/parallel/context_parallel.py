"""Context parallelism: which tokens of a sequence each of the ranks that share it has."""

import torch


def places(sequence: int, ranks: int, rank: int) -> torch.Tensor:
    """int64 [sequence / ranks]: the places in the sequence of the tokens that a context rank has.

    Of 2 x ranks runs each has one from the front and one from the back, as Transformer Engine wants it, so that under a
    causal mask all see equally many keys.
    """
    every = torch.arange(sequence)
    if ranks == 1:
        return every
    runs = every.chunk(2 * ranks)
    return torch.cat((runs[rank], runs[2 * ranks - 1 - rank]))
