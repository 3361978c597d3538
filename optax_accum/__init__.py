"""Gradient accumulation for JAX as a pure optax transformation."""

from optax_accum._accumulate import accumulate as accumulate
from optax_accum._components.loss_scale import (
    DynamicLossScale as DynamicLossScale,
    loss_scale as loss_scale,
)
from optax_accum._components.monitor import (
    adaptive_every_k as adaptive_every_k,
    window_metrics as window_metrics,
)
from optax_accum._core.chain import chain as chain, flush as flush
from optax_accum._core.state import AccumulateState as AccumulateState, has_updated as has_updated
from optax_accum._devices.axis import varying as varying
from optax_accum._devices.sharding import (
    reshard_window as reshard_window,
    state_specs as state_specs,
)
from optax_accum._in_call.checkpointing import checkpoint_segments as checkpoint_segments
from optax_accum._in_call.contrastive import (
    contrastive_value_and_grad as contrastive_value_and_grad,
)
from optax_accum._in_call.convolutions import canonical_convolutions as canonical_convolutions
from optax_accum._in_call.microbatch import microbatch_value_and_grad as microbatch_value_and_grad
from optax_accum._in_call.planning import (
    MicrobatchPlan as MicrobatchPlan,
    PlanRow as PlanRow,
    plan_microbatches as plan_microbatches,
)
from optax_accum._train_step.train_step import (
    TrainStep as TrainStep,
    make_train_step as make_train_step,
)
from optax_accum._training.batch_stats import (
    pool_batch_collections as pool_batch_collections,
    pool_batch_stats as pool_batch_stats,
)
from optax_accum._training.evaluation import moment_ranges as moment_ranges, sharpness as sharpness
from optax_accum._training.hyperparams import (
    batch_growth as batch_growth,
    scale_hyperparams as scale_hyperparams,
)
from optax_accum._training.momentum import accumulate_in_momentum as accumulate_in_momentum

__version__ = "0.1.0"
