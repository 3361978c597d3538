"""The contrastive example: what its arms differ in, what they share, and what it writes."""

import contextlib
import io
import json
import re
import types

import jax
import numpy as np
import pytest

import contrastive as example
import image_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

IMAGES = image_data.load("sample").head(64, 32)
ARMS = ["big batch", "exact 8x64", "naive 8x64"]


def test_the_exact_gradient_is_the_big_batch_s_and_the_naive_one_is_not():
    encode, params = example.new_model(IMAGES, seed=0)
    views = example.two_views(jax.random.key(0), IMAGES.train_images)
    fns = {arm: get(encode, example.info_nce) for arm, get in example.GRADIENTS.items()}
    (big, want), *others = (jax.jit(fns[arm])(params, views) for arm in ARMS)
    (exact, exact_gradient), (naive, naive_gradient) = others
    assert float(exact) == pytest.approx(float(big), rel=1e-5)
    assert naive < big - 1  # micro-batches of 8: fewer to take for the right one
    assert example.max_relative_diff(exact_gradient, want) < 1e-5
    assert example.max_relative_diff(naive_gradient, want) > 1e-2


def test_a_seed_trains_on_the_same_views_whatever_the_arm(monkeypatch):
    monkeypatch.setattr(example, "BATCH", 16)
    quick = jax.value_and_grad(lambda params, views: params["log_scale"] * views.mean())
    for arm in ARMS:
        monkeypatch.setitem(example.GRADIENTS, arm, lambda encode, loss: quick)
    seen, two_views = [], example.two_views

    def recorded(key, images):
        views = two_views(key, images)
        seen.append(np.array(views))
        return views

    monkeypatch.setattr(example, "two_views", recorded)
    args = types.SimpleNamespace(train_size=40, test_size=32, epochs=2)
    by_arm = {}
    for arm, seed in [(arm, 0) for arm in ARMS] + [("big batch", 1)]:
        seen.clear()
        example.train((arm, seed), IMAGES.head(40, 32), args)
        by_arm[arm, seed] = np.concatenate(seen[1:-1])  # less the first gradient's and the test's
    want = by_arm["big batch", 0]
    assert len(want) == 2 * 2 * 16  # two epochs of two updates; eight images are left over
    assert len(np.unique(want.reshape(2 * len(want), -1), axis=0)) == 2 * len(want)
    for arm in ARMS:
        np.testing.assert_array_equal(by_arm[arm, 0], want)
    assert not np.array_equal(by_arm["big batch", 1], want)


def test_two_views_are_of_one_image_and_not_the_same():
    images = np.repeat(np.arange(0, 250, 50, dtype=np.uint8), 32 * 32 * 3).reshape(5, 32, 32, 3)
    views = example.two_views(jax.random.key(0), images)
    assert views.shape == (5, 2, 24, 24, 3)
    # A crop of one colour has one colour: nothing from outside of the image.
    assert np.ptp(np.asarray(views), axis=(2, 3)).max() < 1e-5
    assert np.abs(views[:, 0] - views[:, 1]).max() > 0.1


def test_identical_views_are_all_found_and_shuffled_ones_are_not():
    r = np.random.default_rng(0).normal(size=(50, 8))
    r /= np.linalg.norm(r, axis=1, keepdims=True)
    labels = np.arange(50)
    same, shifted = np.stack([r, r], 1), np.stack([r, np.roll(r, 1, axis=0)], 1)
    assert example.retrieval(same, labels) == (1, 0)  # no other image has the class
    assert example.retrieval(shifted, labels)[0] == 0
    assert example.retrieval(same, np.zeros(50))[1] == 1


# The command.


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the command on a few images of the sample; gives what it printed."""
    out = tmp_path_factory.mktemp("contrastive")

    def run():
        sizes = ["--train-size", "520", "--test-size", "50", "--epochs", "1", "--seeds", "1"]
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
            example.main(["--data", "sample", *sizes, "--out", str(out)])
        return printed.getvalue()

    return out / "contrastive.json", run


@pytest.fixture(scope="module")
def first_run(command):
    return command[1]()


@pytest.mark.slow
def test_each_cell_is_kept_and_the_table_has_the_arms(command, first_run):
    rows = json.loads(command[0].read_text())
    assert [(row["arm"], row["seed"]) for row in rows] == [(arm, 0) for arm in ARMS]
    for row in rows:
        assert row["data"] == "Fashion-MNIST sample"
        assert row["updates"] == 1
        assert 0 <= row["retrieval"] <= 1
        assert 0 <= row["neighbour_class"] <= 1
        assert row["images_per_second"] > 0
        assert row["inverse_temperature"] != pytest.approx(10, rel=1e-6)  # it is learned
    big, exact, naive = rows
    assert big["first_gradient_max_diff"] == 0
    assert exact["first_gradient_max_diff"] < 1e-5 < naive["first_gradient_max_diff"]
    assert exact["train_losses"] == pytest.approx(big["train_losses"], rel=1e-5)
    for row in rows:
        retrieval = 100 * row["retrieval"]
        assert re.search(rf"\| {row['arm']} \| {retrieval:.1f} \|", first_run)
    assert "Fashion-MNIST sample, effective batch 512" in first_run


def test_the_difference_is_that_of_the_same_seed():
    shared = {"first_gradient_max_diff": 0, "temp_bytes": 1, "images_per_second": 1}
    rows = [
        {"arm": arm, "seed": seed, "retrieval": own, "neighbour_class": 0.5, **shared}
        for arm, seed, own in (
            *(("big batch", 0, 0.5), ("big batch", 1, 0.7)),
            *(("naive 8x64", 0, 0.4), ("naive 8x64", 1, 0.6), ("naive 8x64", 2, 0.8)),
        )
    ]
    table = example.table(rows)
    assert "| big batch | 60.0 ± 10.0 |  |" in table
    assert "| naive 8x64 | 60.0 ± 11.5 | -10.0 ± 0.0 |" in table
    assert "exact" not in table


@pytest.mark.slow
def test_a_finished_cell_is_not_trained_again_and_a_missing_one_is(command, first_run):
    path, run = command
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before[1:]))
    assert "2 cells are finished, 1 are left" in run()
    after = json.loads(path.read_text())
    assert after[1:] == before[1:]
    same = ("arm", "seed", "retrieval", "neighbour_class", "train_losses")
    assert [after[0][key] for key in same] == [before[0][key] for key in same]


def test_a_wrong_argument_is_named(capsys):
    with pytest.raises(SystemExit) as exit_info:
        example.main(["--train-size", "511"])
    assert exit_info.value.code == 2
    assert "--train-size: must be at least 512, got 511" in capsys.readouterr().err
