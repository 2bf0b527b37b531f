"""The code of users of PyTorch around an optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from hvd_compress.torch import ConfigError, MismatchError, UnsupportedError
from tests.scenarios.common import (
    as_distributed,
    as_plain,
    assert_same_everywhere,
    batch,
    begin,
    distribute,
    make_model,
    sgd,
    train,
)
from tests.scenarios.driver import hvd, is_mpi

METHODS = ("topk:density=0.5", "none", "powersgd")


class _Adapted(torch.nn.Module):
    """Adapters beside a base whose elements are elsewhere, as LoRA has them over quantised ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        base = torch.randn(6, 4)
        self.base = torch.nn.Parameter(TwoTensor(base, base.clone()), requires_grad=False)
        self.spare = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
        self.down = torch.nn.Parameter(torch.randn(4, 2))
        self.up = torch.nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        return x @ (self.base.a + 0.0) @ (torch.eye(4) + self.down @ self.up)


def _loss(model, rank, step):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(x).square().mean()


def frozen_parameters_may_be_anything() -> None:
    def program(user, method):
        model = _Adapted()
        trained = model.parameters() if user.distributes else [model.down, model.up]
        inner = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        optimizer = user.distribute(inner, model, method)
        user.train(model, optimizer, range(3), _loss)
        return optimizer, model

    for method in METHODS:
        optimizer, model = as_distributed(program, method)
        if method == "none":
            _, reference = as_plain(program, method)
            torch.testing.assert_close(model.down, reference.down)
            torch.testing.assert_close(model.up, reference.up)
        assert_same_everywhere([model.down, model.up])
        optimizer.consolidate_state_dict()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.add_param_group({"params": [torch.nn.Parameter(model.base.data, False)]})
        _loss(model, hvd.rank(), 3).backward()
        optimizer.step()


def what_is_trained_is_plain() -> None:
    for method in METHODS:
        model, optimizer = begin(method, _Adapted(), lr=0.01, momentum=0.0)
        extra = torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
        with pytest.raises(UnsupportedError, match=r"'added\.1\.0', which is a TwoTensor.*LoRA"):
            optimizer.add_param_group({"params": [extra]})
        assert len(optimizer.param_groups) == 1
        _loss(model, hvd.rank(), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.base.requires_grad_(True)
        _loss(model, hvd.rank(), 1).backward()
        with pytest.raises(UnsupportedError, match=r"'base'.*requires_grad_\(False\)"):
            optimizer.step()
        with pytest.raises(UnsupportedError, match="'base'"):
            begin(method, model)


def local_steps_leave_frozen_parameters_alone() -> None:
    model = _Adapted()
    inner, method = sgd(model, momentum=0.0), hvd.LocalSGD(sync_every=2)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), method=method)
    train(model, optimizer, range(4), _loss)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_everywhere([model.down, model.up])
    model.base.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="'base'"):
        optimizer.step()


def groups_that_are_changed_by_hand_are_an_error_everywhere() -> None:
    def changed(optimizer, kind):
        group = optimizer.param_groups[0]
        p = group["params"][0]
        if kind == "replaced":
            optimizer.state.pop(p)
            group["params"][0] = torch.nn.Parameter(torch.cat([p.detach(), p.detach()[:2]]))
        elif kind == "taken out":
            del optimizer.param_groups[1]
        elif kind == "put in":
            optimizer.param_groups.append({**group, "params": [torch.nn.Parameter(p.detach())]})
        return group["params"][0]

    def backward(p):
        (p * (1.0 + hvd.rank())).square().sum().backward()

    def made():
        parameters = [torch.nn.Parameter(torch.ones(6, 3)) for _ in range(2)]
        adam = torch.optim.Adam([{"params": [p]} for p in parameters])
        return adam, hvd.DistributedOptimizer(adam, compression="topk:density=0.5"), parameters[0]

    for kind in ("replaced", "taken out", "put in"):
        for in_between in (False, True):
            adam, optimizer, p = made()
            backward(p)
            optimizer.step()
            optimizer.zero_grad()
            if in_between:
                backward(p)
            p = changed(optimizer, kind)
            if not in_between:
                backward(p)
            with pytest.raises(ConfigError, match=r"param_groups .* by hand.*add_param_group"):
                optimizer.step()
            with pytest.raises(ConfigError, match="by hand"):
                optimizer.state_dict()
            optimizer = hvd.DistributedOptimizer(adam, compression="topk:density=0.5")
            optimizer.zero_grad()
            before = p.detach().clone()
            backward(p)
            optimizer.step()
            assert not torch.equal(p.detach(), before)
            assert_same_everywhere([p])
    if hvd.size() > 1:  # all ranks learn that one differs
        _, optimizer, p = made()
        p = changed(optimizer, "put in" if hvd.rank() == 1 else "nothing")

        def step():
            backward(p)  # where engines compare at once the first time
            optimizer.step()

        with pytest.raises(MismatchError, match="param_groups"):
            step()


def local_steps_name_parameters_that_were_put_in_by_hand() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=0.1), method=hvd.LocalSGD(sync_every=2)
    )
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match="by hand"):
        optimizer.step()


def a_model_or_a_whole_step_may_be_compiled() -> None:
    """It has the bits of one that is not; what exchanges is left as it is, so "eager" shows it."""

    def trained(method, backend=None, autograd=False, sam=False, whole=True):
        torch._dynamo.reset()
        plain = make_model()
        model = plain if whole else torch.compile(plain, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if method == "local":
            optimizer = hvd.DistributedOptimizer(optimizer, method=hvd.LocalSGD(sync_every=2))
        else:
            optimizer = distribute(optimizer, model, method)
        ascent = hvd.SAM(model, rho=0.1)

        def step(x, y):
            def loss_of():
                return torch.nn.functional.cross_entropy(model(x), y)

            optimizer.zero_grad()
            if sam:
                ascent.backward(loss_of)
            else:
                loss_of().backward()
            optimizer.step()

        compiled = backend is not None and whole
        function = torch.compile(step, backend=backend) if compiled else step
        with torch._dynamo.config.patch(compiled_autograd=autograd):
            for number in range(3):
                function(*batch(hvd.rank(), number))
        return list(plain.parameters())

    rows = (
        ("topk:density=0.1", {"backend": "aot_eager", "whole": False}),
        ("topk:density=0.1", {"backend": "aot_eager"}),
        ("topk:density=0.1", {"backend": "eager", "autograd": True}),
        ("local", {"backend": "eager"}),
        ("none", {"backend": "eager", "sam": True}),
    )
    # Horovod has a thread of its own beside the compiler; what is compiled does not matter.
    for method, options in rows if is_mpi else rows[1:2]:
        found = trained(method, **options)
        expected = trained(method, sam=options.get("sam", False))
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def gradients_may_have_a_dtype_of_their_own() -> None:
    """The average has it, also on a rank that has no gradient, whose zeros count."""
    if not hasattr(torch.nn.Parameter(torch.ones(1)), "grad_dtype"):
        print(f"PyTorch {torch.__version__} knows no grad_dtype")
        return
    for own, theirs in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        for method in ("none", "topk:density=1.0"):
            p = torch.nn.Parameter(torch.ones(6, dtype=own))
            p.grad_dtype = theirs
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([p], lr=0.5), [("p", p)], compression=method
            )
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for step in range(2):
                optimizer.zero_grad()
                if step == 0 or hvd.rank() == 0:
                    (p * 4).sum().backward()
                optimizer.synchronize()
                share = 4.0 if step == 0 else 4.0 / hvd.size()
                assert p.grad.dtype == theirs
                torch.testing.assert_close(p.grad, torch.full((6,), share, dtype=theirs))
                with optimizer.skip_synchronize():
                    optimizer.step()
            optimizer.consolidate_state_dict()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    p = torch.nn.Parameter(torch.ones(6))
    p.grad_dtype = None
    with pytest.raises(UnsupportedError, match=r"'p' has grad_dtype=None.*p\.grad_dtype"):
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.5), [("p", p)], compression="topk")


class _Lookahead(torch.optim.Optimizer):
    """Around another optimizer, as packages have it, with a state dict of a form of its own."""

    def __init__(self, optimizer, steps=2):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.steps, self.count = optimizer, steps, 0
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.steps == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for p, slow in zip(fast, self.slow, strict=True):
                    p.copy_(slow.lerp_(p, 0.5))
        return loss

    def state_dict(self):
        return {"fast": self.optimizer.state_dict(), "slow": self.slow}


class _Counting(torch.optim.SGD):
    """Its state dict has an entry beside PyTorch's own."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        super().load_state_dict(state_dict)


class _Bare(torch.optim.SGD):
    def state_dict(self):
        raise RuntimeError("not consolidated")


def optimizers_around_others_say_what_to_wrap() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    for optimizer in (_Lookahead(inner), _Bare(model.parameters(), lr=0.05)):
        name = type(optimizer).__name__
        with pytest.raises(UnsupportedError, match=rf"{name}\(hvd\.DistributedOptimizer"):
            distribute(optimizer, model, "topk:density=0.1")
        with pytest.raises(UnsupportedError, match=rf"{name}\(hvd\.DistributedOptimizer\(inner"):
            hvd.DistributedOptimizer(optimizer, method=hvd.LocalSGD(sync_every=2))
    train(model, _Lookahead(distribute(inner, model, "topk:density=0.1")), range(4))
    assert_same_everywhere(model)


def entries_of_the_users_own_are_saved_and_loaded() -> None:
    model = make_model()
    optimizer = distribute(_Counting(model.parameters(), lr=0.05), model, "topk:density=0.1")
    train(model, optimizer, range(3))
    optimizer.consolidate_state_dict()
    saved = copy.deepcopy(optimizer.state_dict())
    again = distribute(_Counting(model.parameters(), lr=0.05), model, "topk:density=0.1")
    again.load_state_dict(saved)
    assert (optimizer.count, again.count) == (3, 3)
