"""Linear layers for few rows give what torch's own give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trio_llm.core.linear import MAX_ROWS, FewRowsLinear, speed_up_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2,), (3, 4), (1, 7), (MAX_ROWS,), (MAX_ROWS + 1,), (0,), ()])
def test_the_product_is_torchs_own(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    quick = nn.Linear(24, 40, bias=bias)
    quick.load_state_dict(plain.state_dict())
    assert speed_up_linears(quick) == 1
    rows = torch.randn(*shape, 24)
    with torch.inference_mode():
        expected, product = plain(rows), quick(rows)
    assert product.shape == expected.shape
    assert product.is_contiguous(), "models take views of it"
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_are_a_view_are_read_as_they_are() -> None:
    linear = nn.Linear(6, 5)
    rows = torch.randn(6, 9).t()
    expected = linear(rows)
    speed_up_linears(linear)
    torch.testing.assert_close(linear(rows), expected)


def test_only_what_gains_is_changed() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "bfloat16_": nn.Linear(4, 4, dtype=torch.bfloat16),
            "elsewhere": nn.Linear(4, 4, device="meta"),
            "special": Special(4, 4),
        }
    )
    assert speed_up_linears(model) == 1
    assert {name for name, module in model.items() if type(module) is FewRowsLinear} == {"plain"}
    assert speed_up_linears(model) == 0, "once is enough"
