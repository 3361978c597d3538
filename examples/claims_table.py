"""What claims.py trains, what of it each claim compares, and whether the claim held."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from cells import mean_and_error, plus_minus
from training import Arm

MARGIN = 1.0  # %-points of test error within which two trainings are alike
SHARPNESS_FACTOR, TIME_FACTOR = 1.1, 1.05  # the same for sharpness and for time
TIMES = 1.1, 4  # what articles give for an epoch against the big batch's
TIMED = "64x4", "256x1", "64x1"
YES, NO, CANNOT_TELL = "yes", "no", "cannot tell"


class Setting(NamedTuple):
    """What a training is made with, but for its seed; named "64x4/sgd/x2/cosine"."""

    arm: Arm
    optimizer: str = "sgd"
    rate: float = 1  # a multiple of the optimizer's own
    momentum: float = 0.9  # of SGD
    schedule: str = "cosine"
    warm_up: float = 0.05  # a part of the updates

    @property
    def is_averaged(self) -> bool:
        """Whether the mean of the last weights is tried too."""
        return self.schedule == "constant"

    @property
    def is_monitored(self) -> bool:
        """Whether the noise of its windows is measured."""
        return self == ACCUMULATED

    @property
    def has_sharpness(self) -> bool:
        """Whether the sharpness of the last weights is measured."""
        return self in (SMALL_PARTS, SMALL, SMALL_BIG)

    def __str__(self) -> str:
        names = [str(self.arm), self.optimizer, f"x{self.rate:g}", self.schedule]
        for name in ("momentum", "warm_up"):
            if getattr(self, name) != self._field_defaults[name]:
                names.append(f"{name}={getattr(self, name):g}")
        return "/".join(names)

    @property
    def label(self) -> str:
        """The name as a table has it, without what most settings share."""
        words = {
            "optimizer": self.optimizer,
            "rate": f"rate x{self.rate:g}",
            "momentum": f"momentum {self.momentum:g}",
            "schedule": f"{self.schedule} rate",
            "warm_up": f"warm-up {self.warm_up:.0%}",
        }
        usual = self._field_defaults
        own = [words[name] for name in words if getattr(self, name) != usual[name]]
        return ", ".join([str(self.arm), *own])


EIGHTS, THIRTY_TWO, EIGHT = map(Setting, (Arm(8, 4), Arm(32, 1), Arm(8, 1)))
ACCUMULATED, BIG = Setting(Arm(64, 4)), Setting(Arm(256, 1))
ROOT, LINEAR = 2, 4  # what the rate is multiplied by for k = 4
LESS_MOMENTUM = ACCUMULATED._replace(momentum=0.85)
CONSTANT = ACCUMULATED._replace(schedule="constant")
LARGER_K = CONSTANT._replace(arm=Arm(64, 8))
LONG_WARM_UP = CONSTANT._replace(warm_up=0.3)
SMALL_BIG, SMALL_PARTS, SMALL = map(Setting, (Arm(64, 1), Arm(16, 4), Arm(16, 1)))
ADAM, LAMB = (
    [Setting(Arm(128, 16), name, rate) for rate in (0.5, 1, 2)] for name in ("adam", "lamb")
)
SETTINGS = [
    *(EIGHTS, THIRTY_TWO, EIGHT, SMALL_BIG),
    *(setting._replace(rate=rate) for setting in (ACCUMULATED, BIG) for rate in (1, ROOT, LINEAR)),
    *(LESS_MOMENTUM, CONSTANT, LARGER_K, LONG_WARM_UP, SMALL_PARTS, SMALL),
    *(*ADAM, *LAMB),
]


def interval(values):
    """The mean and its 95 % t-interval, unbounded where there is one value."""
    mean, error = mean_and_error(values)
    half = math.inf if error is None else stats.t.ppf(0.975, len(values) - 1) * error
    return mean, mean - half, mean + half


# The rules: what an interval says of a claim.


def below(low, high):
    """The difference is below 0."""
    return YES if high < 0 else NO if low > 0 else CANNOT_TELL


def alike(low, high, margin=MARGIN, at=0.0):
    """The difference is within the margin."""
    if at - margin <= low and high <= at + margin:
        return YES
    return NO if low > at + margin or high < at - margin else CANNOT_TELL


def unlike(low, high):
    """The difference is outside of the margin."""
    return {YES: NO, NO: YES}.get(verdict := alike(low, high), verdict)


def alike_by(factor, at=1.0):
    return functools.partial(alike, margin=math.log(factor), at=math.log(at))


class Finding(NamedTuple):
    """A claim and the differences, one a seed, that it is judged by."""

    claim: str
    ran: str
    rule: Callable  # of the interval
    differences: list[float]  # %-points, or the logarithms of ratios
    is_ratio: bool = False

    @property
    def verdict(self) -> str:
        """Whether the claim held, as far as the whole interval says so."""
        return self.rule(*interval(self.differences)[1:])

    def __str__(self) -> str:
        values = interval(self.differences)
        if self.is_ratio:
            mean, low, high = (f"{math.exp(min(value, 99)):.2f}" for value in values)
        else:
            mean, low, high = (f"{value:+z.2f}" for value in values)
        unit = " x" if self.is_ratio else ""
        return f"{mean}{unit}" + (f" ({low} to {high})" if len(self.differences) > 1 else "")


def fluctuation(row):
    """How far a point of the curve is from a smooth one, in %-points, in its second half."""
    errors = [100 * point["test_error"] for point in row["curve"]]
    # Second differences know no trend; of points each so far from it they have six times the mean
    # square.
    bends = np.diff(errors[len(errors) // 2 :], n=2)
    return float(np.sqrt(np.mean(bends**2) / 6))


ERROR, AVERAGED, SHARPNESS = "test error", "test error of averaged weights", "sharpness"
MEASURES = {  # of a row
    ERROR: lambda row: 100 * row["test_error"],
    AVERAGED: lambda row: 100 * row["averaged_test_error"],
    SHARPNESS: lambda row: math.log(row["sharpness"]),  # so that differences are ratios
    "fluctuation": fluctuation,
}


def differences_of(values, others):
    """Differences by seed, of the seeds that both have."""
    return {seed: values[seed] - others[seed] for seed in sorted(values.keys() & others.keys())}


class Rows:
    """The rows of a run, by setting and seed."""

    def __init__(self, rows):
        self.by_setting = {}
        for row in rows:
            self.by_setting.setdefault(row["cell"].rpartition("/")[0], {})[row["seed"]] = row

    def values(self, setting, measure=ERROR):
        rows = self.by_setting.get(str(setting), {})
        return {seed: MEASURES[measure](row) for seed, row in rows.items()}

    def best(self, settings):
        """The setting whose mean error is the least; one of those that are finished."""

        def mean(setting):
            return np.mean([*self.values(setting).values()] or math.inf)

        return min(settings, key=mean)

    def compare(self, claim, rule, setting, other, measure=ERROR):
        differences = differences_of(self.values(setting, measure), self.values(other, measure))
        is_ratio = measure == SHARPNESS
        ran = f"{measure}: {setting.label} {'over' if is_ratio else 'less'} {other.label}"
        return Finding(claim, ran, rule, list(differences.values()), is_ratio)

    def rate(self, name, rate):
        """What claim 5 is judged by, for a rate so many times as high."""
        claim, effects = f"5. a higher rate is better, by {name}", []
        for setting in (ACCUMULATED, BIG):
            scaled = setting._replace(rate=rate)
            yield self.compare(f"{claim}, {setting.arm}", below, scaled, setting)
            effects.append(differences_of(self.values(scaled), self.values(setting)))
        yield Finding(
            f"{claim}: as much for {ACCUMULATED.arm} as for {BIG.arm}",
            f"what rate x{rate} does to the {ERROR}: {ACCUMULATED.arm} less {BIG.arm}",
            alike,
            list(differences_of(*effects).values()),
        )

    def averaging(self, setting):
        """What claim 7 is judged by."""
        differences = differences_of(self.values(setting, AVERAGED), self.values(setting))
        ran = f"{AVERAGED} less that of the last: {setting.label}"
        claim = f"7. averaging the last weights helps, {setting.label}"
        return Finding(claim, ran, below, list(differences.values()))


def time_findings(row):
    """What claim 4 is judged by."""
    parts, big, small = (np.log(row["seconds"][arm]) for arm in TIMED)
    epoch, ran = f"4. an epoch of {TIMED[0]} takes", f"seconds: {TIMED[0]} over {{}}".format
    for times in TIMES:
        claim, rule = f"{epoch} {times:g} x that of {TIMED[1]}", alike_by(TIME_FACTOR, times)
        yield Finding(claim, ran(TIMED[1]), rule, list(parts - big), is_ratio=True)
    claim, rule = f"{epoch} as long as that of {TIMED[2]}", alike_by(TIME_FACTOR)
    yield Finding(claim, ran(TIMED[2]), rule, list(parts - small), is_ratio=True)


def findings(rows, timed=()):
    """Each claim with what it is judged by; those whose cells are missing are left out.

    Args:
      rows: The cells of a run.
      timed: The row of `--time`, if there is one, in a list.
    """
    of = Rows(rows)
    calmer = functools.partial(of.compare, rule=below, other=CONSTANT, measure="fluctuation")
    as_sharp = functools.partial(
        of.compare, rule=alike_by(SHARPNESS_FACTOR), setting=SMALL_PARTS, measure=SHARPNESS
    )
    best_of_each = of.best(LAMB), of.best(ADAM)
    found = [
        of.compare("1. 8 x 4 generalises like 32", alike, EIGHTS, THIRTY_TWO),
        of.compare("2. 8 x 4 does not generalise like 8", unlike, EIGHTS, EIGHT),
        of.compare("3. 64 x 4 equals 256", alike, ACCUMULATED, BIG),
        *(finding for row in timed for finding in time_findings(row)),
        *of.rate("the root of k", ROOT),
        *of.rate("k", LINEAR),
        *(
            of.compare(
                f"5. k times the rate is better than the root, {setting.arm}",
                below,
                setting._replace(rate=LINEAR),
                setting._replace(rate=ROOT),
            )
            for setting in (ACCUMULATED, BIG)
        ),
        of.compare(
            "5. with k times the rate 256 ends like 64",
            alike,
            BIG._replace(rate=LINEAR),
            SMALL_BIG,
        ),
        of.compare(
            "6. momentum 0.85 is better than 0.9, at one rate", below, LESS_MOMENTUM, ACCUMULATED
        ),
        *map(of.averaging, (CONSTANT, LARGER_K, LONG_WARM_UP)),
        calmer("8. k = 8 calms the validation curve of k = 4", setting=LARGER_K),
        calmer("9. a longer warm-up calms it", setting=LONG_WARM_UP),
        as_sharp("10. accumulation is as sharp as the small batch", other=SMALL),
        as_sharp("10. accumulation is as sharp as the big batch", other=SMALL_BIG),
        of.compare(
            "11. LAMB is better than Adam at 2048, each at the best of three rates",
            below,
            *best_of_each,
        ),
    ]
    return [finding for finding in found if finding.differences]


def table(rows, timed=()):
    """The claims, in markdown."""
    lines = ["| claim | what we ran | difference (95 %) | held? |", "|---|---|---|---|"]
    for finding in findings(rows, timed):
        lines.append(f"| {finding.claim} | {finding.ran} | {finding} | {finding.verdict} |")
    return "\n".join(lines)


def errors_table(rows):
    """Test error by setting, with standard errors."""
    of = Rows(rows)
    lines = ["| setting | updates | test error, % | of averaged weights |", "|---|---|---|---|"]
    for setting in filter(lambda setting: str(setting) in of.by_setting, SETTINGS):
        shown = []
        for measure in (ERROR, AVERAGED) if setting.is_averaged else (ERROR,):
            values = list(of.values(setting, measure).values())
            shown.append(plus_minus(*mean_and_error(values)))
        updates = next(iter(of.by_setting[str(setting)].values()))["updates"]
        lines.append(f"| {setting.label} | {updates} | {' | '.join([*shown, ''][:2])} |")
    return "\n".join(lines)
