"""The experiment on norms: its remedies, and what it writes and keeps."""

import contextlib
import io
import json
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from matplotlib import pyplot as plt

import batchnorm_vs_groupnorm as example
import image_data
from training import Arm, first_update_max_diff

pytestmark = pytest.mark.usefixtures("compile_quickly")

IMAGES = image_data.load("sample").head(64, 32)
BIG, SMALL = Arm(64, 1), Arm(8, 8)


def new_trainer(norm, arm, rate=0.1):
    return example.new_trainer(norm, arm, optax.sgd(rate), IMAGES, seed=0)


def train(trainer, windows=1):
    for _ in range(windows):
        for part in np.split(np.arange(64), trainer.arm.every_k):
            trainer.micro_step(IMAGES.train_images[part], IMAGES.train_labels[part])
    return trainer


# The remedies.


@pytest.mark.slow
def test_pooled_statistics_are_those_of_the_big_batch_in_the_first_layer():
    pooled = train(new_trainer("batch-pooled", SMALL)).rest[0]
    big = train(new_trainer("batch", BIG)).rest
    small = train(new_trainer("batch", SMALL)).rest
    for name in ("mean", "var"):
        # Deeper layers see what the first one made of a micro-batch.
        got, want = pooled["stem_norm"][name], big["stem_norm"][name]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        away = np.abs(small["stem_norm"][name] - want).max()
        assert away > 100 * np.abs(got - want).max()


@pytest.mark.slow
def test_pooled_statistics_move_at_boundaries_alone_and_are_those_of_evaluation():
    trainer = new_trainer("batch-pooled", SMALL)
    start = jax.tree.map(np.array, trainer.rest[0])
    part = np.arange(8)
    trainer.micro_step(IMAGES.train_images[part], IMAGES.train_labels[part])
    assert jax.tree.all(jax.tree.map(np.array_equal, trainer.rest[0], start))
    assert trainer.rest[2] == 8
    train(trainer)  # seven of these eight close the window
    assert not np.array_equal(trainer.rest[0]["stem_norm"]["mean"], start["stem_norm"]["mean"])

    model = nnx.merge(trainer.graph, trainer.params, trainer.rest[0])
    model.eval()
    accuracy = np.mean(model(IMAGES.test_images).argmax(-1) == IMAGES.test_labels)
    assert trainer.evaluate(IMAGES.test_images, IMAGES.test_labels)[1] == pytest.approx(accuracy)


@pytest.mark.slow
def test_frozen_statistics_stay_and_make_the_window_exact():
    trainer = train(new_trainer("batch-frozen", SMALL))
    before = jax.tree.map(np.array, (trainer.params, trainer.rest))
    part = slice(0, 8)
    trainer.compile(IMAGES.train_images[part], IMAGES.train_labels[part])  # as it was, unfrozen
    train(example.freeze(trainer))
    assert jax.tree.all(jax.tree.map(np.array_equal, trainer.rest, before[1]))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), trainer.params, before[0])
    assert max(jax.tree.leaves(moved)) > 1e-3

    def frozen(arm, tx):
        return example.freeze(example.new_trainer("batch-frozen", arm, tx, IMAGES, seed=0))

    assert first_update_max_diff(frozen, SMALL, IMAGES, np.arange(64)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "exact"),
    [("group", True), ("layer", True), ("batch", False), ("batch-pooled", False)],
)
def test_only_batch_norm_sees_the_micro_batch(norm, exact):
    def start(arm, tx):
        return example.new_trainer(norm, arm, tx, IMAGES, seed=0)

    difference = first_update_max_diff(start, SMALL, IMAGES, np.arange(64))
    assert difference < 1e-5 if exact else difference > 1e-3


@pytest.mark.slow
def test_synchronised_over_eight_devices_it_is_the_big_batch():
    synced = train(example.new_trainer("batch-sync", BIG, optax.sgd(1.0), IMAGES, seed=0))
    big = train(new_trainer("batch", BIG, rate=1.0))
    differences = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(),
        (synced.params, synced.rest),
        (big.params, big.rest),
    )
    assert max(jax.tree.leaves(differences)) < 1e-4
    ours = synced.evaluate(IMAGES.test_images, IMAGES.test_labels)
    assert ours == pytest.approx(big.evaluate(IMAGES.test_images, IMAGES.test_labels), rel=1e-3)
    part = slice(0, 64)
    synced.compile(IMAGES.train_images[part], IMAGES.train_labels[part])
    assert synced.collectives["each_micro_step"]["count"] > 7  # that many layers, and backward


# The command.

CELLS = ["group/64/0", "group/8/0", "batch-frozen/8/0", "group/64/1"]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the command on a few images of the sample; gives what it printed."""
    out = tmp_path_factory.mktemp("norms")

    def run(*arguments):
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
            sizes = ["--train-size", "150", "--test-size", "50"]
            example.main(["--data", "sample", *sizes, "--out", str(out), *arguments])
        return printed.getvalue()

    return out, run


@pytest.fixture(scope="module")
def first_run(command):
    return command[1]("--cells", ",".join(CELLS))


def rows_of(out):
    return json.loads((out / "batchnorm_vs_groupnorm.json").read_text())


@pytest.mark.slow
def test_each_cell_is_kept_with_all_keys(command, first_run):
    rows = {str(example.cell_of(row)): row for row in rows_of(command[0])}
    assert sorted(rows) == sorted(CELLS)
    for name, row in rows.items():
        norm, batch, seed = name.split("/")
        assert (row["norm"], row["physical_batch"], row["seed"]) == (norm, int(batch), int(seed))
        assert row["physical_batch"] * row["every_k"] == 64
        assert row["data"] == "Fashion-MNIST sample"
        assert row["train_images"] == 2 * 128  # two epochs of whole windows
        assert 0 <= row["test_error"] <= 1
        assert [point["epoch"] for point in row["curve"]] == [1, 2]
        assert row["curve"][-1]["test_error"] == row["test_error"]
        assert row["seconds"] > 0
        assert row["commit"]
        assert row["config"] == {"train_size": 150, "test_size": 50, "epochs": 2, "lr": 0.1}
    assert rows["group/64/0"]["first_update_max_diff"] == 0
    assert 0 < rows["group/8/0"]["first_update_max_diff"] < 1e-5
    assert rows["batch-frozen/8/0"]["first_update_max_diff"] < 1e-5
    assert rows["group/64/0"]["test_error"] != rows["group/64/1"]["test_error"]


@pytest.mark.slow
def test_the_table_has_means_over_seeds_and_the_data(command, first_run):
    rows = rows_of(command[0])
    errors = [
        100 * r["test_error"] for r in rows if (r["norm"], r["physical_batch"]) == ("group", 64)
    ]
    spread = np.std(errors, ddof=1) / np.sqrt(2)
    assert f"| group | {np.mean(errors):.1f} ± {spread:.1f} |" in first_run
    assert "Fashion-MNIST sample, effective batch 64" in first_run
    picture = plt.imread(command[0] / "batchnorm_vs_groupnorm.png")
    assert picture.std() > 0.05


@pytest.mark.slow
def test_a_finished_cell_is_not_trained_again_and_a_missing_one_is(command, first_run):
    out, run = command
    before = rows_of(out)
    (out / "batchnorm_vs_groupnorm.json").write_text(json.dumps(before[1:]))
    printed = run("--cells", ",".join(CELLS))
    assert "3 cells are finished, 1 are left" in printed
    after = rows_of(out)
    assert after[1:] == before[1:]
    same = ("norm", "physical_batch", "seed", "test_error", "first_update_max_diff", "curve")
    assert [after[0][key] for key in same] == [before[0][key] for key in same]


@pytest.mark.slow
def test_one_cell_again_gives_the_figure_that_was_kept(command, first_run):
    out, run = command
    before = (out / "batchnorm_vs_groupnorm.json").read_text()
    printed = run("--again", "group/8/0")
    kept = {str(example.cell_of(row)): row["test_error"] for row in json.loads(before)}["group/8/0"]
    assert f"group/8/0 on Fashion-MNIST sample: {kept}\n" in printed
    assert f"json has: {kept}\n" in printed
    assert "no such cell" in run("--again", "layer/64/7")
    assert (out / "batchnorm_vs_groupnorm.json").read_text() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--again", "batch/8"], "--again: a cell must read like batch/8/0.*got 'batch/8'"),
        (["--again", "instance/8/0"], "--again: .*a norm of batch, group.*got 'instance/8/0'"),
        (["--cells", "batch/3/0"], "--cells: .*physical batch of 64, 32.*got 'batch/3/0'"),
        (["--cells", "batch/8/-1"], "--cells: .*got 'batch/8/-1'"),
        (["--train-size", "63"], "--train-size: must be at least 64, got 63"),
        (["--epochs", "1"], "--epochs: must be more than 1, the warm-up of batch-frozen, got 1"),
        (["--seeds", "0"], "--seeds: .*at least 1, got '0'"),
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_named(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_info:
        example.main(argv)
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


# The full run that is committed.


def test_a_full_run_has_three_seeds_of_every_norm_and_size():
    cells = example.grid(example.parse_args(["--full"]))
    assert len(cells) == len(set(cells)) == 3 * (3 * 6 + 3 * 2)
    assert {cell.arm.effective_batch for cell in cells} == {64}
