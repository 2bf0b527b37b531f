"""Options as JSON, text and classes; and what is said to those who mistype them."""

import dataclasses
import json
import pickle
import re
from typing import ClassVar

import numpy as np
import pytest

from hvd_compress import (
    DGC,
    Compressor,
    ConfigError,
    ExponentialWarmup,
    NoCompression,
    StagedWarmup,
    TopK,
    UnboundError,
    as_compressor,
    from_config,
    method_names,
)
from hvd_compress.blocks import (
    Transform,
    allgather,
    allreduce,
    chain,
    ef21,
    error_feedback,
    fading_memory,
    momentum_after_averaging,
    momentum_correction,
    moving_average,
    random_k,
    sign,
    smoothing,
    top_k,
    uniform_dithering,
)
from hvd_compress.config import Configurable, lookup, names
from hvd_compress.engines.lockstep import World
from tests.method_table import ROWS

CONFIGURED = {
    **{key: row.method for key, row in ROWS.items()},
    "schedule": ExponentialWarmup("epoch", 2, 0.01, 3),
    "staged": StagedWarmup(densities=(1.0, 0.1)),
    "operator": top_k(StagedWarmup()),
    "nested": DGC(ExponentialWarmup("epoch")),
}


@pytest.mark.parametrize("thing", CONFIGURED.values(), ids=CONFIGURED)
def test_json_round_trip(thing):
    text = json.dumps(thing.to_config(), allow_nan=False)
    again = from_config(json.loads(text))
    assert again == thing
    assert type(again) is type(thing)
    assert hash(again) == hash(thing)
    assert repr(again) == repr(thing)
    assert json.dumps(again.to_config()) == text


def test_a_config_is_readable():
    assert TopK(0.05).to_config() == {
        "method": "topk",
        "density": 0.05,
        "values": "float32",
        "error_feedback": True,
        "algorithm": "allgather",
        "indices": "packed",
        "rows": "whole",
    }
    block = chain(error_feedback(), via=allgather(top_k(0.1))).to_config()
    assert block["method"] == "chain"
    assert block["transforms"] == [{"block": "error_feedback", "units": "gradient"}]
    assert block["via"]["select"]["density"] == 0.1


def test_defaults_may_be_left_out():
    assert from_config({"method": "dgc"}) == DGC()
    assert from_config({"method": "topk", "density": {"schedule": "staged"}}) == TopK(
        StagedWarmup()
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"density": 0.1}, "needs one of the keys"),
        ({"method": "dcg"}, "method must be one of .*'dgc'"),
        (
            {"method": "topk", "densty": 0.1},
            "topk has no option 'densty'; it has density, values",
        ),
        ({"method": "none", "x": 1}, "none has no option 'x'; it has algorithm"),
        ({"method": "natural", "x": 1}, "natural has no option 'x'; it has none"),
        ({"method": "topk", "density": 7}, r"density must be in \(0, 1\]"),
        ({"method": "chain", "transforms": [], "via": {"block": "nope"}}, "block must be one of"),
    ],
    ids=str,
)
def test_bad_configs(config, message):
    with pytest.raises(ConfigError, match=message):
        from_config(config)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("dgc", DGC()),
        ("none", NoCompression()),
        ("topk:density=0.05,values=float16", TopK(0.05, values="float16")),
        ("topk: density = 0.05 , error_feedback=false", TopK(0.05, error_feedback=False)),
        ("dgc:masking=False,momentum=none,min_size=0", DGC(masking=False, min_size=0)),
        ("dgc:clip_norm=1e-1,nesterov=true", DGC(clip_norm=0.1, nesterov=True)),
    ],
)
def test_methods_as_text(text, method):
    assert as_compressor(text) == method
    name, colon, options = text.partition(":")
    assert as_compressor(f" {name.upper()} {colon}{options}") == method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "method must be one of"),
        ("gzip", "method must be one of"),
        ("dgc:0.1", "dgc:option=value"),
        ("dgc:ratio=0.1", "dgc has no option 'ratio'"),
        ("dgc:density=high", "density"),
        ("dgc:nesterov=no", "nesterov"),
        ("topk:error_feedback=off", "error_feedback"),
        ("randomk:error_feedback=off", "error_feedback"),
        ("dcg", r"got 'dcg'; did you mean 'dgc'\?$"),
        ("top-k", r"did you mean 'topk'\?$"),
        ("topk:densty=0.1", r"did you mean 'density'\?$"),
        ("topk:values=flaot16", r"did you mean 'float16'\?$"),
        (
            "dgc:density=0.1,density=0.2",
            "'dgc:density=0.1,density=0.2' has the option density twice",
        ),
        ("topk: density = 0.1, density=0.1", "has the option density twice"),
        ("chain", r"cannot be written as a text: pass chain\(\.\.\.\)"),
    ],
)
def test_mistyped_text(text, message):
    with pytest.raises(ConfigError, match=message):
        as_compressor(text)


def test_an_error_lists_what_a_text_can_name_and_no_more():
    with pytest.raises(ConfigError) as caught:
        as_compressor("nothing like it")
    listed = re.findall(r"'([\w-]+)'", str(caught.value).partition("; got")[0])
    assert listed == method_names()
    for name in listed:
        if not name.startswith("test-"):  # tests register what is no method, too
            assert as_compressor(name).name == name
    assert "did you mean" not in str(caught.value)


def test_methods_as_classes_and_instances():
    assert as_compressor(DGC) == DGC()
    method = DGC(0.5)
    assert as_compressor(method) is method
    for wrong in (None, 0.1, int):
        with pytest.raises(ConfigError, match="no compression method"):
            as_compressor(wrong)


def test_the_registry():
    assert {"none", "fp16", "bf16", "topk", "randomk", "dgc", "chain"} <= set(names("method"))
    assert names("no such kind") == []
    assert lookup("method", "dgc") is DGC
    with pytest.raises(ConfigError, match="'dgc' is taken by DGC"):

        @dataclasses.dataclass(frozen=True)
        class Other(Compressor, name="dgc"):
            pass

    assert lookup("method", "dgc") is DGC


def test_a_class_may_be_made_again():
    """``dataclass(slots=True)`` and ``importlib.reload`` do that."""

    def make():
        class Again(Configurable, kind="method", name="test-again"):
            pass

        return Again

    make()
    assert lookup("method", "test-again") is not make()
    assert lookup("method", "test-again").__qualname__ == make().__qualname__


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DGC().density = 0.5


# Composition


def test_a_sum_of_different_coordinates_is_a_type_error():
    with pytest.raises(TypeError, match="allgather"):
        allreduce(select=top_k(0.1))
    with pytest.raises(TypeError, match="top_k"):
        allgather(random_k(0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chain(error_feedback(), via=top_k()), "not an aggregator"),
        (lambda: chain(allreduce(), via=allreduce()), "not a transform"),
        (lambda: chain(error_feedback(), error_feedback(), via=allreduce()), "the same in two"),
        (
            lambda: chain(momentum_correction(), momentum_after_averaging(), via=allreduce()),
            "keep a 'velocity'",
        ),
        (lambda: allreduce(wire="float8"), "wire"),
        (lambda: allgather(values="bfloat16"), "values"),
        (lambda: momentum_correction(1.0), "momentum"),
    ],
)
def test_chains_that_make_no_sense(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class note(Transform, name="test-note"):
    """Writes down when it is called."""

    label: str
    calls: ClassVar[list[str]] = []

    def update(self, x, state, context):
        self.calls.append(f"update {self.label}")
        return x + 1, state

    def settle(self, sent, state, context):
        self.calls.append(f"settle {self.label}")
        return state

    def finish(self, mean, state, context):
        self.calls.append(f"finish {self.label}")
        return mean * 2, state


def test_transforms_run_forwards_before_and_backwards_after_the_exchange():
    note.calls.clear()
    outcome = World(chain(note("a"), note("b"), via=allreduce()), 1).exchange([np.zeros(1)])[0]
    forwards = ["update a", "update b"]
    backwards = ["settle b", "finish b", "settle a", "finish a"]
    assert note.calls == forwards + backwards
    assert (outcome.mean.tolist(), outcome.update.tolist()) == ([2], [8])


# Binding


class Side:
    epoch = None

    def stats(self):
        return "stats"

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_a_bound_method_answers_for_its_one_optimizer():
    method, side = DGC(), Side()
    with pytest.raises(UnboundError, match="bound to 0 optimizers"):
        method.stats()
    method.bind(side)
    assert method.stats() == "stats"
    method.set_epoch(3)
    assert side.epoch == 3
    assert method == DGC()  # being bound is no option
    assert "_bound" not in pickle.loads(pickle.dumps(method)).__dict__
    other = Side()
    method.bind(other)
    with pytest.raises(UnboundError, match="bound to 2 optimizers"):
        method.set_epoch(1)
    del other
    assert method.stats() == "stats"


def test_horovods_own_interface_says_what_to_write():
    for call in (DGC.compress, DGC.decompress, TopK().compress):
        with pytest.raises(UnboundError, match=r"compression=(DGC|TopK)"):
            call(None)


def test_blocks_that_would_work_against_each_other():
    with pytest.raises(ConfigError, match=r"momentum_correction must stand before error_feed"):
        chain(error_feedback(), momentum_correction(0.9), via=allgather(top_k(0.1)))
    for memory in (fading_memory(1.0), ef21()):
        for gradients in (momentum_correction(0.9), moving_average(0.9), smoothing(0.9)):
            with pytest.raises(ConfigError, match=r"must stand before|must be the last"):
                chain(memory, gradients, via=allgather(top_k(0.1)))
        with pytest.raises(ConfigError, match="do the same in two ways"):
            chain(error_feedback(), memory, via=allgather(top_k(0.1)))
        with pytest.raises(ConfigError, match="unbiased=False"):
            chain(memory, via=allreduce(select=random_k(0.1), unbiased=True))
        method = chain(memory, via=allgather(uniform_dithering(1, None)))
        with pytest.raises(ConfigError, match="more than their norm"):
            World(method, 1).exchange([np.ones(100)])
    with pytest.raises(ConfigError, match="last"):
        chain(ef21(), error_feedback(), via=allreduce())
    with pytest.raises(ConfigError, match="scaled_sign"):
        World(chain(error_feedback(), via=allgather(sign())), 1).exchange([np.ones(100)])
    with pytest.raises(ConfigError, match="unbiased=False"):
        chain(error_feedback(), via=allreduce(select=random_k(0.1), unbiased=True))
