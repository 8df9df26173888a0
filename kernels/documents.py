"""Where the documents of a batch begin, as attention() and positions need it."""

import torch
import torch.nn.functional as F

SHORTEST = 32  # tokens: mean length of the shortest documents of a batch of long rows that are told apart
FEWEST = 8  # documents of a row, as a mean over the batch, that are told apart in any case


def find_documents(tokens, end):
    """The documents in tokens [B, T], each of which ends with the token `end`.

    Returns:
        starts: int32 cu_seqlens of the documents in the row of all B T tokens. Its length does not depend on the
            tokens, which torch.compile and CUDA graphs need. So if a batch has more documents than B (T / SHORTEST +
            FEWEST), the last ones of its last rows count as one in each row.
        positions: [B, T] of each token in its document.
    """
    B, T = tokens.shape
    limit = B * (T // SHORTEST + FEWEST)
    later = F.pad(tokens[:, :-1] == end, (1, 0), value=False)
    later = later & (later.flatten().cumsum(0) <= limit - B).view(B, T)  # a row's first document always begins
    begins = F.pad(later[:, 1:], (1, 0), value=True)
    number = begins.flatten().cumsum(0) - 1  # of each token's document
    starts = torch.searchsorted(number, torch.arange(limit + 1, device=tokens.device), out_int32=True)
    positions = torch.arange(B * T, device=tokens.device) - starts[number]
    return starts, positions.view(B, T)
