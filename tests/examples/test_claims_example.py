"""The experiment on claims: its trainings, its verdicts, and what it writes and keeps."""

import contextlib
import io
import json
import math
import re

import jax
import numpy as np
import pytest
from matplotlib import pyplot as plt

import claims as example
import claims_models
import claims_table
import image_data
from claims_table import CANNOT_TELL, NO, SETTINGS, YES, Setting
from training import Arm

pytestmark = pytest.mark.usefixtures("compile_quickly")

IMAGES = image_data.load("sample").head(128, 32)
SIZES = ["--train-size", "128", "--test-size", "32"]
ARGS = example.parse_args([*SIZES, "--cells", "16x4/sgd/x1/cosine/0"])


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """Sharpness of fewer images, and in fewer directions."""
    monkeypatch.setattr(claims_models, "SHARPNESS_IMAGES", 16)
    monkeypatch.setattr(claims_models, "DIRECTIONS", 2)


# What is trained.


def test_names_are_unique_and_a_cell_is_read_back_from_its_name():
    cells = example.grid(example.parse_args(["--full"]))
    assert len(cells) == len(set(map(str, cells))) == 6 * len(SETTINGS) == 132
    assert [example.parse_cell(str(cell)) for cell in cells] == cells
    assert len({setting.label for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_rate_grows_evenly_from_the_first_update_and_then_falls_or_stays(schedule):
    setting = Setting(Arm(64, 4), "adam", rate=2, schedule=schedule, warm_up=0.1)
    peak = 2 * claims_models.RATES["adam"]
    rate = claims_models.schedule_of(setting, updates=40)
    values = np.array([rate(i) for i in range(41)])
    np.testing.assert_allclose(values[:5] / peak, [0.25, 0.4375, 0.625, 0.8125, 1], rtol=1e-6)
    if schedule == "constant":
        np.testing.assert_allclose(values[5:], peak, rtol=1e-6)
    else:
        assert (np.diff(values[4:]) < 0).all()
        assert values[-1] == pytest.approx(0, abs=1e-9)


def test_averaged_weights_are_the_mean_after_each_of_the_last_updates():
    setting = Setting(Arm(4, 2), schedule="constant")
    trainer = claims_models.new_trainer(setting, IMAGES, 0, updates=8)
    after = []
    for window in np.arange(64).reshape(8, 2, 4):
        for part in window:
            trainer.micro_step(IMAGES.train_images[part], IMAGES.train_labels[part])
        after.append(jax.device_get(trainer.params))
    want = jax.tree.map(lambda *each: np.mean(each, 0), *after[-2:])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), trainer.rest[1], want
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(Arm(16, 1)),
        Setting(Arm(64, 4)),
        Setting(Arm(64, 4), "lamb", schedule="constant"),
    ],
    ids=str,
)
def test_a_cell_trains_and_its_row_has_what_the_table_reads(setting):
    size = max(setting.arm.effective_batch, 128)
    images = image_data.load("sample").head(size + 7, 32)
    row = json.loads(json.dumps(example.train(example.Cell(setting, 3), images, ARGS)))
    assert row["cell"] == f"{setting}/3"
    assert row["train_images"] == 2 * size  # whole windows, two epochs
    assert row["updates"] == 2 * size // setting.arm.effective_batch
    assert row["curve"][-1] == {"updates": row["updates"], "test_error": row["test_error"]}
    assert ("averaged_test_error" in row) == setting.is_averaged
    measures = [claims_table.ERROR]
    measures += [claims_table.AVERAGED] * setting.is_averaged
    measures += [claims_table.SHARPNESS] * setting.has_sharpness
    for measure in measures:
        assert math.isfinite(claims_table.MEASURES[measure](row))
    if setting.is_monitored:
        assert [point["updates"] for point in row["noise"]] == [1, 2]
        assert all(map(math.isfinite, (row["noise"][-1][name] for name in example.METRICS)))


# What is made of it.


def test_the_interval_is_that_of_students_t():
    mean, low, high = claims_table.interval([1.0, 2.0, 3.0])
    assert mean == 2
    # From tables, 4.303 at 2 degrees of freedom.
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
    assert claims_table.interval([1.0]) == (1, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("low", "high", "below", "alike"),
    [
        (-0.9, -0.1, YES, YES),
        (-0.9, 0.1, CANNOT_TELL, YES),
        (0.1, 0.9, NO, YES),
        (-3.0, -1.1, YES, NO),
        (1.1, 3.0, NO, NO),
        (-3.0, -0.9, YES, CANNOT_TELL),
        (0.9, 3.0, NO, CANNOT_TELL),
        (-3.0, 3.0, CANNOT_TELL, CANNOT_TELL),
        (-math.inf, math.inf, CANNOT_TELL, CANNOT_TELL),
        (math.nan, math.nan, CANNOT_TELL, CANNOT_TELL),
    ],
)
def test_a_verdict_is_what_the_whole_interval_says(low, high, below, alike):
    assert claims_table.below(low, high) == below
    assert claims_table.alike(low, high) == alike
    opposite = {YES: NO, NO: YES, CANNOT_TELL: CANNOT_TELL}
    assert claims_table.unlike(low, high) == opposite[alike]
    about_4 = claims_table.alike_by(2, 4)
    assert about_4(math.log(2.1), math.log(7.9)) == YES
    assert about_4(math.log(1.1), math.log(1.2)) == NO


def made_up(setting, seed, error, **row):
    curve = [{"updates": i, "test_error": 0.5 + 0.01 * (i % 2)} for i in range(20)]
    cell = f"{setting}/{seed}"
    row = {"cell": cell, "seed": seed, "updates": 1, "test_error": error, "curve": curve} | row
    return row | {"averaged_test_error": error - 0.01 - seed / 1e4, "sharpness": 0.1 * (1 + seed)}


def test_the_table_judges_the_differences_within_a_seed():
    rows = []
    for seed in range(3):
        for i, setting in enumerate(SETTINGS):
            rows.append(made_up(setting, seed, 0.5 + 0.02 * i + 0.1 * seed + 1e-4 * seed * (i % 2)))
    timed = [{"seconds": {"64x4": [8.0, 4.1], "256x1": [2.0, 1.0], "64x1": [8.0, 4.0]}}]
    found = {finding.claim: finding for finding in claims_table.findings(rows, timed)}
    assert len(found) == 24
    first = found["1. 8 x 4 generalises like 32"]
    np.testing.assert_allclose(first.differences, [-2, -2.01, -2.02])
    assert (first.verdict, str(first)) == (NO, "-2.01 (-2.03 to -1.99)")
    assert first.ran == "test error: 8x4 less 32x1"
    averaging = [f for claim, f in found.items() if claim.startswith("7.")]
    assert [f.verdict for f in averaging] == [YES] * 3
    as_sharp = [f for claim, f in found.items() if claim.startswith("10.")]
    assert [str(f) for f in as_sharp] == ["1.00 x (1.00 to 1.00)"] * 2
    (of_4,) = [f for claim, f in found.items() if claim.startswith("4.") and " 4 x" in claim]
    assert str(of_4).startswith("4.05 x (")
    (best,) = [f for claim, f in found.items() if claim.startswith("11.")]
    assert best.ran.endswith(": 128x16, lamb, rate x0.5 less 128x16, adam, rate x0.5")
    table = claims_table.table(rows, timed)
    assert len(table.splitlines()) == 2 + len(found)
    assert f"| {first.claim} | {first.ran} | {first} | no |" in table

    # Twenty settings before it, and an error of 1 in a hundred less.
    last = claims_table.errors_table(rows).splitlines()
    assert len(last) == 2 + len(SETTINGS)
    assert "| 64x4, constant rate | 1 | 82.0 ± 5.8 | 81.0 ± 5.8 |" in last

    # Of one seed there is no interval, and what is not finished is left out.
    one = claims_table.findings([row for row in rows if row["seed"] == 1])
    assert {finding.verdict for finding in one} == {CANNOT_TELL}
    claims = [finding.claim for finding in claims_table.findings(rows[:2], timed)]
    assert [claim.split(".")[0] for claim in claims] == ["1", "4", "4", "4"]
    assert claims_table.findings([]) == []


def test_fluctuation_is_the_noise_of_the_second_half_without_its_trend():
    straight = 0.5 - 0.01 * np.arange(10)
    noise = np.random.default_rng(0).normal(size=2000) * 0.02

    def curve_of(errors):
        return {"curve": [{"test_error": error} for error in errors]}

    assert claims_table.fluctuation(curve_of([0.9, 0.1, *straight])) == pytest.approx(0, abs=1e-9)
    falling = np.linspace(0.6, 0.4, 2000)
    assert claims_table.fluctuation(curve_of(falling + noise)) == pytest.approx(2, rel=0.1)


# The command.

CELLS = ["8x4/sgd/x1/cosine/0", "32x1/sgd/x1/cosine/0"]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the command on a few images of the sample; gives what it printed."""
    out = tmp_path_factory.mktemp("claims")

    def run(*arguments):
        sizes = ["--train-size", "256", "--test-size", "32", "--epochs", "1", "--workers", "1"]
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
            example.main(["--data", "sample", *sizes, "--out", str(out), *arguments])
        return printed.getvalue()

    return out, run


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_and_gives_the_same(command):
    out, run = command
    path = out / "claims.json"
    assert "0 cells are finished, 2 are left" in run("--cells", ",".join(CELLS))
    rows = json.loads(path.read_text())
    assert sorted(row["cell"] for row in rows) == sorted(CELLS)
    path.write_text(json.dumps(rows[1:]))
    printed = run("--cells", ",".join(CELLS))
    assert "1 cells are finished, 1 are left" in printed
    after = json.loads(path.read_text())
    assert after[1:] == rows[1:]
    assert [after[0][key] for key in ("test_error", "curve")] == [
        rows[0][key] for key in ("test_error", "curve")
    ]
    assert claims_table.table(rows) in printed
    assert plt.imread(path.with_suffix(".png")).std() > 0.05


@pytest.mark.slow
def test_the_arms_of_the_time_part_take_turns_and_go_to_the_table(command):
    out, run = command
    printed = run("--time", "--rounds", "2")
    (row,) = json.loads((out / "claims_time.json").read_text())
    assert row["train_images"] == 256
    rounds = {name: len(seconds) for name, seconds in row["seconds"].items()}
    assert rounds == dict.fromkeys(claims_table.TIMED, 2)
    assert "| 4. an epoch of 64x4 takes 1.1 x that of 256x1 | seconds: 64x4 over 256x1 |" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--again", "64x4"], "--again: a cell must read like 8x4/sgd/x1/cosine/0.*got '64x4'"),
        (["--cells", "64x4/sgd/x3/cosine/0"], "--cells: .*got '64x4/sgd/x3/cosine/0'"),
        (["--cells", "64x4/sgd/x1/cosine/-1"], "--cells: .*got '64x4/sgd/x1/cosine/-1'"),
        (["--train-size", "2047"], "--train-size: must be at least 2048.*got 2047"),
        (["--rounds", "0"], "--rounds: .*at least 1, got '0'"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_named(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_info:
        example.main(argv)
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)
