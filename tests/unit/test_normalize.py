"""What `normalize` rewrites computes the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo_opt import ir as hlo_ir
from hlo_opt.passes.normalize import Normalize
from hlo_opt.pipeline import PassContext
from hlo_opt.verify.compare import run


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("i,j->ij", ((3,), "f4"), ((4,), "f4")),
        ("bhqk,h->bhqk", ((2, 3, 4, 5), "f4"), ((3,), "i4")),
        ("qhb,hkb->bhqk", ((4, 3, 2), "bf16"), ((3, 5, 2), "bf16")),
        ("ab,ab->ab", ((2, 3), "f4"), ((2, 3), "f4")),
        (",i->i", ((), "f4"), ((3,), "f4")),
    ],
)
def test_outer_products_become_products(equation: str, left: Any, right: Any) -> None:
    rng = np.random.default_rng(0)
    types = {"f4": jnp.float32, "i4": jnp.int32, "bf16": jnp.bfloat16}
    arrays = [
        np.asarray(jnp.asarray(rng.standard_normal(shape) * 3, types[dtype]))
        for shape, dtype in (left, right)
    ]
    lowered = jax.jit(lambda a, b: jnp.einsum(equation, a, b)).lower(*arrays).as_text()
    module, before = hlo_ir.parse(lowered), hlo_ir.parse(lowered)
    Normalize().run(module, PassContext())
    module.operation.verify()
    assert "dot_general" not in str(module)
    np.testing.assert_array_equal(run(module, arrays)[0], run(before, arrays)[0])
