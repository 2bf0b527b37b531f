"""Any two options of ``DistributedOptimizer`` work together, or an error names one of them."""

from __future__ import annotations

import inspect
import itertools
import warnings
from typing import Any, NamedTuple

import pytest
import torch

import hvd_compress.torch.mpi as hvd
from hvd_compress.errors import ConfigError, UnsupportedError

hvd.init()

ALONE = hvd.add_process_set([0])


class Made(NamedTuple):
    """A value that is made of the model, and the name that stands for it."""

    name: str
    of: Any

    def __repr__(self) -> str:
        return self.name


def optimizer(name: str, **options: Any) -> Made:
    def of(model: torch.nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)

    return Made(f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})", of)


def groups_of_parameters(model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "momentum": 0.5}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


#: values of each option; the first is what it is where others are looked at
TABLE: dict[str, list[Any]] = {
    "optimizer": [
        optimizer("SGD", momentum=0.9),
        optimizer("SGD"),
        optimizer("SGD", momentum=0.9, nesterov=True),
        optimizer("SGD", momentum=0.9, dampening=0.5),
        optimizer("SGD", momentum=0.9, weight_decay=0.01),
        optimizer("SGD", momentum=0.9, maximize=True),
        optimizer("Adam", amsgrad=True),
        optimizer("AdamW"),
        optimizer("RMSprop", momentum=0.9),
        optimizer("LBFGS"),
        Made("two groups", groups_of_parameters),
    ],
    "model": ["dense", "sparse", "half"],
    "named_parameters": [
        Made("all", lambda model: list(model.named_parameters())),
        None,
        Made("iterator", lambda model: model.named_parameters()),
        Made("one is missing", lambda model: list(model.named_parameters())[1:]),
        Made("none has one", lambda model: []),
        Made("parameters", lambda model: list(model.parameters())),
    ],
    "compression": [
        "none",
        hvd.FP16,
        "bf16",
        "topk:density=0.05",
        "topk:density=0.05,error_feedback=False,values=float16",
        "dgc:density=0.05",
        "dgc:density=0.05,momentum=0.9",
        "powersgd:rank=1",
        "onebit",
        "fp8",
        "efsignsgd",
        "oktopk:density=0.05",
        "ef21:density=0.05",
        "topk:density=0.05,rows=int8",
        "no such method",
        7,
    ],
    "backward_passes_per_step": [1, 2, 0, -1, 1.5, "2", None],
    "op": [hvd.Average, hvd.Sum, hvd.Adasum, "no such op", None],
    "gradient_predivide_factor": [1.0, 2.0, 0.5, 0, -1.0, float("nan"), float("inf"), "2", None],
    "num_groups": [0, 2, -1, "2"],
    "groups": [
        None,
        1,
        100,
        0,
        "2",
        Made("lists", lambda model: [list(model.parameters())[:2], list(model.parameters())[2:]]),
        Made("some", lambda model: [list(model.parameters())[:1]]),
        Made("twice", lambda model: [list(model.parameters())[:1]] * 2),
        [],
        [[]],
        [7],
    ],
    "sparse_as_dense": [False, True],
    "process_set": [hvd.global_process_set, ALONE, None, 7],
    "seed": [0, 7, -1, 2**70, "7", None, 1.5],
    "sparse_step": [False, True],
    "method": [
        None,
        hvd.LocalSGD(sync_every=2),
        hvd.DiLoCo(sync_every=2),
        hvd.Diffusion(topology="cycle"),
        "localsgd",
        7,
    ],
}
#: other words for an option in an error
WORDS = {
    "optimizer": ["SGD", "momentum", "LBFGS", "dampening", "weight_decay", "fused", "maximize"],
    "model": ["float16", "float64", "sparse", "dtype"],
    "compression": ["method"],
    "named_parameters": ["name"],
}


class Model(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(30, 12, sparse=kind == "sparse")
        self.first, self.last = torch.nn.Linear(12, 20), torch.nn.Linear(20, 3)
        self.to({"half": torch.bfloat16}.get(kind, torch.float32))

    def forward(self, step: int) -> torch.Tensor:
        found = self.last(torch.tanh(self.first(self.rows(torch.arange(step, step + 16)))))
        return found.float().square().mean()


def outcome(options: dict[str, Any]) -> str:
    """``"works"``, or the message of an error that is one of ours; other errors are raised."""
    model = Model(options.pop("model"))
    given = {k: v.of(model) if isinstance(v, Made) else v for k, v in options.items()}
    before = [p.detach().clone() for p in model.parameters()]
    try:
        distributed = hvd.DistributedOptimizer(**given)
        for step in range(2):
            distributed.zero_grad()
            passes = given.get("backward_passes_per_step", 1)
            for _ in range(passes):
                model(step).backward()
            distributed.step()
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    except RuntimeError as error:
        if model.rows.sparse and "sparse" in str(error):  # PyTorch's optimizers take no such
            return str(error)
        raise
    after = list(model.parameters())
    assert all(p.isfinite().all() for p in after), "not finite"
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True)), "nothing moves"
    return "works"


def names_an_option(message: str, options: dict[str, Any]) -> bool:
    words = [word for name in options for word in (name, *WORDS.get(name, []))]
    return any(word in message for word in words)


def defaults() -> dict[str, Any]:
    return {name: values[0] for name, values in TABLE.items()}


def problem_of(pair: dict[str, Any]) -> str | None:
    # What is not in the pair is left out, but for what every call needs, since some options are
    # refused beside whatever is given.
    needed = {name: TABLE[name][0] for name in ("optimizer", "model")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = outcome(needed | pair)
    except Exception as error:
        return f"{pair}: {type(error).__name__}: {error}"
    if found != "works" and not names_an_option(found, pair):
        return f"{pair}: names neither: {found}"
    return None


@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", list(TABLE)[:-1])
def test_two_options_work_together_or_an_error_names_one(first):
    pairs = [
        {first: one, second: two}
        for second in list(TABLE)[list(TABLE).index(first) + 1 :]
        for one, two in itertools.product(TABLE[first], TABLE[second])
        # which wants a closure, and is refused by all that compresses
        if (first, second) != ("optimizer", "method") or one.name != "LBFGS()"
    ]
    problems = [problem for pair in pairs if (problem := problem_of(pair))]
    assert not problems, f"{len(problems)} of {len(pairs)}:\n" + "\n".join(problems[:40])


def test_the_table_has_all_options():
    assert set(TABLE) - {"model"} == set(inspect.signature(hvd.DistributedOptimizer).parameters)
