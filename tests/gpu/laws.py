"""The law kit over the table of methods, on a GPU: ``pytest tests/gpu/laws.py``."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hvd_compress.testing import check_laws
from tests.method_table import ROWS

# LGC has nothing to learn from the numbers that are drawn here.
pytestmark = pytest.mark.filterwarnings("ignore::hvd_compress.PoorFit")
#: momentum is a product and a sum in one rounding there, and in two in NumPy: seldom, that decides
#: about the last bit of a gradient in half precision
ROUNDED = 2.0**-10
#: and about the sign of a momentum that is zero but for rounding, of which there are some here:
#: then both are as far from zero, and as far again from each other
SIGNS_OF_MOMENTA = {"onebit-adam": 2.0}


def on_gpu(x):
    return torch.from_numpy(x).cuda()


@pytest.mark.parametrize("name", ROWS)
def test_laws(name):
    row = ROWS[name]
    agreement = SIGNS_OF_MOMENTA.get(name, row.agreement)
    own = {"make": on_gpu, "sizes": (3,), "steps": 2, **row.options, "agreement": agreement}
    half = {**own, "agreement": max(ROUNDED, agreement)}
    check_laws(row.method, dtypes=("float16", "bfloat16"), shapes=((33, 40),), **half)
    check_laws(row.method, dtypes=("float64",), shapes=((33, 40),), **own)
    check_laws(row.method, dtypes=("float32",), shapes=((), (3, 0), (7,), (33, 40)), **own)


def test_momenta_that_are_not_zero_have_the_same_signs():
    """Of multiples of 1/4, and of thirds of these, no sum with these weights is zero."""
    row = ROWS["onebit-adam"]
    own = {"make": on_gpu, "sizes": (3,), "steps": 2, **row.options}
    method = dataclasses.replace(row.method, beta1=0.87)
    check_laws(method, dtypes=("float64",), shapes=((33, 40),), **own)
