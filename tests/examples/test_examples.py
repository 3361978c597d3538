"""The CIFAR-10 example: its data, its arms, and what it writes."""

import contextlib
import functools
import hashlib
import http.server
import io
import json
import re
import socket
import tarfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import PIL.Image
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from matplotlib import pyplot as plt

import cifar_flax
import image_data
from tensorboard_files import events
from training import Arm, epoch_order, first_update_max_diff

SAMPLE_NAME = "Fashion-MNIST sample"


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(tmp_path_factory):
    """Little optimised code, and none compiled twice: most of the time here goes into XLA."""
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache instead of the user's, and no proxy before the loopback addresses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "optax_accum"


# The data.


def write_cifar(parent):
    """Write a `cifar-10-batches-bin` of three records a file; returns what a reader must find."""
    folder = parent / image_data.FOLDER
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        images = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
        labels = rng.integers(0, 10, 3)
        records = [
            bytes([label]) + b"".join(image[..., color].tobytes() for color in range(3))
            for image, label in zip(images, labels, strict=True)
        ]
        (folder / name).write_bytes(b"".join(records))
        written[name] = images, labels
    *train, test = written.values()
    return image_data.Images("CIFAR-10", *map(np.concatenate, zip(*train, strict=True)), *test)


def assert_same_images(got, expected):
    assert got.name == expected.name
    for field in ("train_images", "train_labels", "test_images", "test_labels"):
        array = getattr(got, field)
        np.testing.assert_array_equal(array, getattr(expected, field), err_msg=field)
        assert array.dtype == (np.uint8 if "images" in field else np.int32)


@pytest.mark.parametrize("source", ["cifar10", "auto"])
@pytest.mark.parametrize("inside", [False, True], ids=["parent", "folder itself"])
def test_the_binary_archive_is_read_as_it_was_written(tmp_path, source, inside):
    written = write_cifar(tmp_path)
    data_dir = tmp_path / image_data.FOLDER if inside else tmp_path
    assert_same_images(image_data.load(source, str(data_dir)), written)


def test_the_planes_are_red_then_green_then_blue(tmp_path):
    write_cifar(tmp_path)
    record = bytes([7]) + bytes([200]) * 1024 + bytes([100]) * 1024 + bytes(range(32)) * 32
    (tmp_path / image_data.FOLDER / "test_batch.bin").write_bytes(record)
    images = image_data.load("cifar10", str(tmp_path))
    assert images.test_labels.tolist() == [7]
    assert images.test_images[0, 3, 5].tolist() == [200, 100, 5]  # row 3, column 5


def test_the_archive_is_found_in_the_users_cache(cache):
    written = write_cifar(cache)
    assert_same_images(image_data.load("auto"), written)


def test_a_truncated_file_is_named_with_its_size(tmp_path):
    write_cifar(tmp_path)
    path = tmp_path / image_data.FOLDER / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin must hold .* 3073 bytes.* got 9218"):
        image_data.load("cifar10", str(tmp_path))


def test_a_missing_file_of_the_archive_is_named(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / image_data.FOLDER / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin"):
        image_data.load("cifar10", str(tmp_path))


@pytest.mark.parametrize("source", image_data.SOURCES)
def test_a_data_dir_that_is_no_folder_is_refused(tmp_path, source):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"data_dir must be .*{re.escape(nowhere)}"):
        image_data.load(source, nowhere)


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match=r"source must be one of auto, .*; got 'mnist'"):
        image_data.load("mnist")


def test_the_sample_is_real_images_of_ten_classes():
    images = image_data.load("sample")
    assert images.name == SAMPLE_NAME
    for split, size in (("train", 6000), ("test", 1000)):
        pixels, labels = getattr(images, f"{split}_images"), getattr(images, f"{split}_labels")
        assert pixels.shape == (size, 28, 28, 1)
        assert pixels.dtype == np.uint8
        assert labels.dtype == np.int32
        assert np.bincount(labels, minlength=10).min() > 0.08 * size
        assert len(np.unique(labels)) == 10
        # Photographs, not noise: dark corners, bright middles, and no two alike.
        assert pixels[:, 0, 0].mean() < 5 < 80 < pixels[:, 12:16, 12:16].mean()
        assert len(np.unique(pixels.reshape(size, -1), axis=0)) == size


def test_head_takes_the_first_images_of_each_split():
    images = image_data.load("sample")
    few = images.head(7, None)
    assert (len(few.train_images), len(few.train_labels)) == (7, 7)
    assert (len(few.test_images), len(few.test_labels)) == (1000, 1000)
    np.testing.assert_array_equal(few.train_images, images.train_images[:7])


@pytest.fixture(params=["refuses", "stays silent"])
def dead_url(request, monkeypatch):
    """A loopback port on which nobody serves."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(
            image_data, "URL", f"http://127.0.0.1:{server.getsockname()[1]}/cifar.tar.gz"
        )
        if request.param == "stays silent":
            server.listen()
            monkeypatch.setattr(image_data, "CONNECT_TIMEOUT", 0.5)
        yield


@pytest.mark.usefixtures("dead_url")
def test_without_network_auto_says_so_and_takes_the_sample(tmp_path, capsys):
    import tensorflow_datasets  # noqa: F401, whose import is not to be timed

    start = time.perf_counter()
    images = image_data.load("auto", str(tmp_path))
    assert time.perf_counter() - start < 10
    assert images.name == SAMPLE_NAME
    printed = capsys.readouterr().out
    assert "CIFAR-10 cannot be downloaded" in printed
    assert SAMPLE_NAME.split()[0] in printed


@pytest.mark.usefixtures("dead_url")
def test_without_network_cifar10_raises(cache):
    with pytest.raises(ConnectionError, match="CIFAR-10 cannot be downloaded"):
        image_data.load("cifar10")
    assert not cache.exists()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """An archive of CIFAR-10's layout on a server of its own; gives its images and SHA-256."""
    root = tmp_path / "server"
    written = write_cifar(root)
    path = root / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root / image_data.FOLDER, image_data.FOLDER)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setattr(
            image_data, "URL", f"http://127.0.0.1:{server.server_port}/cifar.tar.gz"
        )
        yield written, hashlib.sha256(path.read_bytes()).hexdigest()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("where", ["data_dir", "cache"])
def test_the_archive_is_downloaded_once(tmp_path, cache, monkeypatch, served, where):
    written, digest = served
    monkeypatch.setattr(image_data, "SHA256", digest)
    data_dir = tmp_path / "data" if where == "data_dir" else None
    if data_dir:
        data_dir.mkdir()
    load = functools.partial(image_data.load, "cifar10", str(data_dir) if data_dir else None)
    assert_same_images(load(), written)
    assert (data_dir or cache).joinpath(image_data.FOLDER, "test_batch.bin").is_file()
    monkeypatch.setattr(image_data, "URL", "http://127.0.0.1:9/not-asked-again")
    assert_same_images(load(), written)


def test_an_archive_of_another_sha256_is_refused_and_leaves_nothing(cache, monkeypatch, served):
    _, digest = served
    monkeypatch.setattr(image_data, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match=f"must have SHA-256 0000.*, got {digest}"):
        image_data.load("cifar10")
    assert not [*cache.rglob("*")]


def test_an_archive_that_has_moved_counts_as_no_network(cache, monkeypatch, served):
    monkeypatch.setattr(image_data, "URL", image_data.URL + ".moved")
    with pytest.raises(ConnectionError, match="404"):
        image_data.load("cifar10")
    assert not cache.exists()


def prepare_tfds(data_dir):
    """Have TFDS prepare a tiny CIFAR-10 of its own layout; returns images and labels by split."""
    import tensorflow_datasets as tfds

    rng = np.random.default_rng(0)
    splits = {
        split: (rng.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8), np.arange(size))
        for split, size in (("train", 8), ("test", 5))
    }

    def png(image):
        file = io.BytesIO()
        PIL.Image.fromarray(image).save(file, "PNG")
        return file.getvalue()  # encoded already, since TFDS would need TensorFlow for it

    # Not registered, so that image_data finds TFDS's own builder under this name.
    with tfds.core.registered.skip_registration():

        class Cifar10(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("3.0.2")

            def _info(self):
                features = {
                    "id": tfds.features.Text(),
                    "image": tfds.features.Image(shape=(32, 32, 3)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
                return tfds.core.DatasetInfo(
                    builder=self, features=tfds.features.FeaturesDict(features)
                )

            def _split_generators(self, dl_manager):
                del dl_manager
                return {split: self._generate_examples(split) for split in splits}

            def _generate_examples(self, split):
                for image, label in zip(*splits[split], strict=True):
                    name = f"{split}_{label}"
                    yield name, {"id": name, "image": png(image), "label": int(label)}

    Cifar10(data_dir=data_dir, file_format="array_record").download_and_prepare()
    return splits


@pytest.mark.parametrize("source", ["tfds", "auto"])
def test_a_dataset_that_tfds_prepared_is_read(tmp_path, source):
    splits = prepare_tfds(tmp_path)
    got = image_data.load(source, str(tmp_path))
    assert got.name == "CIFAR-10 (TFDS)"
    for images, labels, (expected, all_labels) in (
        (got.train_images, got.train_labels, splits["train"]),
        (got.test_images, got.test_labels, splits["test"]),
    ):
        assert images.dtype == np.uint8
        assert labels.dtype == np.int32
        assert sorted(labels) == list(all_labels)  # TFDS shuffles
        np.testing.assert_array_equal(images, expected[labels])


def test_tfds_without_a_prepared_dataset_says_how_to_prepare_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"(?s){re.escape(str(tmp_path))}.*array_record"):
        image_data.load("tfds", str(tmp_path))


# The command.

ARMS = {"64x1": (4, 4), "16x4": (13, 4), "16x1": (13, 13)}  # micro-steps, gradient steps


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command on 200 images of the sample; gives its folder and what it printed."""
    out = tmp_path_factory.mktemp("run") / "results"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sizes = ["--train-size", "200", "--test-size", "100", "--epochs", "1", "--drift-steps", "2"]
        arms = ["--arms", ",".join(ARMS)]
        cifar_flax.main(["--data", "sample", *sizes, *arms, "--out", str(out)])
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def rows(run):
    return {row["arm"]: row for row in json.loads((run[0] / "results.json").read_text())}


@pytest.fixture(scope="module")
def points(run):
    return [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_results_hold_one_object_per_arm_with_all_keys(rows):
    assert list(rows) == list(ARMS)
    for name, row in rows.items():
        assert name == f"{row['physical_batch']}x{row['every_k']}"
        assert row["norm"] == "group"
        assert row["data"] == SAMPLE_NAME
        assert 0 <= row["test_accuracy"] <= 1
        assert 0 < row["test_loss"] < 10
        assert row["images_per_second"] == pytest.approx(200 / row["seconds"])
        assert row["temp_bytes"] > 0
        assert row["commit"]
        config = row["config"]
        assert (config["train_size"], config["test_size"], config["epochs"]) == (200, 100, 1)
        assert (config["seed"], config["lr"], config["arms"]) == (0, 1e-3, list(ARMS))


@pytest.mark.slow
def test_a_small_physical_batch_needs_less_memory(rows):
    assert rows["16x4"]["temp_bytes"] < 0.5 * rows["64x1"]["temp_bytes"]


@pytest.mark.slow
def test_16x4_ends_where_64x1_does_and_16x1_elsewhere(rows):
    loss = {arm: row["test_loss"] for arm, row in rows.items()}
    assert loss["16x4"] == pytest.approx(loss["64x1"], abs=1e-3)
    assert loss["16x1"] != pytest.approx(loss["64x1"], abs=1e-3)


@pytest.mark.slow
def test_the_first_update_is_that_of_the_big_batch(rows):
    assert rows["64x1"]["first_update_max_diff"] == 0
    assert 0 < rows["16x4"]["first_update_max_diff"] < 1e-5


@pytest.mark.slow
def test_metrics_count_micro_steps_and_gradient_steps_and_name_the_data(points):
    assert {point["data"] for point in points} == {SAMPLE_NAME}
    for arm, counters in ARMS.items():
        mine = [point for point in points if point["arm"] == arm]
        assert (mine[-1]["micro_step"], mine[-1]["gradient_step"]) == counters
        for point in mine[:-1]:  # before the flush
            assert point["gradient_step"] == point["micro_step"] // int(arm.split("x")[1])
        seconds = [point["seconds"] for point in mine]
        assert seconds == sorted(seconds)
        assert all(0 < point["train_loss"] < 10 for point in mine)
        assert [point for point in mine if "test_accuracy" in point] == mine[-1:]


@pytest.mark.slow
def test_all_that_is_printed_names_the_batches_and_the_data(run):
    _, printed = run
    lines = printed.splitlines()
    assert "physical batch 16 x k 4 = effective batch 64" in lines
    table = [line for line in lines if line.startswith(tuple(f"| {arm} " for arm in ARMS))]
    assert len(table) == len(ARMS)
    assert all(SAMPLE_NAME in line for line in table)


@pytest.mark.slow
def test_tensorboard_files_hold_the_metrics(run, points):
    for arm in ARMS:
        (file,) = (run[0] / "tensorboard" / arm).iterdir()
        assert file.name.startswith("events.out.tfevents")
        logged = {
            (value.tag, event.step): value.simple_value
            for event in events(file)
            for value in event.summary.value
        }
        last = [point for point in points if point["arm"] == arm][-1]
        for tag in ("train_loss", "test_loss", "test_accuracy"):
            assert logged[tag, last["gradient_step"]] == pytest.approx(last[tag])


@pytest.mark.slow
def test_drift_is_rounding_since_float64_has_none(run):
    drift = json.loads((run[0] / "drift.json").read_text())
    assert len(drift) == 3
    for label, distances in drift.items():
        assert len(distances) == 2
        low, high = {"float32": (1e-9, 0.1), "float64": (0, 1e-9)}[label.split(", ")[-1]]
        assert low < max(distances) < high


@pytest.mark.slow
@pytest.mark.parametrize("name", ["curves.png", "drift.png"])
def test_pictures_are_drawn(run, name):
    picture = plt.imread(run[0] / name)
    assert min(picture.shape[:2]) > 400
    assert picture.std() > 0.05  # not blank


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arms", "16"], r"--arms: .*like 16x4, got '16'"),
        (["--arms", "ax2"], r"--arms: .*like 16x4, got 'ax2'"),
        (["--arms", "16x4x2"], r"--arms: .*like 16x4, got '16x4x2'"),
        (["--arms", "64x1,"], r"--arms: .*like 16x4, got ''"),
        (["--arms", "0x4"], r"--arms: .*at least 1, got '0x4'"),
        (["--arms", "16x-1"], r"--arms: .*at least 1, got '16x-1'"),
        (["--epochs", "0"], r"--epochs: .*at least 1, got '0'"),
        (["--train-size", "-5"], r"--train-size: .*at least 1, got '-5'"),
        (["--epochs", "1.5"], r"--epochs: .*at least 1, got '1.5'"),
        (["--norm", "instance"], r"--norm: invalid choice: 'instance'"),
        (["--data", "mnist"], r"--data: invalid choice: 'mnist'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_named(capsys, argv, message):
    with pytest.raises(SystemExit) as exit_info:
        cifar_flax.main(argv)
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_help_shows_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        cifar_flax.main(["--help"])
    assert "python examples/cifar_flax.py" in capsys.readouterr().out


# The mathematics.


def synthetic_images(size, seed=0):
    """Noise around one 4 x 4 picture a class: small, since float64 convolutions are slow on CPU."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, size).astype(np.int32)
    pictures = rng.integers(0, 256, (10, 4, 4, 3))
    noise = rng.integers(0, 256, (size, 4, 4, 3))
    images = ((pictures[labels] + noise) // 2).astype(np.uint8)
    return image_data.Images("synthetic", images, labels, images, labels)


def new_trainer(images, norm, arm, tx, **kwargs):
    args = cifar_flax.parse_args(["--norm", norm])
    return cifar_flax.new_trainer(arm, tx, images, args, **kwargs)


def max_difference(a, b):
    differences = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), a, b)
    return float(jnp.stack(jax.tree.leaves(differences)).max())


@pytest.mark.slow
def test_an_uneven_last_batch_is_weighted_by_its_size_and_the_short_window_flushed():
    # 200 = 12 x 16 + 8, so windows of five micro-batches see 80, 80 and 16 + 16 + 8 images.
    images, rate = synthetic_images(200), 0.1
    pixels, labels = images.train_images, images.train_labels
    order = epoch_order(200, seed=0, epoch=0)
    with jax.enable_x64(True):
        trainer = new_trainer(images, "none", Arm(16, 5), optax.sgd(rate), dtype=jnp.float64)

        def mean_loss(params, pixels, labels):
            logits = nnx.merge(trainer.graph, params, trainer.rest)(pixels)
            log_likelihoods = jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]
            return -log_likelihoods.mean()

        grad = jax.jit(jax.grad(mean_loss))
        expected = jax.tree.map(jnp.copy, trainer.params)
        for index in np.split(order, [80, 160]):
            gradient = grad(expected, pixels[index], labels[index])
            expected = jax.tree.map(lambda p, g: p - rate * g, expected, gradient)

        for i in range(0, 200, 16):
            trainer.micro_step(pixels[order[i : i + 16]], labels[order[i : i + 16]])
        assert int(trainer.opt_state[-1].gradient_step) == 2
        trainer.close_window()
        assert int(trainer.opt_state[-1].gradient_step) == 3
        assert max_difference(trainer.params, expected) < 1e-13


@pytest.mark.slow
def test_after_100_adam_updates_in_float64_16x4_and_64x1_are_equal():
    # That float32 breaks the same bound, after two updates, is seen in the drift above.
    images, updates, ends = synthetic_images(256), 100, []
    with jax.enable_x64(True):
        for arm in (Arm(16, 4), Arm(64, 1)):
            trainer = new_trainer(images, "group", arm, optax.adam(1e-3), dtype=jnp.float64)
            start = jax.tree.map(np.array, trainer.params)
            for step in range(updates):
                order = np.random.default_rng(step).permutation(256)[:64]
                for part in np.split(order, arm.every_k):
                    trainer.micro_step(images.train_images[part], images.train_labels[part])
            assert int(trainer.opt_state[-1].gradient_step) == updates
            assert max_difference(trainer.params, start) > 0.01  # they did move
            ends.append(trainer.params)
        assert 0 < max_difference(*ends) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("norm", cifar_flax.NORMS)
def test_every_norm_trains_and_only_batch_norm_sees_the_micro_batch(norm):
    images = image_data.load("sample").head(64, 32)
    new = functools.partial(new_trainer, images, norm)
    difference = first_update_max_diff(new, Arm(16, 4), images, np.arange(64))
    assert difference > 1e-4 if norm == "batch" else difference < 1e-5

    trainer = new(Arm(16, 4), optax.sgd(1.0))
    start = jax.tree.map(np.array, (trainer.params, trainer.rest))
    for part in np.split(np.arange(64), 4):
        loss = trainer.micro_step(images.train_images[part], images.train_labels[part])
    assert 0 < float(loss) < 10
    assert int(trainer.opt_state[-1].gradient_step) == 1
    assert max_difference(trainer.params, start[0]) > 1e-3
    assert bool(jax.tree.leaves(trainer.rest)) == (norm == "batch")
    if norm == "batch":
        assert max_difference(trainer.rest, start[1]) > 1e-3
    test_loss, accuracy = trainer.evaluate(images.test_images, images.test_labels, batch=20)
    assert 0 < test_loss < 1e3
    assert 0 <= accuracy <= 1
