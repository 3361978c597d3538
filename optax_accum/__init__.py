"""Gradient accumulation for JAX as a pure optax transformation."""

from optax_accum._accumulate import (
    AccumulateState as AccumulateState,
    accumulate as accumulate,
    chain as chain,
    flush as flush,
    has_updated as has_updated,
)
from optax_accum._batch_stats import (
    pool_batch_collections as pool_batch_collections,
    pool_batch_stats as pool_batch_stats,
)

__version__ = "0.1.0"
