"""What is asked most, each as a few lines around `accumulate`, on data made here.

    python examples/recipes.py                           # all; about a minute on two cores
    python examples/recipes.py clip_after_window lamb

A recipe is a function without arguments that must be given, and returns figures, which its line
prints. "differs by" is the largest difference of a parameter from the big batch's.
"""

import argparse

from recipes_ecosystem import (
    continued_checkpoint,
    equinox_model,
    finite_average,
    logged_rate,
    schedule_free,
)
from recipes_memory import checkpoint, host_memory, planned_k
from recipes_once import averaged_weights, growing_window, lamb, tensorboard, warm_up
from recipes_privacy import differential_privacy
from recipes_window import clip_after_window, multi_task, token_weights

_ALL = (
    *(multi_task, token_weights, clip_after_window, differential_privacy),
    *(warm_up, lamb, averaged_weights, growing_window, tensorboard),
    *(finite_average, schedule_free, logged_rate, continued_checkpoint, equinox_model),
    *(checkpoint, planned_k, host_memory),
)
RECIPES = {recipe.__name__: recipe for recipe in _ALL}


def main(argv=None):
    parser = argparse.ArgumentParser(description="Run recipes and print their figures.")
    parser.add_argument(
        "names", nargs="*", type=known, metavar="NAME", help=f"of {', '.join(RECIPES)}; all"
    )
    for name in parser.parse_args(argv).names or RECIPES:
        figures = RECIPES[name]()
        print(f"{name}: {'; '.join(f'{key} {show(value)}' for key, value in figures.items())}")


def known(name):
    if name not in RECIPES:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(RECIPES)}; got {name!r}")
    return name


def show(value):
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
