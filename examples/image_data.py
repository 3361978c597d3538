"""The images that the examples train on: CIFAR-10, or a small embedded sample of Fashion-MNIST."""

import hashlib
import http.client
import io
import lzma
import os
import pathlib
import tarfile
import tempfile
import urllib.request
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

SOURCES = ("auto", "cifar10", "tfds", "sample")
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
FOLDER = "cifar-10-batches-bin"
SAMPLE = pathlib.Path(__file__).with_name("fashion_mnist_sample.npz.xz")
CONNECT_TIMEOUT = 5.0  # seconds
RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane


class Images(NamedTuple):
    """A data set in memory, and the name under which results on it are reported."""

    name: str
    train_images: np.ndarray  # uint8 [N, height, width, channels]
    train_labels: np.ndarray  # int32 [N]
    test_images: np.ndarray
    test_labels: np.ndarray

    def head(self, train_size: int | None, test_size: int | None) -> "Images":
        """The first images of each split, all where the size is None."""
        return Images(
            self.name,
            self.train_images[:train_size],
            self.train_labels[:train_size],
            self.test_images[:test_size],
            self.test_labels[:test_size],
        )


def load(source: str = "auto", data_dir: str | None = None) -> Images:
    """Load CIFAR-10 from where it is found, or the embedded sample.

    Args:
      source: `"cifar10"` reads `cifar-10-batches-bin` in `data_dir` or in the user's cache, or
        downloads the official archive there; `"tfds"` reads a CIFAR-10 that TensorFlow Datasets
        has prepared (in `data_dir` or in its own folder); `"sample"` is the embedded sample;
        `"auto"` takes the first of the three that can be had.
      data_dir: folder to look in.

    Returns:
      All images of both splits, uint8.

    Raises:
      FileNotFoundError: `data_dir` is no folder, or `source="tfds"` and nothing is prepared.
      ConnectionError: `source="cifar10"`, nothing on disk, and no network.
      ValueError: An unknown source, or a file that is damaged.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}; got {source!r}.")
    if data_dir is not None and not pathlib.Path(data_dir).is_dir():
        raise FileNotFoundError(f"data_dir must be a folder, got {data_dir!r}.")
    if source == "sample":
        return _read_sample()
    if source == "tfds":
        return _read_tfds(data_dir)
    folder = _find_folder(data_dir)
    if folder is not None:
        return _read_folder(folder)
    if source == "auto" and _tfds_builder(data_dir) is not None:
        return _read_tfds(data_dir)
    try:
        return _read_folder(_download(_folders(data_dir)[0]))
    except ConnectionError as error:
        if source == "cifar10":
            raise
        print(f"{error} Taking the embedded sample of Fashion-MNIST.")
        return _read_sample()


def _folders(data_dir: str | None) -> list[pathlib.Path]:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    own = [pathlib.Path(data_dir)] if data_dir is not None else []
    return [*own, cache / "optax_accum"]


def _find_folder(data_dir: str | None) -> pathlib.Path | None:
    for parent in _folders(data_dir):
        for folder in (parent / FOLDER, parent):
            if (folder / "test_batch.bin").is_file():
                return folder
    return None


def _read_folder(folder: pathlib.Path) -> Images:
    train = [_read_records(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
    test_images, test_labels = _read_records(folder / "test_batch.bin")
    train_images, train_labels = map(np.concatenate, zip(*train, strict=True))
    return Images("CIFAR-10", train_images, train_labels, test_images, test_labels)


def _read_records(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    data = np.fromfile(path, np.uint8)
    if not data.size or data.size % RECORD_BYTES:
        raise ValueError(
            f"{path} must hold CIFAR-10 records of {RECORD_BYTES} bytes each, got"
            f" {data.size} bytes."
        )
    records = data.reshape(-1, RECORD_BYTES)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].astype(np.int32)


def _download(parent: pathlib.Path) -> pathlib.Path:
    """Download and unpack the official archive; returns the folder."""
    print(f"Downloading {URL} to {parent}")
    content = io.BytesIO()
    try:
        with urllib.request.urlopen(URL, timeout=CONNECT_TIMEOUT) as response:
            size = int(response.headers.get("Content-Length", 0))
            with tqdm(total=size, unit="B", unit_scale=True) as bar:
                while chunk := response.read(1 << 16):
                    content.write(chunk)
                    bar.update(len(chunk))
        if content.tell() < size:
            raise ConnectionError(f"{content.tell()} of {size} bytes came")
    except (
        OSError,
        http.client.HTTPException,
    ) as error:  # urllib's and sockets' errors are OSErrors
        raise ConnectionError(f"CIFAR-10 cannot be downloaded ({error}).") from error
    digest = hashlib.sha256(content.getbuffer()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{URL} must have SHA-256 {SHA256}, got {digest}.")
    parent.mkdir(parents=True, exist_ok=True)
    content.seek(0)
    # Moved into place whole: an interrupted run leaves nothing that a later one takes for CIFAR-10.
    with (
        tempfile.TemporaryDirectory(dir=parent) as unpacked,
        tarfile.open(fileobj=content, mode="r:gz") as archive,
    ):
        archive.extractall(unpacked, filter="data")
        os.replace(pathlib.Path(unpacked) / FOLDER, parent / FOLDER)
    return parent / FOLDER


def _tfds_builder(data_dir: str | None):
    """The builder of a CIFAR-10 that TFDS has prepared for random access, or None."""
    import tensorflow_datasets as tfds  # takes seconds, and only this source needs it

    try:
        builder = tfds.builder("cifar10", data_dir=data_dir)
    except tfds.core.registered.DatasetNotFoundError:
        return None
    formats = {file_format.value for file_format in builder.info.available_file_formats()}
    return builder if "array_record" in formats and builder.info.splits else None


def _read_tfds(data_dir: str | None) -> Images:
    builder = _tfds_builder(data_dir)
    if builder is None:
        raise FileNotFoundError(
            "TFDS has no CIFAR-10 prepared with file_format='array_record'"
            f" (data_dir={data_dir!r}). Prepare it with tfds.builder('cifar10',"
            " file_format='array_record').download_and_prepare(), which needs TensorFlow; reading"
            " it does not."
        )
    splits = []
    for split in ("train", "test"):
        source = builder.as_data_source(split=split)
        examples = [source[i] for i in range(len(source))]
        splits.append(np.stack([example["image"] for example in examples]))
        splits.append(np.asarray([example["label"] for example in examples], np.int32))
    return Images("CIFAR-10 (TFDS)", *splits)


def _read_sample() -> Images:
    with lzma.open(SAMPLE) as file:
        arrays = np.load(io.BytesIO(file.read()))
    return Images(
        "Fashion-MNIST sample",
        arrays["train_images"][..., None],
        arrays["train_labels"].astype(np.int32),
        arrays["test_images"][..., None],
        arrays["test_labels"].astype(np.int32),
    )
