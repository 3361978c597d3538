"""Gradient accumulation for JAX as a pure optax transformation."""

from optax_accum._accumulate import (
    AccumulateState as AccumulateState,
    accumulate as accumulate,
    chain as chain,
    flush as flush,
    has_updated as has_updated,
)

__version__ = "0.1.0"
