"""Assertions on the user's own: is the window the big batch, and what crosses devices?"""

from optax_accum.testing.collectives import (
    CollectiveCount as CollectiveCount,
    Collectives as Collectives,
    collectives as collectives,
)
from optax_accum.testing.equivalence import (
    assert_window_equivalence as assert_window_equivalence,
)
