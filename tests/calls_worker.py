"""``mpirun -np 2 python calls_worker.py FILE METHOD ... -- METHOD ...``: the functions of ours that
a steady step of an optimizer enters, polls not counted, as JSON: for 10 and 40 matrices, which are
one bucket, and, with the methods that come last, for the tensors of ResNet-50."""

from __future__ import annotations

import collections
import json
import sys
import threading
from pathlib import Path

import torch

import hvd_compress.torch.mpi as hvd
from hvd_compress.advisor.shapes import resnet50

ROOT = Path(hvd.__file__).parent.parent.parent
OURS = (f"{ROOT}/hvd_compress/", f"{ROOT}/torch_impl/")
#: how often these look at what is under way depends on the other ranks
POLLS = {"poll", "under_way"}
WAITS = {f"{ROOT}/hvd_compress/mpi/transport/{name}.py" for name in ("progress", "notes")}
#: the ranks compare their calls in the first few steps only, as HVD_COMPRESS_CHECKS says
STEPS = 8


def calls_of(method: str, shapes: list[tuple[int, ...]]) -> collections.Counter[str]:
    torch.manual_seed(hvd.rank())
    own = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    sgd = torch.optim.SGD(own, lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, compression=method)
    numbers = [torch.randn(shape) for shape in shapes]
    found: collections.Counter[str] = collections.Counter()

    def note(frame, event, _):
        code, path = frame.f_code, frame.f_code.co_filename
        is_ours = path.startswith(OURS) and path not in WAITS
        if event == "call" and is_ours and code.co_name not in POLLS:
            name = f"{Path(path).relative_to(ROOT)}:{code.co_firstlineno} {code.co_name}"
            found[name] += 1

    for step in range(STEPS):
        loss = sum((p * x).sum() for p, x in zip(own, numbers, strict=True))
        if step == STEPS - 1:  # in autograd's threads, too
            threading.setprofile(note)
            sys.setprofile(note)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
        threading.setprofile(None)
        optimizer.zero_grad()
    return found


def main() -> None:
    file, *methods = sys.argv[1:]
    number = methods.index("--")
    hvd.init()
    torch.set_num_threads(1)
    small = {n: [(64, 64)] * n for n in (10, 40)}
    large = small | {"resnet50": [*resnet50().values()]}
    models = dict.fromkeys(methods[:number], small) | dict.fromkeys(methods[number + 1 :], large)
    found = {
        method: {name: calls_of(method, shapes) for name, shapes in its.items()}
        for method, its in models.items()
    }
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
