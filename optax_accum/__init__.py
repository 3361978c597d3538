"""Gradient accumulation for JAX as a pure optax transformation."""

from optax_accum._accumulate import accumulate as accumulate
from optax_accum._axis import varying as varying
from optax_accum._batch_stats import (
    pool_batch_collections as pool_batch_collections,
    pool_batch_stats as pool_batch_stats,
)
from optax_accum._canonical_conv import canonical_convolutions as canonical_convolutions
from optax_accum._chain import chain as chain, flush as flush
from optax_accum._checkpoint_segments import checkpoint_segments as checkpoint_segments
from optax_accum._contrastive import contrastive_value_and_grad as contrastive_value_and_grad
from optax_accum._evaluation import moment_ranges as moment_ranges, sharpness as sharpness
from optax_accum._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    loss_scale as loss_scale,
)
from optax_accum._microbatch import microbatch_value_and_grad as microbatch_value_and_grad
from optax_accum._momentum import accumulate_in_momentum as accumulate_in_momentum
from optax_accum._monitor import (
    adaptive_every_k as adaptive_every_k,
    window_metrics as window_metrics,
)
from optax_accum._planning import (
    MicrobatchPlan as MicrobatchPlan,
    PlanRow as PlanRow,
    plan_microbatches as plan_microbatches,
)
from optax_accum._scaling import (
    batch_growth as batch_growth,
    scale_hyperparams as scale_hyperparams,
)
from optax_accum._sharding import reshard_window as reshard_window, state_specs as state_specs
from optax_accum._state import AccumulateState as AccumulateState, has_updated as has_updated
from optax_accum._train_step import TrainStep as TrainStep, make_train_step as make_train_step

__version__ = "0.1.0"
