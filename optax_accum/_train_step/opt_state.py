"""The accumulator's state within the optimizer state of a train step."""

from typing import Any

from optax_accum._core.state import AccumulateState
from optax_accum._core.state_checks import checked_state


def accumulate_state(opt_state: Any) -> AccumulateState:
    """The accumulator's state in that of an `accumulate` or a `chain`."""
    while type(opt_state) is tuple and opt_state:
        opt_state = opt_state[-1]
    return checked_state(opt_state, AccumulateState)


def with_extras(opt_state: Any, **extras: Any) -> Any:
    """`opt_state` with these extras beside those of its accumulator."""
    if type(opt_state) is tuple:
        return *opt_state[:-1], with_extras(opt_state[-1], **extras)
    return opt_state._replace(extras={**opt_state.extras, **extras})
