"""Linear layers for few rows: the same product, the other way round.

Decoding multiplies a few rows with a large weight.  On a CPU in float32, torch's way of doing
that (rows times weight) takes up to four times as long as weight times rows, which is what
bounds a step.  The numbers are in docs/benchmarks.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX_ROWS = 256
"""Above this, in prefill, torch's own way is as fast."""


class FewRowsLinear(nn.Linear):
    """An nn.Linear that is quick for few rows.  Made of one by changing its class."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        rows = input.reshape(-1, self.in_features)
        count = rows.shape[0]
        if not 0 < count <= MAX_ROWS:
            return super().forward(input)
        if count == 1:
            rows = rows.repeat(2, 1)  # a matrix times a vector takes a slower path than two
        # contiguous: models take views of what a layer gives
        product = torch.mm(self.weight, rows.t())[:, :count].t().contiguous()
        if self.bias is not None:
            product += self.bias
        return product.view(*input.shape[:-1], self.out_features)


def speed_up_linears(model: nn.Module) -> int:
    """Change the linear layers of a model that gain by it; gives how many."""
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype is torch.float32:
            module.__class__ = FewRowsLinear
            count += 1
    return count
