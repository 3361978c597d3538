"""What the README says runs, and is so."""

import json
import pathlib
import re
import tomllib

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import batchnorm_vs_groupnorm
import claims
import claims_table
import contrastive
import laws
import memory_claims
import optax_accum
from optax_accum import accumulate, chain

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "examples" / "results"
README = (ROOT / "README.md").read_text()
EXAMPLES = (ROOT / "examples" / "README.md").read_text()


def test_the_snippets_run_one_after_the_other():
    snippets = re.findall(r"```python\n(.*?)```", README + EXAMPLES, re.DOTALL)
    assert len(snippets) >= 3
    namespace = {}
    for i, snippet in enumerate(snippets):
        exec(compile(snippet, f"README snippet {i}", "exec"), namespace)


def test_the_readme_is_short_and_names_every_folder_of_the_package():
    assert len(README.splitlines()) <= 570
    package = ROOT / "optax_accum"
    folders = [f"{file.parent.name}/" for file in package.glob("*/__init__.py")]
    for name in [*folders, *(file.name for file in package.glob("_[a-z]*.py"))]:
        assert f"`optax_accum/{name}`" in README


def test_the_extras_and_the_oldest_python_of_the_readme_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"\.\[(\w+)\]'", README) + re.findall(r"`(cuda\w*)`", README)
    assert set(named) == set(project["optional-dependencies"])
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert versions == ["3.11", "3.12", "3.13"]
    assert f"Python {versions[0]} or newer" in README
    assert project["requires-python"] == f">={versions[0]}"


def anchors(text):
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize(("text", "folder"), [(README, ROOT), (EXAMPLES, ROOT / "examples")])
def test_pictures_and_links_lead_somewhere(text, folder):
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = folder / path
        assert not path or file.is_file(), target
        assert not anchor or anchor in anchors(file.read_text() if path else text), target


def test_all_that_is_exported_is_documented():
    names = [name for name in vars(optax_accum) if not name.startswith("_")]
    names = [name for name in names if callable(getattr(optax_accum, name))]
    assert len(names) >= 7
    for name in names:
        assert getattr(optax_accum, name).__doc__
        assert f"`{name}" in README
    assert optax_accum.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_table_of_norms_is_that_of_the_committed_results():
    rows = json.loads((RESULTS / "batchnorm_vs_groupnorm.json").read_text())
    full = batchnorm_vs_groupnorm.parse_args(["--full"])
    assert {batchnorm_vs_groupnorm.cell_of(row) for row in rows} <= {
        *batchnorm_vs_groupnorm.grid(full)
    }
    for row in rows:
        assert row["config"] == batchnorm_vs_groupnorm.config(full)
        assert row["train_images"] > 99_000
    assert batchnorm_vs_groupnorm.table(rows).split("\n\n")[0] in EXAMPLES
    errors = batchnorm_vs_groupnorm.mean_errors(rows)
    assert max(errors["batch", 64][0], errors["group", 64][0]) < 45  # or they learned too little


def test_the_tables_of_claims_are_those_of_the_committed_results():
    rows, timed = (
        json.loads((RESULTS / name).read_text()) for name in ("claims.json", "claims_time.json")
    )
    assert {row["cell"] for row in rows} == {*map(str, claims.grid(claims.parse_args(["--full"])))}
    assert claims_table.table(rows, timed) in EXAMPLES
    assert claims_table.errors_table(rows) in EXAMPLES


def test_the_tables_of_memory_are_those_of_the_committed_results():
    rows = json.loads((RESULTS / "memory_table.json").read_text())
    assert memory_claims.claims_table(rows).strip() in EXAMPLES
    (plan,) = [row["table"] for row in rows if "table" in row]
    assert plan in README


def test_the_table_of_contrastive_learning_is_that_of_the_committed_results():
    rows = json.loads((RESULTS / "contrastive.json").read_text())
    assert contrastive.table(rows) in EXAMPLES
    assert {row["seed"] for row in rows if row["arm"] == contrastive.BIG} == {0, 1, 2}


def test_adam_hides_a_loss_divided_by_k_and_sgd_does_not():
    gradients = [jnp.array([3.0, -1.0]), jnp.array([1.0, -5.0])] * 2
    divided = [g / 4 for g in gradients]
    for inner, ratio in ((optax.sgd(1e-3), 4.0), (optax.adam(1e-3), 1.0)):
        tx = chain(accumulate(4), inner)
        right, _ = laws.run(tx, jnp.zeros(2), gradients)
        wrong, _ = laws.run(tx, jnp.zeros(2), divided)
        np.testing.assert_allclose(right / wrong, ratio, rtol=1e-5)


def test_a_nan_stays_in_the_accumulator_of_multisteps_and_not_in_ours():
    good, bad, params = jnp.ones(2), jnp.full(2, jnp.nan), jnp.zeros(2)
    gradients = [bad, good, good, good]
    multi = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    for tx, recovers in ((multi, False), (accumulate(2, optax.sgd(1.0)), True)):
        state = tx.init(params)
        for gradient in gradients:
            updates, state = tx.update(gradient, state, params)
        assert bool(jnp.isfinite(updates).all()) == recovers


@pytest.mark.parametrize("k", [2, 3])
def test_a_rejected_micro_step_keeps_the_window_of_multisteps_open_and_counts_here(k):
    params = jnp.zeros(2)
    skip = {"should_skip_update_fn": optax.skip_not_finite}
    multi = optax.MultiSteps(optax.sgd(1.0), k, **skip).gradient_transformation()
    for tx, counted in ((multi, 0), (accumulate(k, optax.sgd(1.0), **skip), 1)):
        _, state = tx.update(jnp.full(2, jnp.nan), tx.init(params), params)
        assert (state.mini_step if counted == 0 else state.micro_step) == counted


def test_without_skips_multisteps_and_accumulate_train_alike():
    rng = np.random.default_rng(0)
    gradients = [laws.small_integers(rng, (3,), [jnp.float32]) for _ in range(8)]
    multi = optax.MultiSteps(optax.adam(0.5), 4).gradient_transformation()
    want, _ = laws.run(multi, jnp.zeros(3), gradients)
    got, _ = laws.run(accumulate(4, optax.adam(0.5)), jnp.zeros(3), gradients)
    np.testing.assert_allclose(got, want, rtol=1e-6)
