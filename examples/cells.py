"""Cells of an experiment: trained side by side, each kept in a file as soon as it is finished."""

import functools
import json
import multiprocessing
import os
import tempfile
from concurrent import futures

import jax
import numpy as np
from tqdm import tqdm

import image_data
from training import positive


def add_options(parser):
    """The options that all such experiments have."""
    parser.add_argument("--data", choices=image_data.SOURCES, default="auto")
    parser.add_argument("--data-dir", help="folder with cifar-10-batches-bin or a TFDS CIFAR-10")
    parser.add_argument("--data-name", help="name to report results under (default: what is read)")
    parser.add_argument("--workers", type=positive, default=os.cpu_count())
    parser.add_argument("--out", default="results")


def add_cell_options(parser, parse_cell):
    """The options that choose cells, by `parse_cell` from their names."""
    parser.add_argument(
        "--cells",
        type=lambda text: [parse_cell(cell) for cell in text.split(",")],
        help="only these, with commas between (default: all that belong to the run)",
    )
    parser.add_argument("--again", type=parse_cell, metavar="CELL", help="run one cell once more")


@functools.cache
def _images(data, data_dir):
    return image_data.load(data, data_dir)


def load(args):
    """The images that the options ask for."""
    images = _images(args.data, args.data_dir).head(args.train_size, args.test_size)
    return images._replace(name=args.data_name or images.name)


def one_thread(compiled, devices):
    """Set up a worker, before its JAX starts."""
    # One thread a worker: more images per second in all, and figures that do not depend on the
    # number of cores. On a card the workers share its memory.
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_cpu_multi_thread_eigen=false"
    if devices > 1:  # for these alone, since it changes what is rounded on one
        flags += f" --xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = flags
    os.environ["NPROC"] = "1"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_compilation_cache_dir", compiled)


def work(train, cell, args, data):
    """`train`, in a worker."""
    images = load(args)
    if images.name != data:
        raise RuntimeError(f"the run began on {data}, and a worker found {images.name}")
    return train(cell, images, args)


def train_all(train, cells, args, data, keep, devices=1):
    """Train the cells, `args.workers` at a time; each goes to `keep` when it is finished.

    Args:
      train: `train(cell, images, args)`, the cell's row in the results; a function of a module.
      cells: What to train.
      args: What `load` takes, and `workers`.
      data: The name of the images.
      keep: Called with each row.
      devices: How many virtual devices each cell takes on CPU.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as compiled,
        futures.ProcessPoolExecutor(args.workers, spawn, one_thread, (compiled, devices)) as pool,
    ):
        running = [pool.submit(work, train, cell, args, data) for cell in cells]
        try:
            for future in tqdm(futures.as_completed(running), total=len(running), unit=" cells"):
                keep(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Results:
    """The finished cells, in a file that each new one is written to at once."""

    def __init__(self, path, config, data, cell_of, order):
        self.path = path
        self.config, self.data = config, data
        self.cell_of, self.order = cell_of, order  # both functions of a row

    def rows(self):
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def add(self, row):
        def is_same(r):
            return self.is_mine(r) and self.cell_of(r) == self.cell_of(row)

        rows = sorted([*(r for r in self.rows() if not is_same(r)), row], key=self.order)
        half_written = self.path.with_suffix(".tmp")
        half_written.write_text(json.dumps(rows, indent=1) + "\n")
        os.replace(half_written, self.path)

    def is_mine(self, row):
        """Whether the row was measured as this run measures."""
        return row["config"] == self.config and row["data"] == self.data

    def mine(self):
        return [row for row in self.rows() if self.is_mine(row)]

    def left(self, cells):
        """Those of the cells that are not finished."""
        done = set(map(self.cell_of, self.mine()))
        left = [cell for cell in cells if cell not in done]
        print(f"{self.data}: {len(cells) - len(left)} cells are finished, {len(left)} are left")
        return left


def mean_and_error(values):
    """The mean and its standard error, None where there is one value."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
    return np.mean(values), error


def plus_minus(mean, error):
    return f"{mean:.1f}" + (f" ± {error:.1f}" if error is not None else "")
