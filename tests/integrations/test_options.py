"""Options of the exchange over PyTorch, tapes, Keras and DDP: each value is honoured, or refused
with these words; any two options of PyTorch's work together, or an error names one of them."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import hvd_compress.torch as hvd_torch
import hvd_compress.torch.mpi as hvd
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.options import HorovodOptions

hvd.init()

ALONE = hvd.add_process_set([0])
ALL = "torch", "tape", "keras", "ddp"
HOROVOD, OPTIMIZERS, TENSORFLOW = ALL[:3], ("torch", "keras"), ("tape", "keras")
TORCH, DDP = ("torch",), ("ddp",)


class Made(NamedTuple):
    """A value that is made of the model, or of its variables, and the name that stands for it."""

    name: str
    of: Callable[[Any], Any]

    def __repr__(self) -> str:
        return self.name


class Row(NamedTuple):
    """Values of an option, where there are such, and the words with which they are refused."""

    option: str
    over: tuple[str, ...]
    values: list[Any]
    words: str | None = None


def optimizer(name: str, **options: Any) -> Made:
    def of(model: torch.nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)

    return Made(f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})", of)


def _two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "momentum": 0.5}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _parameters(model: Any) -> list[Any]:
    return list(model.parameters() if isinstance(model, torch.nn.Module) else model)


MOMENTUM = optimizer("SGD", momentum=0.9)
ITERATOR = Made("an iterator", lambda model: model.named_parameters())
LACKING = Made("one is missing", lambda model: list(model.named_parameters())[1:])
SAME = Made("same names", lambda model: [("x", p) for p in model.parameters()])
UNNAMED = Made("parameters", lambda model: list(model.parameters()))
LISTS = Made("lists", lambda model: [_parameters(model)[:2], _parameters(model)[2:]])
SOME = Made("some", lambda model: [_parameters(model)[:1]])
TWICE = Made("twice", lambda model: [_parameters(model)[:1]] * 2)
NAN, INFINITY = float("nan"), float("inf")
DIVIDE = "gradient_predivide_factor"

TABLE = [
    Row(
        "optimizer",
        TORCH,
        [
            MOMENTUM,
            optimizer("SGD"),
            optimizer("SGD", momentum=0.9, nesterov=True),
            optimizer("SGD", momentum=0.9, dampening=0.5),
            optimizer("SGD", momentum=0.9, weight_decay=0.01),
            optimizer("SGD", momentum=0.9, maximize=True),
            optimizer("Adam", amsgrad=True),
            optimizer("AdamW"),
            optimizer("RMSprop", momentum=0.9),
            Made("two groups", _two_groups),
        ],
    ),
    Row("optimizer", TORCH, [Made("a model", lambda model: model)], "torch.optim.Optimizer"),
    Row("optimizer", TORCH, [optimizer("LBFGS")], "LBFGS evaluates gradients inside step"),
    Row("model", TORCH, ["dense", "sparse", "half"]),
    Row("named_parameters", TORCH, [None, ITERATOR]),
    Row("named_parameters", TORCH, [LACKING], "lacks 1 of the optimizer's parameters"),
    Row("named_parameters", TORCH, [UNNAMED], "must be a sequence of tuples"),
    Row("named_parameters", TORCH, [SAME], "must be unique; more than once: x"),
    Row(
        "compression",
        ALL,
        [
            *("none", hvd.FP16, "bf16", "fp8", "onebit", "efsignsgd", "powersgd:rank=1"),
            *("topk:density=0.05", "topk:density=0.05,error_feedback=False,values=float16"),
            *("oktopk:density=0.05", "ef21:density=0.05"),
            *("dgc:density=0.05,momentum=0.9", "topk:density=0.05,rows=int8"),
        ],
    ),
    Row("compression", HOROVOD, ["dgc:density=0.05"]),
    Row("compression", DDP, ["dgc"], "a hook knows nothing of the optimizer"),
    Row("compression", ALL, ["dcg"], "method must be one of"),
    Row("compression", ALL, ["dgc:densty=0.1"], "no option 'densty'"),
    Row("compression", ALL, [7, {"dgc": 1}], "no compression method"),
    Row("compression", OPTIMIZERS, ["dgc:momentum=0.5"], "two momenta"),
    Row("backward_passes_per_step", OPTIMIZERS, [1, 2]),
    Row("backward_passes_per_step", OPTIMIZERS, [0, -1, 1.5, "2", None], "it must be 1 or more"),
    Row("op", HOROVOD, [hvd.Average, hvd.Sum, None]),
    Row("op", HOROVOD, [hvd.Adasum], "op=Adasum cannot be combined with"),
    Row("op", HOROVOD, [hvd.Max, "no such op"], "op must be hvd.Average or hvd.Sum"),
    Row(DIVIDE, HOROVOD, [1.0, 2.0, 0.5]),
    Row(DIVIDE, HOROVOD, [0, -1.0, NAN, INFINITY, "2", None], f"{DIVIDE} must be greater than 0"),
    Row("num_groups", HOROVOD, [0, 2]),
    Row("num_groups", HOROVOD, [-1, "2"], "groups"),
    Row("groups", HOROVOD, [None, 1, 100, LISTS, SOME, [], [[]]]),
    Row("groups", HOROVOD, ["2", [7]], "groups"),
    Row("groups", TORCH, [0, TWICE], "group"),
    Row("sparse_as_dense", HOROVOD, [False, True]),
    Row("sparse_as_dense", HOROVOD, [3, "yes"], "sparse_as_dense must be one of"),
    Row("process_set", HOROVOD, [hvd.global_process_set, ALONE]),
    Row("process_set", HOROVOD, [7], "process_set=7: pass hvd.global_process_set"),
    Row("process_set", TORCH, [None], "process_set=None: pass hvd.global_process_set"),
    Row("device_dense", TENSORFLOW, ["", "/cpu:0"]),
    Row("device_dense", TENSORFLOW, [7], "device_dense must be a name of a device"),
    Row("device_sparse", TENSORFLOW, ["no such device"], "device_sparse must be a name"),
    Row("seed", ALL, [0, 7, -1]),
    Row("seed", ALL, [2**63, "7", None, 1.5, True], "seed must be a whole number"),
    Row("sparse_step", TORCH, [False]),
    Row("sparse_step", TORCH, [True], "sparse_step=True"),
    Row("nodes", TORCH, [None, 1]),
    Row("nodes", TORCH, [0, -1, 1.5, "hosts", True, [[0]]], "pass the number of nodes"),
    Row("nodes", TENSORFLOW, [2, "auto"], "leave nodes out"),
    Row("nodes", TORCH, [2], "no 2 nodes of equally many ranks"),
    Row("method", TORCH, [None, hvd.LocalSGD(sync_every=2), hvd.DiLoCo(sync_every=2)]),
    Row("method", TORCH, [hvd.Diffusion(topology="cycle")]),
    Row("method", TORCH, ["localsgd", 7], "method"),
    Row("momentum", DDP, [0.0, 0.9]),
    Row("momentum", DDP, [-1, "0.9", NAN], "momentum must be"),
    Row("nesterov", DDP, ["yes"], "nesterov must be one of"),
]


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


def _made(options: dict[str, Any], model: Any) -> dict[str, Any]:
    return {k: v.of(model) if isinstance(v, Made) else v for k, v in options.items()}


def over_torch(options: dict[str, Any]) -> None:
    options = {"optimizer": MOMENTUM, "model": "dense", **options}
    model = Model(options.pop("model"))
    given = _made(options, model)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        distributed = hvd.DistributedOptimizer(**given)
    except (ConfigError, UnsupportedError):
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        raise
    for step in range(2):
        distributed.zero_grad()
        for _ in range(given.get("backward_passes_per_step", 1)):
            model(step).backward()
        distributed.step()
    after = list(model.parameters())
    assert all(p.isfinite().all() for p in after), "not finite"
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True)), "nothing moves"


def over_ddp(options: dict[str, Any]) -> None:
    model = torch.nn.parallel.DistributedDataParallel(Model("dense"))
    if "compression" not in options:
        options = {"compression": "dgc:density=0.05", "momentum": 0.9, **options}
    state = hvd_torch.DDPState(options.pop("compression"), model, **options)
    model.register_comm_hook(state, hvd_torch.ddp_hook)
    for step in range(2):
        model(step).backward()
    assert state.reducer.step == 2


def over_tape(options: dict[str, Any]) -> None:
    import hvd_compress.tensorflow.mpi as hvd_tf

    tf = pytest.importorskip("tensorflow")
    variables = [tf.Variable(tf.ones(shape)) for shape in ([30, 4], [4], [3])]
    options = {"compression": "topk:density=0.05", **_made(options, variables)}
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(v**2) for v in variables)
        tape = hvd_tf.DistributedGradientTape(tape, **options)
        assert any((g.numpy() != 0).any() for g in tape.gradient(loss, variables))


def over_keras(options: dict[str, Any]) -> None:
    import hvd_compress.tensorflow.keras.mpi as hvd_keras

    tf, keras = pytest.importorskip("tensorflow"), pytest.importorskip("keras")
    variables = [keras.Variable(tf.ones(shape)) for shape in ([30, 4], [4], [3])]
    options = {"compression": "topk:density=0.05", **_made(options, variables)}
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    distributed = hvd_keras.DistributedOptimizer(sgd, **options)
    for _ in range(2 * options.get("backward_passes_per_step", 1)):
        distributed.apply([tf.ones(v.shape) for v in variables], variables)
    assert all((tf.convert_to_tensor(v).numpy() < 1).any() for v in variables)


OVER = {"torch": over_torch, "tape": over_tape, "keras": over_keras, "ddp": over_ddp}


def outcome(framework: str, options: dict[str, Any]) -> str:
    """``"works"``, or the message of an error that is one of ours; other errors are raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            OVER[framework](dict(options))
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    except RuntimeError as error:
        if options.get("model") == "sparse" and "sparse" in str(error):
            return str(error)  # PyTorch's optimizers take no such
        raise
    return "works"


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("framework", ALL)
def test_every_value_is_honoured_or_refused_with_these_words(framework):
    problems = {}
    for row in TABLE:
        for value in row.values if framework in row.over else ():
            found = outcome(framework, {row.option: value})
            if (found != "works") if row.words is None else (row.words not in found):
                problems[f"{row.option}={value!r}"] = found
    assert problems == {}


#: other words for an option in an error
WORDS = {
    "optimizer": ("SGD", "momentum", "LBFGS", "dampening", "weight_decay", "fused", "maximize"),
    "model": ("float16", "float64", "sparse", "dtype"),
    "compression": ("method", "densty", "momenta"),
    "named_parameters": ("name",),
}
OF_TORCH = {
    option: [value for row in rows if "torch" in row.over for value in row.values]
    for option, rows in itertools.groupby(TABLE, lambda row: row.option)
    if option not in ("device_dense", "device_sparse", "momentum", "nesterov")
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", list(OF_TORCH)[:-1])
def test_two_options_work_together_or_an_error_names_one(first):
    problems = []
    for second in list(OF_TORCH)[list(OF_TORCH).index(first) + 1 :]:
        words = [word for name in (first, second) for word in (name, *WORDS.get(name, ()))]
        for one, two in itertools.product(OF_TORCH[first], OF_TORCH[second]):
            if (first, second) == ("optimizer", "method") and one.name == "LBFGS()":
                continue  # which wants a closure, and is refused by all that compresses
            found = outcome("torch", {first: one, second: two})
            if found != "works" and not any(word in found for word in words):
                problems.append(f"{first}={one!r}, {second}={two!r}: {found}")
    assert not problems, "\n".join(problems[:40])


def test_the_table_has_all_options():
    known = {row.option for row in TABLE}
    assert set(OF_TORCH) - {"model"} == set(inspect.signature(hvd.DistributedOptimizer).parameters)
    assert {field.name for field in dataclasses.fields(HorovodOptions)} <= known


def test_an_average_alone_is_divided_in_two_steps():
    for framework in HOROVOD:
        found = outcome(framework, {"op": hvd.Sum, DIVIDE: 2.0})
        assert f"{DIVIDE} divides an average in two steps" in found
