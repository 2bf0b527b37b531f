"""benchmarks/quality.py: rows by hand, and short trainings."""

import dataclasses
import json
import math

import pytest
import torch

from benchmarks import quality, recipes
from benchmarks.quality import WARM_UP, Training
from hvd_compress.advisor.losses import FILE, RECIPES
from mpi_examples.study import half_width
from tests import jobs

METHODS = ("none", "topk:density=0.1")


def end(loss):
    return {"loss": loss, "score": 10 * loss, "sent": 100, "dense": 400, "steps": 7}


def test_the_best_learning_rate_counts_and_losses_are_compared_by_seed():
    wanted = list(quality.in_order("bytes", METHODS, [1], (1.0, 2.0), 2))
    known = {}
    for run in wanted:
        of_none = 1.0 + 2.0 * run.seed + 0.5 * (run.factor == 2)
        of_top_k = 1.25 + 3.0 * run.seed + 0.5 * (run.factor == 1)
        known[run.key] = end(of_none if run.method == "none" else of_top_k)
    # A rate that has not run with both seeds is compared by what both have.
    del known[Training("bytes", "none", 1, 2.0, 1).key]
    rows = quality.groups(known, wanted)
    dense, top_k = (rows["bytes", 1, method] for method in METHODS)
    assert (dense.factor, dense.losses) == (1.0, {0: 1.0, 1: 3.0})
    assert (top_k.factor, top_k.losses) == (2.0, {0: 1.25, 1: 4.25})
    assert quality.lost(top_k, dense) == ([25.0, pytest.approx(100 * 1.25 / 3)], "%")
    [table] = quality.tables(known, wanted)
    width = 12.71 * (100 * 1.25 / 3 - 25) / 2  # of two values, the deviation over sqrt(2)
    lost = f"+33.33 ± {width:.2f} %"
    expected = ["`topk:density=0.1`", "27.500", lost, "100 B", "4x", "2", "2"]
    assert table.splitlines()[-1].strip("| ").split(" | ") == expected


def test_accuracy_is_compared_in_points_and_divergence_is_said():
    rows = {"none": 98.0, "dgc": 97.5, "topk": 10.0}
    known = {
        Training("mnist", method, 1, 1.0, 0).key: end(0.1) | {"score": score}
        for method, score in rows.items()
    }
    known[Training("mnist", "topk", 1, 1.0, 0).key]["loss"] = math.inf
    wanted = [Training.of(key) for key in known]
    text = quality.tables(known, wanted)[0]
    assert "| `dgc` | 97.50 % | +0.50 points |" in text
    assert "| `topk` | 10.00 % | diverges |" in text
    losses = {row["method"]: row["lost"] for row in json.loads(quality.advice(known, wanted))}
    assert losses == {"none": 0.0, "dgc": 0.5, "topk": None}


def test_a_key_says_all_of_a_run():
    for method in (
        "none",
        f"dgc:density=0.01{WARM_UP}",
        "local_sgd:sync_every=4,compression=linear",
        "local_sgd:sync_every=2,unsent=stays,compression=onebit:column=512,via=allgather",
    ):
        run = Training("bytes(a.txt)", method, 0.25, 0.5, 3)
        assert Training.of(run.key) == run


def test_the_page_and_the_advisor_say_what_the_runs_say():
    known = json.loads(quality.RESULTS.read_text())
    wanted = [Training.of(key) for key in known]
    assert {run.recipe for run in wanted} <= set(quality.METHODS) == set(RECIPES)
    page = (jobs.ROOT / "docs/accuracy.md").read_text()
    for table in quality.tables(known, wanted):
        assert table in page, "python -m benchmarks.quality --minutes 0 --page docs/accuracy.md"
    advice = quality.advice(known, wanted)
    assert advice == FILE.read_text(), "python -m benchmarks.quality --minutes 0 --advice"


def test_tables_of_a_page_are_replaced():
    page = "before\n\n| bytes, 1x | x |\n|---|---|\n| old | 1 |\n\nafter | bytes\n"
    text = "| bytes, 1x | y |\n|---|---|\n| new | 2 |"
    assert quality.in_page(page, [text, "| mnist, 1x | z |"]) == page.replace(
        page[page.index("| bytes") : page.index("\n\nafter")], text
    )


def test_half_a_confidence_interval():
    assert half_width([10, 11, 12]) == pytest.approx(4.30 / math.sqrt(3))
    assert half_width([1]) == math.inf


def test_each_method_runs_once_before_other_rates_and_seeds():
    runs = list(quality.in_order("bytes", METHODS, [1, 4], (1.0, 2.0), 2))
    assert [run.method for run in runs[:2]] == [*METHODS]
    assert {(run.horizon, run.factor, run.seed) for run in runs[:2]} == {(1, 1.0, 0)}
    assert [run.seed for run in runs] == 8 * [0] + 8 * [1]


@pytest.mark.timeout(300)
def test_what_ran_is_kept(tmp_path):
    results, picture = tmp_path / "found.json", tmp_path / "quality.png"
    command = [jobs.python(), "-m", "benchmarks.quality", "--horizons", "0.002", "--seeds", "1"]
    command += ["--recipes", "bytes", "--factors", "1", "--results", str(results), "--methods"]
    command += [METHODS[1], "onebit_adam", "local_sgd:sync_every=2,compression=topk:density=0.1"]
    _, output = jobs.run(command, timeout=280)
    found = json.loads(results.read_text())
    assert [run["steps"] for run in found.values()] == [2, 2, 2, 2]
    dense = found["bytes 0.002x none lr*1 seed=0"]
    assert dense["sent"] == pytest.approx(dense["dense"], rel=0.01)
    assert all(run["sent"] < 0.7 * run["dense"] for run in list(found.values())[1:])
    local = next(run for key, run in found.items() if "local_sgd" in key)
    assert local["sent"] < 0.15 * local["dense"], "the model that is tested is not sent for it"
    again = [*command, "--minutes", "0", "--picture", str(picture)]
    _, said = jobs.run(again, timeout=60)
    table = output[output.index("| bytes, 0.002x") :]
    assert table.strip() in said, "kept, not trained again"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def convex():
    """A recipe of a layer, whose ranks have data of their own."""
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 8, generator=random), torch.randn(8, 4, generator=random)

    def batches(seed):
        while True:
            yield [(part, part @ w) for part in x.split(16)]

    def loss(model, batch):
        found = (model(batch[0]) - batch[1]).square().mean()
        return found, found

    def sgd(parameters, lr):
        return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)

    torch.manual_seed(0)
    return recipes.Recipe(
        lambda: torch.nn.Linear(8, 4), batches, loss, lambda: iter([(x, x @ w)]), sgd, 0.05, 40, 10
    )


def trained(kind, recipe, text, steps):
    torch.manual_seed(0)
    model = recipe.model()
    ranks, batches = kind(recipe, text, model, steps), recipe.batches(0)
    for _ in range(steps):
        ranks.step(next(batches), recipe.lr)
    ranks.end()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_ranks_in_one_process_train_as_one_does_with_all_of_the_data(convex):
    torch.manual_seed(0)
    model = convex.model()
    optimizer = convex.optimizer(model.parameters(), convex.lr)
    whole = next(convex.tests())
    for _ in range(10):
        optimizer.zero_grad()
        convex.loss(model, whole)[0].backward()
        optimizer.step()
    wanted = dict(model.named_parameters())
    for text in ("none", "dgc:density=1.0,min_size=1,masking=false"):
        found = trained(recipes.Gradients, convex, text, 10)
        assert all(torch.allclose(found[n], wanted[n], atol=1e-5) for n in wanted), text


def test_local_steps_that_meet_every_time_are_those_of_all_ranks(convex):
    plain = dataclasses.replace(convex, optimizer=lambda p, lr: torch.optim.SGD(p, lr))
    wanted = trained(recipes.Gradients, plain, "none", 10)
    found = trained(recipes.Rounds, plain, "local_sgd:sync_every=1", 10)
    assert all(torch.allclose(found[n], wanted[n], atol=1e-5) for n in wanted)


def test_one_bit_adam_is_adamw_before_its_freeze_and_sends_bits_after_it(convex):
    adam = dataclasses.replace(
        convex,
        model=lambda: torch.nn.Linear(8, 400),
        clip=None,
        loss=lambda model, batch: 2 * (model(batch[0]).square().mean(),),
        optimizer=lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.95), weight_decay=0.1),
    )
    wanted = trained(recipes.Gradients, adam, "none", 8)
    torch.manual_seed(0)
    model = adam.model()
    ranks, batches = recipes.OneBit(adam, "onebit_adam", model, 40), adam.batches(0)
    sent = []
    for _ in range(9):
        if len(sent) == 8:
            found = dict(model.named_parameters())
            assert all(torch.allclose(found[n], wanted[n], atol=1e-4) for n in wanted)
        before = ranks.world.record.bytes_sent
        ranks.step(next(batches), adam.lr)
        sent.append(ranks.world.record.bytes_sent - before)
    assert sent[8] < sent[7] / 4


def test_warm_ups_are_a_part_of_the_steps():
    assert recipes.with_warm_up(f"powersgd:rank=4{WARM_UP}", 1200).start.stage_length == 120
    density = recipes.with_warm_up(f"dgc:density=0.01{WARM_UP}", 1200).density
    assert (density(step=0, epoch=None), density(step=300, epoch=None)) == (0.25, 0.01)
