"""A communication hook for PyTorch's DistributedDataParallel, for jobs that torchrun starts::

    model = torch.nn.parallel.DistributedDataParallel(model)
    state = DDPState(DGC(momentum=0.9), model)  # model may be left out
    model.register_comm_hook(state, ddp_hook)

The exchanges are those of every other engine.  DDP decides which gradients form a bucket and when
it is sent; exchanges of several rounds finish after the last bucket was sent.
"""

# No postponed annotations here: DDP looks at those of its hook.

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.agreement import listed
from hvd_compress.base import Compressor
from hvd_compress.config import check_between, check_choice
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError
from hvd_compress.methods import as_compressor
from hvd_compress.methods.optimizers import check_partner
from hvd_compress.reduce import Reducer
from hvd_compress.reduce.nodes import Node
from hvd_compress.reduce.state_file import entry, refused
from hvd_compress.stats import Stats

from ..amp import NO_SCALE, current_pass, refuse_scale, running_scale, watch_scale
from ..controls import Controls
from ..eager import run_eagerly
from ..process_groups import ProcessGroupEngine, ReplicaEngine
from ..state.rank_states import gathered, of_all_shards, of_shard, own, own_shard, placed
from .buckets import UsedParameters, check_bucket, cut, may_leave_out
from .nodes import NodeGroups, ShardStore, check_nodes, nodes_of

#: of a :class:`DDPState`, which trainers take among their own
STATE_OPTIONS = frozenset({"momentum", "nesterov", "seed", "residuals", "nodes"})


class _HookBucket:
    """One of DDP's, and what it waits for.

    Attributes:
        results: where averages go, by name: views of its buffer, one for each parameter.
    """

    def __init__(self, bucket: dist.GradBucket) -> None:
        self.buffer, self.parameters = bucket.buffer(), bucket.parameters()
        self.views = cut(bucket)
        self.results: dict[str, torch.Tensor] = {}
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self.buffer.device] if self.buffer.is_cuda else None
        )


@dataclasses.dataclass(eq=False)
class _Use:
    """Whether a state has ever got a bucket; it outlives the state, which may end unused."""

    has_begun: bool = False
    was_looked_at: bool = False

    def look(self) -> None:
        if not self.was_looked_at:
            self.was_looked_at = True
            self.warn()

    def warn(self) -> None:
        if not self.has_begun:
            warnings.warn(
                "this DDPState has got no gradients: so far nothing is compressed. Register it "
                "by model.register_comm_hook(state, ddp_hook), and check that the framework does "
                "so where it trains: Lightning leaves hooks out without a GPU, where "
                "hvd_compress.torch.lightning has a strategy",
                RuntimeWarning,
                stacklevel=4,
            )


class DDPState(Controls):
    """The method with its state for one model in DistributedDataParallel, for :func:`ddp_hook`::

        state = hvd.DDPState(hvd.TopK(density=0.01), model)
        model.register_comm_hook(state, hvd.ddp_hook)

    Args:
        compression: a method, its class, its name, or a text such as "dgc:density=0.01".
        model: gives names to statistics and checkpoints; ``None``: that of the first gradients.
        process_group: the ranks to average over; by default those of ``model``.
        momentum, nesterov: for methods that take momentum over (DGC), instead of the optimizer's;
            0.0 for none.
        seed: for randomness that the ranks share.
        residuals: in a consolidated :meth:`state_dict`: their "mean", or all "ranks'" on rank 0.
        nodes: "auto" (torchrun's numbers, hosts' names), a number or a mesh (nodes, ranks), for a
            sum within each node, uncompressed, before the exchange.  ``None``: no nodes.

    >>> hvd.DDPState(hvd.DGC)
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: dgc corrects momentum, and a hook knows nothing of the
    optimizer: write DDPState(DGC(momentum=0.9), ...) and give the optimizer momentum=0; ...
    """

    def __init__(
        self,
        compression: Any,
        model: torch.nn.Module | None = None,
        *,
        process_group: Any = None,
        momentum: float | None = None,
        nesterov: bool = False,
        seed: int = 0,
        residuals: str = "mean",
        nodes: Any = None,
    ) -> None:
        method: Compressor = as_compressor(compression)
        check_method(method, momentum, "DDPState({}, ...)")
        check_nodes(nodes, method)
        if momentum is not None:
            check_between("momentum", momentum, 0.0, 1.0)
        check_choice("nesterov", nesterov, (True, False))
        check_choice("residuals", residuals, ("mean", "ranks"))
        if not isinstance(model, torch.nn.Module | None):
            raise ConfigError(
                f"model is {type(model).__name__}: pass the DistributedDataParallel whose "
                "gradients are exchanged, or the module in it, or leave it out"
            )
        self._residuals = residuals
        self._group = _group_for(model, process_group)
        self._given_nodes = nodes
        self._nodes: NodeGroups | None = None  # until there are ranks
        self._names = dict[torch.Tensor, str]()
        self._make = functools.partial(
            Reducer,
            method,
            momentum=momentum or 0.0,
            nesterov=nesterov,
            seed=seed,
            same_order=True,
            in_place=True,  # the gradients are views into DDP's own buffers
            finds_unused=may_leave_out(model),
        )
        self._used = UsedParameters()
        #: of a world of one until there is a process group: it knows the epoch
        self.reducer = self._make(LocalEngine())
        self._loaded: dict[str, Any] | None = None
        self._is_bound = False
        self._buckets: list[_HookBucket] = []
        self._pass: int | None = None  # the backward pass that they are of
        #: names of parameters that DDP leaves alone
        self._ignored = set(getattr(model, "parameters_to_ignore", ()))
        self._use = _Use()
        if model is not None:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            self._names.update((p, name) for name, p in inner.named_parameters())
            self._watch(self._names)
            trained = [p for p in self._names if p.requires_grad]  # others may be on meta
            if dist.is_initialized() and trained:
                self._bind(trained[0].device)
        weakref.finalize(self, self._use.warn)
        run_eagerly(type(self), "_start")

    def _bind(self, device: torch.device) -> None:
        old = self.reducer
        if self._given_nodes is not None:
            terms = {
                "method": repr(old.method),
                "momentum, nesterov": str(old.store.momentum("")),
                "seed": str(old.seed),
                "parameters": listed((name, p.shape) for p, name in self._names.items()),
            }
            self._nodes = nodes_of(self._given_nodes, self._group, device, terms)
        if self._nodes is None:
            self.reducer = self._make(ProcessGroupEngine(self._group, device))
        else:
            node = Node(
                ProcessGroupEngine(self._group, device),
                ProcessGroupEngine(self._nodes.inside, device),
                ReplicaEngine(self._nodes.between, device),
            )
            store = ShardStore(self._nodes.inside, device, *old.store.momentum(""))
            self.reducer = self._make(node.between, store=store, node=node)
            old.method.bind(self.reducer)
        self.reducer.epoch = old.epoch
        if old.keeps_undo:
            self.reducer.keep_undo()
        self._is_bound = True
        if self._loaded is not None:
            self._load(self._loaded)
            self._loaded = None

    def stats(self) -> Stats:
        self._use.look()
        return super().stats()

    def state_dict(self, *, consolidate: bool = True) -> dict[str, Any]:
        """Return the state for ``torch.save``, which any number of ranks can load.

        A collective unless ``consolidate`` is false: residuals are averaged over the ranks, or
        gathered on rank 0, which saves.  With ``nodes`` the first rank of each node saves; any
        number of nodes of as many ranks can load it.  A loaded state stays as it is until the first
        gradients come.
        """
        check_choice("consolidate", consolidate, (True, False))
        if self._loaded is not None:
            return dict(self._loaded)
        self._use.look()
        if consolidate and self._is_bound and self._residuals == "ranks":
            group = self._group if self._nodes is None else self._nodes.between
            saved = gathered(self.reducer.state_dict(consolidate=False), group)
        else:
            saved = self.reducer.state_dict(consolidate=consolidate)
        if self._nodes is None:
            return saved
        return (of_all_shards if consolidate else of_shard)(saved, self._nodes.inside)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; if there is no model yet, it takes effect with
        the first gradients."""
        if not isinstance(state_dict, Mapping):
            raise refused(f"it is {type(state_dict).__name__} where a dict was expected")
        if not self._is_bound:
            self._loaded = state_dict
            return
        self._buckets.clear()
        self._load(state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        engine = self.reducer.engine
        state_dict = own_shard(state_dict, None if self._nodes is None else self._nodes.inside)
        state_dict = own(state_dict, engine.rank, engine.size)
        devices = {name: p.device for p, name in self._names.items()}
        states = entry(state_dict, "states", Mapping)
        if unknown := set(states) - devices.keys():
            raise ConfigError(
                f"this state dict has a state of {min(unknown)!r}, which the model has not: load "
                "it into a DDPState that is made as the saved one was, with the model or without"
            )
        # It may come from another device.
        self.reducer.load_state_dict({**state_dict, "states": placed(states, devices.__getitem__)})

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._use.has_begun = True
        check_bucket(bucket)
        refuse_scale(self.reducer.method, running_scale() is not None, NO_SCALE)
        running = current_pass()
        if bucket.index() == 0 and self._buckets and running != self._pass:
            self._buckets.clear()  # an exception has ended the last backward pass
            self.reducer.abandon()
        self._pass = running
        own_bucket = _HookBucket(bucket)
        is_foreign = self._names and any(p not in self._names for p in own_bucket.parameters)
        if is_foreign or (not self._names and bucket.index() != len(self._buckets)):
            raise ConfigError(
                "this DDPState belongs to another model: make one for each, "
                "model.register_comm_hook(DDPState(...), ddp_hook); with static_graph=True it must "
                "be told the model, DDPState(..., model)"
            )
        self._buckets.append(own_bucket)
        if self._names:
            if not self._is_bound:
                self._bind(own_bucket.buffer.device)
            self._start_exchange(own_bucket)
        elif bucket.is_last():
            # DDP's first buckets go through the model from its end to its beginning.
            everyone = [p for each in reversed(self._buckets) for p in each.parameters]
            self._names.update((p, f"parameter.{i}") for i, p in enumerate(everyone))
            self._bind(own_bucket.buffer.device)
            for each in self._buckets:
                self._start_exchange(each)
            self._watch(everyone)  # from the next pass on: before the first one nothing waits
        if bucket.is_last() or self._has_all_of_a_static_graph(bucket):
            self._finish()
        return own_bucket.future

    def _has_all_of_a_static_graph(self, bucket: dist.GradBucket) -> bool:
        """Whether all gradients are there in the first pass of a static graph.  DDP says of every
        bucket in it that it is the first and not the last."""
        if bucket.index() == len(self._buckets) - 1:
            return False
        expected = sum(p.requires_grad and n not in self._ignored for p, n in self._names.items())
        return sum(len(each.parameters) for each in self._buckets) == expected

    def _start_exchange(self, bucket: _HookBucket) -> None:
        names = [self._names[p] for p in bucket.parameters]
        bucket.results = dict(zip(names, bucket.views, strict=True))
        unused: Collection[str] = ()
        if self.reducer.finds_unused:
            unused = self._used.unused(bucket.results, bucket.parameters)
        gradients = {name: view.contiguous() for name, view in bucket.results.items()}
        self.reducer.start_together(gradients, unused)

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        if self.reducer.finds_unused:
            self._used.watch(parameters)

    def _finish(self) -> None:
        buckets, self._buckets = self._buckets, []
        directions = self.reducer.finish()
        self._used.forget()
        for bucket in buckets:
            for name, result in bucket.results.items():
                if (direction := directions[name]) is not result:
                    result.copy_(direction)
            bucket.future.set_result(bucket.buffer)


def check_method(method: Compressor, momentum: float | None, call: str) -> None:
    """Raise ``ConfigError`` if a method needs an optimizer of its own, or the momentum of one.  A
    hook sees neither.

    Args:
        call: the user's, with ``{}`` for the method.
    """
    check_partner(method, None, None)
    if method.takes_momentum and momentum is None and method.momentum is None:
        with_momentum = call.format(f"{type(method).__name__}(momentum=0.9)")
        raise ConfigError(
            f"{method.name} corrects momentum, and a hook knows nothing of the optimizer: write "
            f"{with_momentum} and give the optimizer momentum=0; or momentum=0.0 for error "
            "feedback alone"
        )


def _group_for(model: torch.nn.Module | None, given: Any) -> Any:
    """Return the process group to average over, ``None`` for the default one."""
    if not isinstance(given, dist.ProcessGroup | None):
        raise ConfigError(
            f"process_group is {type(given).__name__}, and must be a group that this rank belongs "
            "to: dist.new_group([...]), mesh.get_group(), or None for all ranks"
        )
    if not isinstance(model, DistributedDataParallel):
        return given
    own = model.process_group
    if given is None:
        return None if own is dist.group.WORLD else own
    theirs, ours = (sorted(dist.get_process_group_ranks(group)) for group in (own, given))
    if theirs != ours:
        raise ConfigError(
            f"DistributedDataParallel averages over ranks {theirs}, and process_group has ranks "
            f"{ours}: leave process_group out of DDPState, which takes the model's"
        )
    return given


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket of gradients, as a hook for DistributedDataParallel::

        state = DDPState("topk:density=0.01", model)
        model.register_comm_hook(state, ddp_hook)

    Args:
        state: a :class:`DDPState`, of this model alone.
        bucket: from DDP: gradients of floating point or complex, one after the other.

    Returns:
        A future of the bucket's averages, a flat tensor of the same length, dtype and device; the
        same bits on all ranks.

    Raises:
        ConfigError: ``state`` is something else, or belongs to another model.
        UnsupportedError: a gradient is sparse, or PyTorch's Python reducer calls the hook.
    """
    if not isinstance(state, DDPState):
        raise ConfigError(
            f"the hook's state is {type(state).__name__}: write "
            'model.register_comm_hook(DDPState("topk"), ddp_hook)'
        )
    return state._start(bucket)


watch_scale()
