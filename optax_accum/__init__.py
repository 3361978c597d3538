"""Gradient accumulation for JAX as a pure optax transformation."""

from optax_accum._accumulate import (
    AccumulateState as AccumulateState,
    accumulate as accumulate,
    chain as chain,
    flush as flush,
    has_updated as has_updated,
)
from optax_accum._axis import varying as varying
from optax_accum._batch_stats import (
    pool_batch_collections as pool_batch_collections,
    pool_batch_stats as pool_batch_stats,
)
from optax_accum._sharding import reshard_window as reshard_window, state_specs as state_specs

__version__ = "0.1.0"
