"""An optimizer that steps on this rank's own gradients, and meets the other ranks in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_compress.config import check_process_set
from hvd_compress.engines.base import Engine
from hvd_compress.errors import CompressionError, ConfigError, UnsupportedError
from hvd_compress.reduce.state_file import refused

from ..eager import run_eagerly
from ..parameters import (
    Parameter,
    check_optimizer,
    check_param_group,
    check_trained,
    local,
    moved,
    names_of_parameters,
    not_told,
)
from ..process_groups import ReplicaEngine
from ..replicas import check_shards, is_group
from ..state.checkpoint import BUFFERS, broadcast_tree
from ..state.optimizer_host import check_closure, loss_of
from .compressed_optimizer import CompressedOptimizer, refuse_copies, retire_others, take_over

if TYPE_CHECKING:
    from hvd_compress.systems import Coordinator, TrainingMethod

#: the entry of a state dict that is not the user's optimizer's
KEY = "training"


class LocalStepsOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step()`` is a local step, with the exchanges of a training method::

        optimizer = hvd.DistributedOptimizer(optimizer, method=hvd.DiLoCo(sync_every=100))

    That makes it, with the ``names`` of parameters, which may be ``sharded``. Nothing travels
    during the backward pass.  All ranks take equally many steps.  A step that a ``GradScaler``
    skips counts, too: the rank stays where it is and meets the others in time.

    With the step after a parameter is frozen, by ``requires_grad_(False)`` on all ranks, it gets
    the value that would be tested.  Trained again, it begins from there.

    Attributes:
        training: the method with its state: ``stats()``, ``set_epoch(epoch)``, ``exchanges``,
            ``method``.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> sgd = torch.optim.SGD([w], lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(sgd, method=hvd.LocalSGD(sync_every=2))
    >>> for _ in range(4):
    ...     w.square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.training.step, optimizer.training.exchanges
    (4, 2)
    """

    training: Coordinator

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        run_eagerly(cls, "step", "skip_step", "report", "synchronize_parameters")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Parameter, str],
        training: Coordinator,
        sharded: bool,
    ) -> None:
        take_over(self, optimizer)
        self._parameter_names = names
        self._followed: dict[str, Parameter] = {}  # that were trained in the last step
        self.training, self._is_sharded = training, sharded

    # -- steps -------------------------------------------------------------------------------

    def report(self, loss: Any) -> None:
        """Tell the loss of this rank's batch, a number or a tensor of one element, before
        ``step()``.  Methods that choose by losses need it, unless ``step`` gets a closure."""
        self.training.report(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the user's optimizer step on this rank's gradients, and meet the other ranks where
        that is due."""
        method = self.training.method
        check_closure(closure)
        if closure is not None and (method.acts_before or method.loss_window):
            # Gradients are those before anything is done to the parameters.
            loss = loss_of(closure)
            self.report(loss)
            self._before()
            super().step()
        else:
            self._before()
            loss = super().step(*([] if closure is None else [closure]))
        self._after()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the user's step() calls torch's step hooks

    def skip_step(self) -> None:
        """Do all that ``step()`` does but the local step itself, which loss scaling leaves out."""
        self._before()
        self._after()

    def _before(self) -> None:
        method = self.training.method
        rates = {n: float(g["lr"]) for n, _, g in self._trained()} if method.needs_rates else None
        self._run(lambda parameters: self.training.before_step(parameters, rates=rates))

    def _after(self) -> None:
        spoilt: set[str] = set()

        def after_step(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            result = self.training.after_step(parameters)
            if not self.training.method.state_is_own:
                replaced = (n for n, x in parameters.items() if result[n] is not x)
                spoilt.update(n for n in replaced if not parameters[n].isfinite().all())
            return result

        changed = self._run(after_step)
        for name in spoilt:  # momentum that led to NaN would lead there again
            self.state.pop(changed[name], None)

    def _trained(self) -> list[tuple[str, Parameter, dict[str, Any]]]:
        names = self._parameter_names
        if others := sum(p not in names for group in self.param_groups for p in group["params"]):
            raise not_told(f"they have {others} parameters that it was not made with")
        return [
            (names[p], p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad and local(p).numel()  # the last ranks may have nothing of it
        ]

    def _run(
        self, function: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    ) -> dict[str, Parameter]:
        """Replace the parameters by what the function makes of them, and return those that are
        other ones."""
        trained = {name: p for name, p, _ in self._trained()}
        if trained.keys() - self._followed.keys():
            check_trained(trained.items(), self._is_sharded)
        frozen = {name: p for name, p in self._followed.items() if name not in trained}
        self._followed = trained
        for p in frozen.values():  # its momentum would go on with any gradient, zeros included
            p.grad = None
        if frozen:
            _replace(frozen, self.training.freeze)
        return _replace(trained, function)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later, on all ranks alike; they are named after their place in the
        groups."""
        check_param_group(param_group)
        super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        added = {p: f"added.{index}.{j}" for j, p in enumerate(group["params"])}
        try:
            check_trained(((name, p) for p, name in added.items()), self._is_sharded)
        except CompressionError:
            self.param_groups.pop()
            raise
        self._parameter_names = added | self._parameter_names

    # -- the model that is tested ------------------------------------------------------------

    def synchronize_parameters(self) -> None:
        """Give all ranks the parameters that are to be tested: for most methods the average of the
        ranks' own.  A collective, for the end of training."""
        self._run(self.training.consensus)

    @contextlib.contextmanager
    def synchronized_parameters(self) -> Iterator[None]:
        """In this context the parameters are those to be tested and saved; after it they are this
        rank's own again.  A collective."""
        own = {p: p.detach().clone() for _, p, _ in self._trained()}
        self.synchronize_parameters()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, x in own.items():
                    p.copy_(x)

    # -- checkpoints -------------------------------------------------------------------------

    __getstate__ = refuse_copies

    def consolidate_state_dict(self) -> None:
        """Prepare a ``state_dict()`` that all ranks may load: wait for an exchange that is under
        way, and average the residuals of the compression.  A collective."""
        self.training.consolidate()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the user's optimizer, with the training method's state in it.

        The former is this rank's own.  The common part of the latter may be loaded by any rank; the
        rest, such as losses, by the same rank of as many only.
        """
        result: dict[str, Any] = super().state_dict()
        result[KEY] = self.training.state_dict()
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; after the state dict of a plain optimizer the
        first round begins at the parameters of then.

        Raises:
            ConfigError: it belongs to another model or method, or it is damaged; then nothing has
                changed.
        """
        if not isinstance(state_dict, Mapping):
            raise refused(f"it is {type(state_dict).__name__} where a dict was expected")
        plain = {key: value for key, value in state_dict.items() if key != KEY}
        devices = {self._parameter_names[p]: p.device for _, p, _ in self._trained()}
        before = self.state, self.param_groups
        try:
            super().load_state_dict(plain)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            self.state, self.param_groups = before
            raise refused(f"{type(self).__name__} says {error!r}") from error
        try:
            self._check_shapes()
            if KEY in state_dict:
                parameters = {n: local(p.detach()) for p, n in self._parameter_names.items()}
                self.training.load_state_dict(moved(state_dict[KEY], devices), parameters)
            else:
                self.training.restart()
        except ConfigError:
            self.state, self.param_groups = before
            raise
        self._followed = {name: p for name, p, _ in self._trained()}

    def _check_shapes(self) -> None:
        """Raise ``ConfigError`` unless buffers are as large as their parameters, which PyTorch does
        not look at."""
        for p, name in self._parameter_names.items():
            entries = self.state.get(p, {})
            if not isinstance(entries, Mapping):
                raise refused(f"the state of {name!r} is {entries!r} where a dict was expected")
            for key in BUFFERS & entries.keys():
                if (x := entries[key]) is not None and getattr(x, "shape", None) != p.shape:
                    found = list(x.shape) if isinstance(x, torch.Tensor) else repr(x)
                    raise refused(
                        f"{key!r} of {name!r} has shape {found}, and the parameter {list(p.shape)}"
                    )


@torch.no_grad()
def _replace(
    parameters: Mapping[str, Parameter],
    function: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, Parameter]:
    """Replace parameters by what the function makes of them; return those that are other ones."""
    before = {name: local(p.detach()) for name, p in parameters.items()}
    changed = {}
    for name, x in function(before).items():
        if x is not before[name]:
            local(parameters[name]).copy_(x)
            changed[name] = parameters[name]
    return changed


def train_locally(
    make_engine: Callable[[Any], Engine],
    optimizer: torch.optim.Optimizer,
    method: TrainingMethod | type[TrainingMethod],
    *,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    process_set: Any = None,
    seed: int = 0,
) -> LocalStepsOptimizer:
    """Return an optimizer of a class made from that of ``optimizer``, which trains by ``method``.

    Args:
        make_engine: of a process set, ``None`` for all ranks.

    Raises:
        MismatchError: the ranks differ in method or options.
    """
    from hvd_compress.systems import Coordinator
    from hvd_compress.systems.base import as_training_method

    method = as_training_method(method)
    check_users(optimizer)
    if method.acts_before and isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"LBFGS evaluates gradients inside step(), where {type(method).__name__} cannot act; "
            "local SGD and DiLoCo can use it"
        )
    if process_set is not None and not is_group(process_set):
        check_process_set(process_set)
    engine = make_engine(process_set)
    sharded = isinstance(engine, ReplicaEngine)
    names = names_of_parameters(optimizer.param_groups, named_parameters, sharded=sharded)
    if isinstance(engine, ReplicaEngine):
        check_shards(names, engine.group)
    training = Coordinator(method, engine, seed=seed, like=torch.empty(0))
    user_class = type(optimizer)
    cls = type(user_class.__name__, (LocalStepsOptimizer, user_class), {})
    local: LocalStepsOptimizer = cls(optimizer, names, training, sharded)
    retire_others((p for group in local.param_groups for p in group["params"]), local)
    return local


def check_users(optimizer: Any) -> None:
    """Raise an error unless this is an optimizer of the user's own, whose state can be saved."""
    check_optimizer(optimizer)
    if is_distributed(optimizer):
        raise ConfigError(
            "this optimizer is distributed already; pass the one that it was made from"
        )
    _check_form(optimizer)


def _check_form(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UnsupportedError`` unless parameters and their states are where PyTorch's own
    optimizers have them, and numbered so in a state dict."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    kind, problem = type(optimizer).__name__, "other parameter groups or states"
    try:
        saved = optimizer.state_dict()
        places = [place for group in saved["param_groups"] for place in group["params"]]
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        is_usual = isinstance(optimizer.state, Mapping) and isinstance(saved["state"], Mapping)
        if is_usual and places == list(range(count)) and isinstance(optimizer.defaults, Mapping):
            return
    except Exception as error:  # whatever the user's class raises
        problem = repr(error)
    raise UnsupportedError(
        f"{kind} has no state_dict() as optimizers of PyTorch have ({problem}), so it could not be "
        f"saved. If it stands around another optimizer, distribute that one: "
        f"{kind}(hvd.DistributedOptimizer(inner, ...))"
    )


def is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer meets other ranks: one of ours, or Horovod's own."""
    ours = isinstance(optimizer, CompressedOptimizer | LocalStepsOptimizer)
    return ours or hasattr(optimizer, "skip_synchronize")


def broadcast_training_state(hvd: Any, optimizer: LocalStepsOptimizer, root_rank: int) -> None:
    """Give all ranks the state of ``root_rank``'s optimizer and the common part of the training
    method's.  Call ``consolidate_state_dict()`` before, on every rank.  A method whose state is
    each rank's own begins again on all ranks."""
    state = optimizer.state_dict() if hvd.rank() == root_rank else None
    if state is not None and optimizer.training.method.state_is_own:
        state[KEY]["state"] = {}
    optimizer.load_state_dict(broadcast_tree(hvd, state, root_rank))
    optimizer.training.reducer.forget_plan()  # a worker that has just come has none
