"""The table of memory: its models, its rows, and what it keeps."""

import functools
import json
import math
import pathlib

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from matplotlib import pyplot as plt

import memory_table as example
from memory_claims import BIG, claims_table, memory_table, ratios, time_table
from memory_models import Bert, ResNet, init

pytestmark = pytest.mark.usefixtures("compile_quickly")

RESNET = functools.partial(ResNet, "batch", stages=(1,))
BERT = functools.partial(Bert, layers=2, width=64, vocabulary=128, positions=16)
BIG_CELL, PARTS_CELL = (
    example.Cell("resnet50-batch", "float32", "plain", *split) for split in ((1, 32), (4, 8))
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The same models, of a block and of two layers."""
    for name, net, shape in (("resnet50-batch", RESNET, (32, 32, 3)), ("bert-base", BERT, (16,))):
        model = example.MODELS[name]
        example_like = jax.ShapeDtypeStruct(shape, model.example.dtype)
        monkeypatch.setitem(example.MODELS, name, model._replace(net=net, example=example_like))


def count(net, example):
    params, _ = jax.eval_shape(functools.partial(init, net), jax.random.key(0), example[None])
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet_50_has_the_published_number_of_parameters(norm):
    assert count(ResNet(norm), jnp.zeros((224, 224, 3))) == 25_557_032


def test_bert_base_has_the_published_number_of_parameters_and_a_head():
    assert count(Bert(), jnp.zeros(512, jnp.int32)) == 109_482_240 + 2 * (768 + 1)


@pytest.mark.slow
def test_the_parts_of_a_row_add_up_and_accumulation_takes_less():
    big, parts = map(example.measure, (BIG_CELL, PARTS_CELL))
    for row in (big, parts):
        assert row["peak"] == sum(row[part] for part in example.PARTS)
        assert row["params"] == row["opt_state"] == 4 * count(RESNET(), jnp.zeros((32, 32, 3)))
        assert row["batch"] == 32 * (32 * 32 * 3 + 1) * 4
        assert row["temporaries"] > 0
    assert big["accumulator"] == 0
    assert parts["accumulator"] == parts["params"]
    assert parts["peak"] < big["peak"] / 2


@pytest.mark.slow
def test_over_devices_each_has_a_part_of_parameters_and_optimizer_state():
    cells = [example.Cell("bert-base", "float32", "plain", 1, 32, devices) for devices in (1, 8)]
    one, eight = map(example.measure, cells)
    for part, rest in (("params", 1.1), ("opt_state", 1.1), ("batch", 1), ("peak", 2)):
        assert one[part] / 8 <= eight[part] <= rest * one[part] / 8


@pytest.mark.slow
def test_what_is_finished_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "CELLS", [BIG_CELL, PARTS_CELL])
    compiled, measure = [], example.measure
    monkeypatch.setattr(example, "measure", lambda cell: compiled.append(cell) or measure(cell))
    example.main(["--out", str(tmp_path)])
    path = tmp_path / "memory_table.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps(rows[:1]))
    example.main(["--out", str(tmp_path)])
    assert compiled == [BIG_CELL, PARTS_CELL, PARTS_CELL]
    assert [row["cell"] for row in json.loads(path.read_text())] == [row["cell"] for row in rows]
    assert memory_table(rows) in capsys.readouterr().out
    assert plt.imread(path.with_suffix(".png")).std() > 0.05


def test_time_is_a_median_of_ratios_within_a_run():
    row = {"ms": {BIG: [1, 2, 9], "checkpoint": [2, 3, 9]}, "peak": {BIG: 10, "checkpoint": 5}}
    assert ratios(row) == {BIG: (1, 1), "checkpoint": (1.5, 0.5)}
    assert "| +50% |" in claims_table([row])


class Linear(nn.Module):
    """Quick to compile."""

    dtype: str = "float32"
    checkpoint: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1000, dtype=self.dtype)(x.reshape(len(x), -1)).astype("float32")


@pytest.mark.slow
def test_the_arms_of_the_time_part_arrive_at_the_same_parameters(monkeypatch):
    arms = []

    class Recorded(example.Timed):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            arms.append(self)

    monkeypatch.setattr(example, "Timed", Recorded)
    row = example.measure_time(example.Model(Linear, None, optax.sgd(0.1)), 8, 8, runs=2)
    assert [len(ms) for ms in row["ms"].values()] == [2] * 5
    want = arms[0].state[0]
    for arm, atol in zip(arms[1:], (1e-6, 1e-2, 1e-6, 1e-6), strict=True):
        chex.assert_trees_all_close(arm.state[0], want, atol=atol)
    assert jax.tree.all(jax.tree.map(lambda x: jnp.isfinite(x).all(), want))


def test_the_tables_show_every_row_that_is_kept():
    results = pathlib.Path(example.__file__).parent / "results"
    rows = json.loads((results / "memory_table.json").read_text())
    shown = memory_table(rows) + time_table(rows)
    for row in rows:
        labels = [row["table"]] if "table" in row else [f"| {row['cell']} |"]
        labels = [f", {arm} |" for arm in row["ms"]] if "ms" in row else labels
        assert all(label in shown for label in labels)
    assert {str(cell) for cell in example.CELLS} <= {row["cell"] for row in rows}
    assert "nan" not in claims_table(rows)
