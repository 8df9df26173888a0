"""Where the documents of a batch begin, as attention() and positions need it."""

import torch
import torch.nn.functional as F

SHORTEST = 8  # tokens: mean length of the shortest documents of a row that are told apart


def find_documents(tokens, end):
    """The documents in tokens [B, T], each of which ends with the token `end`.

    Returns:
        starts: int32 cu_seqlens of the documents in the row of all B T tokens. Its length does not depend on the
            tokens, which torch.compile and CUDA graphs need; so if documents of a row have less than SHORTEST tokens on
            average, its last ones count as one.
        positions: [B, T] of each token in its document.
    """
    B, T = tokens.shape
    limit = T // SHORTEST + 1
    begins = F.pad(tokens[:, :-1] == end, (1, 0), value=True)
    begins = begins & (begins.cumsum(1) <= limit)
    number = begins.flatten().cumsum(0) - 1  # of each token's document
    starts = torch.searchsorted(number, torch.arange(B * limit + 1, device=tokens.device), out_int32=True)
    positions = torch.arange(B * T, device=tokens.device) - starts[number]
    return starts, positions.view(B, T)
