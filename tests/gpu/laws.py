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
#: and about the sign of a momentum that is zero but for rounding.  Of the multiples of 1/4 here,
#: and of thirds of these, no sum with these weights is
METHODS = {"onebit-adam": dataclasses.replace(ROWS["onebit-adam"].method, beta1=0.87)}


def on_gpu(x):
    return torch.from_numpy(x).cuda()


@pytest.mark.parametrize("name", ROWS)
def test_laws(name):
    row = ROWS[name]
    method = METHODS.get(name, row.method)
    own = {"make": on_gpu, "sizes": (3,), "steps": 2, **row.options}
    half = {**own, "agreement": max(ROUNDED, row.agreement)}
    check_laws(method, dtypes=("float16", "bfloat16"), shapes=((33, 40),), **half)
    check_laws(method, dtypes=("float64",), shapes=((33, 40),), **own)
    check_laws(method, dtypes=("float32",), shapes=((), (3, 0), (7,), (33, 40)), **own)
