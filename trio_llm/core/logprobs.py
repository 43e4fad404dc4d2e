"""Log-probabilities of tokens, as the model itself gives them: before any penalty, bias or temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trio_llm.core.step import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one token of each row, and of the row's likeliest.

    Args:
        logits: (rows, vocab), float32, the model's own.
        token_ids: one for each row.
        num_top: how many of the likeliest each row wants.
    """
    size = min(max(num_top, default=0), logits.shape[-1])
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(-1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None])
    values, ids = logits.topk(size)
    return [
        TokenLogprobs(token, logprob, tuple(zip(row_ids[:wanted], row_values[:wanted], strict=True)))
        for token, wanted, (logprob,), row_ids, row_values in zip(
            token_ids, num_top, (chosen - total).tolist(), ids.tolist(), (values - total).tolist(), strict=True
        )
    ]
