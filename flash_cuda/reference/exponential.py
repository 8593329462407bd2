"""Powers of two, exact or by the polynomial that spares the special function unit of a GPU."""

from __future__ import annotations

from math import floor

import torch
from torch import Tensor

# 2^f on [0, 1) as 1 + c1 f + c2 f^2 + ...: a Remez exchange of the relative error with the
# constant held at 1, so that whole powers are exact. Errors: 2.1e-3, 8.6e-5, 3.0e-6, 1.6e-7.
COEFFICIENTS: dict[int, tuple[float, ...]] = {
    2: (0.665960968, 0.329932392),
    3: (0.695116758, 0.227644995, 0.0770670399),
    4: (0.693044841, 0.241280198, 0.0522424728, 0.0134266838),
    5: (0.693151295, 0.240164444, 0.0557999127, 0.00901703071, 0.00186713005),
}
# Below this a kernel's exponent arithmetic yields zero.
_SMALLEST = -127.0


def exp2_polynomial(x: Tensor, degree: int) -> Tensor:
    """Returns 2^x by a polynomial in the fractional part of x; 0 from x = -127 down."""
    whole = x.clamp(min=_SMALLEST).floor()
    fraction = x.clamp(min=_SMALLEST) - whole
    power = torch.zeros_like(x)
    for coefficient in reversed(COEFFICIENTS[degree]):
        power = (power + coefficient) * fraction
    return torch.ldexp(power + 1.0, whole).masked_fill_(x <= _SMALLEST, 0.0)


def exp2_(x: Tensor, share: float = 0.0, degree: int = 3) -> Tensor:
    """Replaces x by 2^x; a share of the columns (last dimension) goes through the polynomial."""
    if share == 0.0:
        return x.exp2_()
    columns = torch.tensor(
        [c for c in range(x.shape[-1]) if floor((c + 1) * share) > floor(c * share)],
        dtype=torch.long,
    )
    emulated = exp2_polynomial(x[..., columns], degree)
    x.exp2_()
    x[..., columns] = emulated
    return x
