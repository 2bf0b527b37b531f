"""Every method at one budget: what ``--compression all`` stands for.

All train equally long, from the same weights, over the same batches.  Methods that choose elements
send 1 % of them, or more where that is their default; all others have their defaults.
"""

from __future__ import annotations

import warnings

from hvd_compress import NeedsTuning, method_names
from hvd_compress.config import lookup

_SPARSE = "density=0.01"
#: options where the defaults are not the budget
OPTIONS = {
    "powersgd": "rank=2",
    "randomk": "",
    "lgc": "density=0.01,learn=20,code=100",
}
#: methods that are a part of an optimizer: what this is made with
PARTNERS = {
    "OneBitAdam": {"lr": 1e-3, "freeze_step": 60, "eps": 1e-3},
    "ZeroOneAdam": {"lr": 1e-3, "var_freeze_step": 60, "eps": 1e-3},
}
#: of the learning rate, for methods whose steps do not shrink with the gradient
RATES = {"signsgd": 0.004, "signum": 0.01}
warnings.simplefilter("ignore", NeedsTuning)  # of those rates
#: why a method may stay behind, printed where it does
REASONS = {
    "dgc": "an element waits for 1 / density steps or so, and arrives late in a short run: more "
    "--epochs, or a larger density",
    "signsgd": "votes have no magnitude and nothing corrects their bias; wants a rate of its own",
    "signum": "votes have no magnitude and nothing corrects their bias; wants a rate of its own",
    "terngrad": "one magnitude a tensor: most variance of all that are unbiased",
    "onebit_adam": "rare gradients have a small frozen variance, and in one bit they get as much "
    "momentum as all others: wants a longer warm-up, or a larger eps",
    "zero_one_adam": "as 1-bit Adam",
    "scalecom": "the elements of one rank are chosen for all, and those of others wait",
    "lgc": "an autoencoder keeps about half of what it is given, after 80 steps of training",
    "ef21": "estimates begin at zero and follow the gradient with a delay",
    "randomk": "elements drawn at random wait, and then arrive all at once",
}


def everything(partners: bool) -> list[str]:
    """All methods that can be named, the dense one first; ``partners``: also those that need an
    optimizer of their own."""
    found = sorted(method_names(), key=lambda name: (name != "none", name))
    found = [name for name in found if partners or lookup("method", name).partner is None]
    return [":".join(filter(None, (name, _options(name)))) for name in found]


def _options(name: str) -> str:
    if name in OPTIONS:
        return OPTIONS[name]
    has_density = hasattr(lookup("method", name), "density")
    return _SPARSE if has_density else ""


def rate(method: str) -> float:
    """What to multiply the learning rate with."""
    return RATES.get(method.partition(":")[0], 1.0)


def reason(method: str) -> str:
    return REASONS.get(method.partition(":")[0], "no reason is known")
