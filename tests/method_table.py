"""One row per method and set of options that matters; the law kit runs over all of them."""

from typing import Any, NamedTuple

from hvd_compress import (
    BF16,
    DGC,
    EF21,
    FP8,
    FP16,
    LGC,
    QSGD,
    After,
    Compressor,
    EFSignSGD,
    LinearQuantization,
    NaturalCompression,
    NaturalDithering,
    NoCompression,
    OkTopk,
    OneBit,
    OneBitAdamCompression,
    PowerSGD,
    RandomK,
    ScaleCom,
    SignSGD,
    Signum,
    StagedWarmup,
    TernGrad,
    Threshold,
    TopK,
    ZeroOneAdamCompression,
    partition,
    rule,
    switch,
)
from hvd_compress.backends import backend_of
from hvd_compress.blocks import (
    allgather,
    allreduce,
    alltoall,
    chain,
    clip_by_local_norm,
    contraction,
    ef21,
    error_feedback,
    linear,
    momentum_after_averaging,
    momentum_correction,
    natural,
    natural_dithering,
    plus_minus,
    rounding,
    scaled_sign,
    threshold,
    top_k,
    uniform_dithering,
)

# Largest relative error of rounding a sum to the type in which it travels.
IN_FLOAT16 = 2.0**-11
IN_BFLOAT16 = 2.0**-8
# Sums of products in float32, in another order on each side.
LOW_RANK: dict[str, Any] = {"tolerance": 1e-5, "agreement": 1e-3}
# Sums of products: in float64 for all ranks, and in float32 on each, in another order there.
# Where a derivative is as good as zero, its sign decides where the first step of Adam goes.
TRAINED: dict[str, Any] = {"tolerance": 1e-5, "agreement": 0.02}


def plain_feedback(gradient: Any, state: dict[str, Any], context: Any) -> Any:
    """The input, or what waits, while the residual waits in some steps."""
    return backend_of(gradient).widen(gradient) + state["residual"]


class Row(NamedTuple):
    method: Compressor
    tolerance: float = 0.0
    context: dict[str, Any] = {}
    agreement: float = 1e-6
    #: whether its messages mean something without the other ranks or rounds, as ``encode`` says
    encodes: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """For ``check_laws``."""
        own = {"tolerance": self.tolerance, "agreement": self.agreement, "encodes": self.encodes}
        return {**own, **self.context}


MOMENTUM = {"momentum": 0.9}
NESTEROV = {"momentum": 0.9, "nesterov": True}

ROWS = {
    "none": Row(NoCompression()),
    "fp16": Row(FP16(), IN_FLOAT16),
    "bf16": Row(BF16(), IN_BFLOAT16),
    "topk": Row(TopK()),
    "topk-sampled": Row(TopK(density=0.05)),
    "topk-half": Row(TopK(density=0.5)),
    "topk-fp16-values": Row(TopK(density=0.05, values="float16")),
    "topk-no-error-feedback": Row(TopK(density=0.05, error_feedback=False)),
    "topk-packed": Row(TopK(density=0.05, indices="packed")),
    "dgc-packed": Row(DGC(density=0.02, indices="packed", min_size=0), context=MOMENTUM),
    "threshold-packed": Row(Threshold(tau=1.5, indices="packed")),
    "topk-all": Row(TopK(density=1.0)),
    "randomk": Row(RandomK(density=0.1)),
    "randomk-unbiased": Row(RandomK(density=0.1, error_feedback=False)),
    "randomk-bfloat16": Row(RandomK(density=0.1, wire="bfloat16"), IN_BFLOAT16),
    "randomk-float16": Row(RandomK(density=0.1, wire="float16"), IN_FLOAT16),
    "randomk-own": Row(RandomK(density=0.1, shared=False)),
    "randomk-own-unbiased": Row(RandomK(density=0.1, error_feedback=False, shared=False)),
    "randomk-own-float16": Row(RandomK(density=0.1, shared=False, wire="float16")),
    "dgc": Row(DGC(density=0.02), context=MOMENTUM),
    "dgc-nesterov": Row(DGC(density=0.02), context=NESTEROV),
    "dgc-momentum-given": Row(DGC(density=0.02, momentum=0.5, nesterov=False), context=NESTEROV),
    "dgc-no-masking": Row(DGC(density=0.02, masking=False), context=MOMENTUM),
    "dgc-fp16-values": Row(DGC(density=0.02, values="float16", min_size=0), context=MOMENTUM),
    "dgc-clip-norm": Row(DGC(density=0.02, clip_norm=1.0, min_size=0), context=MOMENTUM),
    "dgc-small-float16": Row(DGC(density=0.02, small="float16"), IN_FLOAT16, context=MOMENTUM),
    "dgc-small-sparse": Row(DGC(density=0.02, small="sparse"), context=MOMENTUM),
    "dgc-small-int8": Row(DGC(density=0.02, small="int8"), context=MOMENTUM),
    "dgc-compact": Row(DGC.compact(density=0.02), context=MOMENTUM),
    "topk-4bit": Row(TopK(density=0.05, values="4bit")),
    "dgc-min-size-0": Row(DGC(density=0.02, min_size=0), context=MOMENTUM),
    "dgc-warmup-by-step": Row(
        DGC(density=StagedWarmup(densities=(1.0, 0.25, 0.02)), min_size=0), context=MOMENTUM
    ),
    "dgc-warmup-by-epoch": Row(
        DGC(density=StagedWarmup("epoch", 1, (0.25, 1.0, 0.02)), min_size=0), context=NESTEROV
    ),
    "powersgd": Row(PowerSGD(), **LOW_RANK),
    "powersgd-rank-4": Row(PowerSGD(rank=4, min_compression_rate=1), **LOW_RANK),
    "powersgd-cold": Row(PowerSGD(rank=2, warm_start=False, error_feedback=False), **LOW_RANK),
    "powersgd-alternate": Row(
        PowerSGD(rank=2, min_compression_rate=1, alternate=True), **LOW_RANK, encodes=False
    ),
    "powersgd-qr": Row(PowerSGD(rank=3, min_compression_rate=1, orthogonalise="qr"), **LOW_RANK),
    "powersgd-later": Row(PowerSGD(rank=2, start=2), **LOW_RANK),
    "onebit": Row(OneBit()),
    "onebit-short-columns": Row(OneBit(column=16)),
    "onebit-allgather": Row(OneBit(via="allgather")),
    "onebit-later": Row(OneBit(start=1)),
    "qsgd": Row(QSGD()),
    "qsgd-l2": Row(QSGD(levels=1, bucket=None, norm="l2")),
    "terngrad": Row(TernGrad()),
    "terngrad-unbiased": Row(TernGrad(clip=None)),
    "natural": Row(NaturalCompression()),
    "natural-dithering": Row(NaturalDithering()),
    "fp8": Row(FP8()),
    "fp8-e5m2": Row(FP8(format="e5m2", bucket=None)),
    "linear": Row(LinearQuantization()),
    "linear-6": Row(LinearQuantization(bits=6, column=None)),
    "signsgd": Row(SignSGD(), encodes=False),
    "signum": Row(Signum(), context=MOMENTUM, encodes=False),
    "signum-nesterov": Row(Signum(), context=NESTEROV, encodes=False),
    "efsignsgd": Row(EFSignSGD()),
    "efsignsgd-allgather": Row(EFSignSGD(via="allgather")),
    "threshold": Row(Threshold(tau=1.5)),
    "threshold-sign": Row(Threshold(tau=0.25, send="sign")),
    "scalecom": Row(ScaleCom(density=0.05)),
    "oktopk": Row(OkTopk(density=0.05), encodes=False),
    "oktopk-two-steps": Row(OkTopk(density=0.3, threshold_every=2), encodes=False),
    "oktopk-float16": Row(OkTopk(density=0.1, values="float16", threshold_every=2), encodes=False),
    "lgc": Row(
        LGC(density=0.05, learn=1, code=2, min_size=4), context=MOMENTUM, **TRAINED, encodes=False
    ),
    "lgc-server": Row(
        LGC(density=0.03, learn=0, code=1, via="server", decoders=2, innovation=0.1),
        context=NESTEROV,
        **TRAINED,
        encodes=False,
    ),
    "lgc-nothing-lost": Row(
        LGC(0.03, learn=0, code=1, keep=1.0), context=MOMENTUM, **TRAINED, encodes=False
    ),
    "onebit-adam": Row(OneBitAdamCompression(freeze_step=1), encodes=False),
    "onebit-adam-all-sizes": Row(
        OneBitAdamCompression(freeze_step=2, norm="l2", min_size=0), encodes=False
    ),
    "onebit-adam-by-epoch": Row(
        OneBitAdamCompression(0.5, After("epoch", 1), min_size=0), encodes=False
    ),
    "zero-one-adam": Row(
        ZeroOneAdamCompression(var_update_scaler=1, min_size=0),
        context={"went_in": plain_feedback},
        encodes=False,
    ),
    "ef21": Row(EF21(density=0.05), encodes=False),
    "ef21-later": Row(EF21(density=0.05, start=1, average=0.5), encodes=False),
    "ef21-codes": Row(EF21(density=0.1, values=natural()), encodes=False),
    "chain-ef21-dense": Row(chain(ef21(), via=alltoall(scaled_sign())), encodes=False),
    "partition": Row(
        partition(
            rule(OneBit(), ndim=2),
            rule(DGC(density=0.05), min_size=20),
            otherwise=EF21(average=0.9),
        ),
        context=MOMENTUM,
        encodes=False,
    ),
    "switch": Row(switch("none", TopK(density=0.05), 1)),
    "chain-codes-of-top-k": Row(
        chain(
            momentum_correction(0.9),
            error_feedback(),
            via=allgather(top_k(0.05), natural_dithering()),
        )
    ),
    "chain-contraction": Row(
        chain(error_feedback(), via=alltoall(contraction(uniform_dithering(1, None))))
    ),
    "chain-rounding": Row(
        chain(error_feedback(), via=allgather(top_k(0.1), rounding(3.0, biased=True)))
    ),
    "chain-rounding-unbiased": Row(chain(via=alltoall(rounding(1.5)))),
    "chain-levels": Row(
        chain(via=allgather(threshold(0.5), contraction(rounding(levels=(0.5, 2.0, 8.0)))))
    ),
    "chain-linear": Row(chain(error_feedback(), via=alltoall(linear(column=32)))),
    "chain-linear-of-top-k": Row(chain(error_feedback(), via=allgather(top_k(0.05), linear(4)))),
    "chain-plus-minus": Row(chain(via=allgather(threshold(0.25), plus_minus(0.25)))),
    "chain-l2-sign": Row(chain(via=alltoall(scaled_sign("l2")))),
    "chain": Row(
        chain(
            clip_by_local_norm(2.0, scale="rank"),
            momentum_correction(0.8, nesterov=True, masking=False),
            error_feedback(),
            via=allgather(top_k(0.1), values="float16"),
        )
    ),
    "chain-bfloat16-error-feedback": Row(
        chain(error_feedback(), via=allreduce("bfloat16")), IN_BFLOAT16
    ),
    "chain-momentum-after": Row(
        chain(error_feedback(), momentum_after_averaging(), via=allgather(top_k(0.1))),
        context=MOMENTUM,
        encodes=False,
    ),
}
