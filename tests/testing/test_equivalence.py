"""The checker finds every planted fault, names its reason, and is silent where there is none."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from hypothesis import given, settings, strategies as st

import cifar_flax
import image_data
import norm_models
from optax_accum import accumulate, chain
from optax_accum.testing import assert_window_equivalence
from optax_accum.testing.gate_check import OF_THE_WINDOW

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 8)).astype(np.float32)
Y = RNG.integers(0, 5, 24)
# Sequences of 1 to 6 tokens: a mask, [24, 6].
MASK = (np.arange(6) < RNG.integers(1, 7, (24, 1))).astype(np.float32)
WEIGHTS = {
    "w": jnp.asarray(RNG.normal(size=(8, 5)), jnp.float32),
    "b": jnp.asarray(RNG.normal(size=5), jnp.float32),
}

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def losses(params, batch):
    x, y = batch[:2]
    return cross_entropy(x @ params["w"] + params["b"], y)


def mean_loss(params, batch):
    return losses(params, batch).mean()


def fault(*args, **kwargs):
    """The message of the fault that is found."""
    with pytest.raises(AssertionError) as error:
        assert_window_equivalence(*args, **kwargs)
    message = str(error.value)
    assert len(message.splitlines()) <= 6
    assert len(message) < 800  # short enough to read
    return message


# No fault.


@settings(max_examples=5)
@given(st.integers(1, 24), st.integers(0, 2**32), st.sampled_from([1e-4, 1.0, 1e4]))
def test_a_mean_over_examples_passes_at_every_k_and_scale(k, seed, scale):
    params = jax.tree.map(
        lambda p: scale * jax.random.normal(jax.random.key(seed), p.shape), WEIGHTS
    )
    assert_window_equivalence(mean_loss, params, (X, Y), k)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64, jnp.complex64])
def test_every_dtype_passes(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        params = jax.tree.map(lambda p: p.astype(dtype), WEIGHTS)

        def real(params, batch):
            return mean_loss(jax.tree.map(jnp.real, params), batch)

        assert_window_equivalence(real, params, (X.astype(params["w"].real.dtype), Y), 5)


def test_narrow_arithmetic_under_wide_parameters_is_rounding():
    def loss(params, batch):
        def narrow(tree):
            return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

        return mean_loss(narrow(params), (narrow(batch[0]), batch[1]))

    assert_window_equivalence(loss, WEIGHTS, (X, Y), 4)


def test_many_examples_that_cancel_at_zero_weights_are_rounding():
    x = np.repeat(RNG.normal(size=(2048, 8)), 2, axis=0).astype(np.float32)
    y = np.tile([1.0, -1.0], 2048).astype(np.float32) + 1e-3

    def loss(params, batch):
        return ((batch[0] @ params - batch[1]) ** 2).mean()

    assert_window_equivalence(loss, jnp.zeros(8), (x, y), 7)


def test_a_gradient_that_is_rounding_alone_is_no_fault():
    def loss(params, batch):  # a bias before a centering has no gradient
        x, y = batch
        logits = x @ params["w"] + params["b"] @ jnp.ones((5, 1))
        return cross_entropy(logits - logits.mean(-1, keepdims=True), y).mean()

    assert_window_equivalence(loss, WEIGHTS, (X, Y), 4)


def test_narrow_arithmetic_on_the_way_back_is_rounding():
    @jax.custom_vjp
    def through_bfloat16(x):
        return x

    def narrow(_, g):
        return (g.astype(jnp.bfloat16).astype(g.dtype),)

    through_bfloat16.defvjp(lambda x: (x, None), narrow)

    def loss(params, batch):
        h = batch[0]
        for layer in params["layers"]:
            h = jnp.tanh(through_bfloat16(h @ layer))
        return mean_loss(params, (h, batch[1]))

    layers = [jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32) / 2 for _ in range(3)]
    assert_window_equivalence(loss, {**WEIGHTS, "layers": layers}, (X, Y), 7)


@pytest.mark.parametrize("gain", [1.2, 2.0])
def test_a_deep_net_that_amplifies_rounding_is_no_fault(gain):
    rng = np.random.default_rng(1)
    shapes = [(8, 16)] + [(16, 16)] * 19
    layers = [jnp.asarray(rng.normal(size=s) * gain / 8**0.5, jnp.float32) for s in shapes]

    def loss(params, batch):
        h = batch[0]
        for layer in params["layers"]:
            h = jnp.sin(h @ layer)
        return cross_entropy(h @ params["head"], batch[1]).mean()

    params = {"layers": layers, "head": jnp.asarray(rng.normal(size=(16, 5)), jnp.float32)}
    assert_window_equivalence(loss, params, (X, Y), 7)


def test_random_features_with_one_key_for_ever_are_no_fault():
    def features(x):
        return jnp.tanh(x @ jax.random.normal(jax.random.key(3), (8, 8)))

    def loss(params, batch):
        return mean_loss(params, (features(batch[0]), batch[1]))

    assert_window_equivalence(loss, WEIGHTS, (X, Y), 4)

    def token(params, batch):
        return token_loss(params, (features(batch[0]), *batch[1:]))

    assert "weight_fn=" in fault(token, WEIGHTS, (X, Y, MASK), 3)


def test_a_micro_batch_of_padding_alone_has_weight_0():
    mask = MASK.copy()
    mask[:6] = 0

    def count(batch):
        return batch[2].sum()

    assert_window_equivalence(token_loss, WEIGHTS, (X, Y, mask), 4, weight_fn=count)  # 0 / 0

    def guarded(params, batch):
        return (losses(params, batch)[:, None] * batch[2]).sum() / jnp.maximum(batch[2].sum(), 1)

    message = fault(guarded, WEIGHTS, (X, Y, mask), 4)
    assert "weight_fn=" in message
    assert "0.000, " in message


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_the_models_of_the_cifar_example_pass(norm):
    images = image_data.load("sample").head(32, 1)
    model = cifar_flax.CNN(images.train_images, norm, jnp.float32, nnx.Rngs(0))
    assert_window_equivalence(nnx_loss, model, images[1:3], 4)


@pytest.mark.slow
def test_the_model_of_the_norm_example_passes():
    images = image_data.load("sample").head(32, 1)
    model = norm_models.new_model("group", 1, seed=0)
    assert_window_equivalence(nnx_loss, model, images[1:3], 4)


# Batch statistics.


class LinenNet(nn.Module):
    norm: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        if self.norm == "group":
            x = nn.GroupNorm(4)(x)
        else:
            x = nn.BatchNorm(use_running_average=self.norm == "frozen")(x)
        return nn.Dense(5)(nn.relu(x))


def linen(norm):
    """A loss with mutable state, its params and its state."""
    net = LinenNet(norm)
    state = dict(net.init(jax.random.key(0), X))
    params = state.pop("params")

    def loss(params, state, batch):
        logits, state = net.apply({"params": params, **state}, batch[0], mutable=[*state])
        return cross_entropy(logits, batch[1]).mean(), state

    return loss, params, state


class NnxNet(nnx.Module):
    def __init__(self, norm, dropout=0.0):
        rngs = nnx.Rngs(0)
        self.inner, self.outer = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)
        self.norm = norm(16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


group_norm = functools.partial(nnx.GroupNorm, num_groups=4)


def nnx_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1]).mean()


def test_batch_norm_is_found_in_linen_and_its_parameters_named():
    loss, params, state = linen("batch")
    message = fault(loss, params, (X, Y), 4, model_state=state)
    assert "batch statistics" in message
    assert "['batch_stats']['BatchNorm_0']" in message
    assert "['Dense_0']['kernel']: by" in message


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_other_norms_pass_in_linen(norm):
    loss, params, state = linen(norm)
    assert_window_equivalence(loss, params, (X, Y), 4, model_state=state)


def test_batch_norm_is_found_in_nnx_and_frozen_it_passes():
    model = NnxNet(nnx.BatchNorm)
    model(X)  # running statistics of its own
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
    message = fault(nnx_loss, model, (X, Y), 4)
    assert "batch statistics" in message
    assert "['norm']" in message
    chex.assert_trees_all_equal(nnx.state(model, nnx.BatchStat), before)  # untouched
    model.set_attributes(nnx.BatchNorm, use_running_average=True)
    assert_window_equivalence(nnx_loss, model, (X, Y), 4)


def test_group_norm_passes_in_nnx():
    assert_window_equivalence(nnx_loss, NnxNet(group_norm), (X, Y), 4)


def normalised_loss(params, batch):
    logits = batch[0] @ params["w"]
    normalised = (logits - logits.mean(0)) / logits.std(0)
    return cross_entropy(normalised + params["b"], batch[1]).mean()


def test_batch_norm_without_running_statistics_is_found():
    assert "batch statistics" in fault(normalised_loss, WEIGHTS, (X, Y), 4)


def running_loss(params, state, batch):
    """Normalises by running statistics that this batch has moved already."""
    new = {
        "mean": 0.9 * state["mean"] + 0.1 * batch[0].mean(0),
        "var": 0.9 * state["var"] + 0.1 * batch[0].var(0),
    }
    x = (batch[0] - new["mean"]) / jnp.sqrt(new["var"])
    return mean_loss(params, (x, batch[1])), new


def test_statistics_that_move_within_the_window_are_found():
    state = {"mean": jnp.zeros(8), "var": jnp.ones(8)}
    assert "batch statistics" in fault(running_loss, WEIGHTS, (X, Y), 4, model_state=state)
    assert_window_equivalence(running_loss, WEIGHTS, (X, Y), 1, model_state=state)


class Extras(nnx.Module):
    """A counter that is a Python number, and an activation that is sown."""

    def __init__(self):
        self.layer = nnx.Linear(8, 5, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(0)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "features", x)
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sow, in newer versions of Flax
def test_other_variables_of_a_module_are_carried_along():
    model = Extras()
    assert_window_equivalence(nnx_loss, model, (X, Y), 4)
    model(X)
    assert_window_equivalence(nnx_loss, model, (X, Y), 4)


def test_state_of_python_numbers_is_carried_along():
    def loss(params, state, batch):
        return (mean_loss(params, batch), {"calls": state["calls"] + 1})

    assert_window_equivalence(loss, WEIGHTS, (X, Y), 4, model_state={"calls": 0})


# Randomness.


def dropout_loss(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch[0].shape)
    return mean_loss(params, (batch[0] * keep, batch[1]))


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["key", "raw"])
def test_one_dropout_key_for_all_micro_batches_is_found(key):
    def loss(params, batch):
        return dropout_loss(params, batch, key)

    assert "one random key for all micro-batches" in fault(loss, WEIGHTS, (X, Y), 4)

    def ignores(params, batch, rng):
        return dropout_loss(params, batch, key)

    assert "one random key" in fault(ignores, WEIGHTS, (X, Y), 4, rng=key)


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["key", "raw"])
def test_a_key_for_each_micro_batch_passes(key):
    assert_window_equivalence(dropout_loss, WEIGHTS, (X, Y), 4, rng=key)


def test_noise_of_every_distribution_is_noise():
    def loss(params, batch, key):
        return mean_loss(
            params, (batch[0] * jax.random.beta(key, 2.0, 2.0, batch[0].shape), batch[1])
        )

    assert_window_equivalence(loss, WEIGHTS, (X, Y), 4, rng=jax.random.key(0))


def test_a_loss_that_never_uses_its_key_is_not_random():
    def loss(params, batch, rng):
        return mean_loss(params, batch)

    assert_window_equivalence(loss, WEIGHTS, (X, Y), 4, rng=jax.random.key(0))


@pytest.mark.slow
def test_dropout_passes_in_nnx_and_with_batch_norm_does_not():
    assert_window_equivalence(nnx_loss, NnxNet(group_norm, dropout=0.3), (X, Y), 4)
    assert "batch statistics" in fault(nnx_loss, NnxNet(nnx.BatchNorm, dropout=0.1), (X, Y), 12)


def test_a_sum_is_found_through_dropout():
    def loss(params, batch, key):
        return dropout_loss(params, batch, key) * len(batch[0])

    assert "a common factor" in fault(loss, WEIGHTS, (X, Y), 4, rng=jax.random.key(0))


@pytest.mark.parametrize("k", [2, 4])
def test_batch_norm_without_statistics_is_found_through_dropout(k):
    def loss(params, batch, key):
        keep = jax.random.bernoulli(key, 0.9, batch[0].shape)
        return normalised_loss(params, (batch[0] * keep, batch[1]))

    assert "not a mean over examples" in fault(loss, WEIGHTS, (X, Y), k, rng=jax.random.key(0))


class NoisyNet(nnx.Module):
    """A linear layer, a norm and a linear layer, behind dropout."""

    def __init__(self, norm):
        rngs = nnx.Rngs(0)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.inner, self.outer = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)
        self.norm = norm(16, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.norm(self.inner(self.dropout(x)))))


class MovingMean(nnx.Module):
    """Passes its input on, and writes a mean of its features that nothing reads."""

    def __init__(self, size, rngs):
        del rngs
        self.mean = nnx.BatchStat(jnp.zeros(size))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return x


def test_batch_norm_behind_dropout_is_found_whatever_the_noise():
    message = fault(nnx_loss, NoisyNet(nnx.BatchNorm), (X, Y), 2)
    assert "random numbers held at one value" in message
    assert "Likely: batch statistics. loss_fn changes ['norm']['mean']" in message


def test_statistics_behind_dropout_that_nothing_reads_pass():
    assert_window_equivalence(nnx_loss, NoisyNet(MovingMean), (X, Y), 2)


# In the losses below `state["mean"]` is a moving mean, of the loss or of the features.


def tracked(loss):
    """The loss, and a moving mean of it that nothing reads."""

    def loss_and_state(params, state, batch, key):
        value = loss(params, batch, key)
        return value, {"mean": 0.9 * state["mean"] + 0.1 * value, "calls": state["calls"] + 1}

    return loss_and_state


def layers_loss(params, batch, key):
    """Dropout in a loop over layers."""

    def layer(x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.tanh(x @ params["inner"]) * keep, None

    x, _ = jax.lax.scan(layer, batch[0], jax.random.split(key, 3))
    return mean_loss(params, (x, batch[1]))


def normalised_layers_loss(params, batch, key):
    x = batch[0] @ params["inner"]
    return layers_loss(params, ((x - x.mean(0)) / x.std(0), batch[1]), key)


def mixed_loss(params, batch, key):
    """Mixup with a random example of the batch, by a share of the beta distribution."""
    x, y = batch
    for_share, for_order = jax.random.split(key)
    share = jax.random.beta(for_share, 0.4, 0.4)
    order = jax.random.permutation(for_order, len(x))
    both = share * losses(params, (x, y)) + (1 - share) * losses(params, (x, y[order]))
    return both.mean()


def spread_loss(params, batch, key):
    """Noise whose size is spread evenly over the places of the batch."""
    x, y = batch
    size = (jax.random.uniform(key) + jnp.arange(len(x)) / len(x)) % 1
    return mean_loss(params, (x * size[:, None], y))


def sampled_loss(params, batch, key):
    """The mean over a random half of the batch."""
    x, y = batch
    rows = jax.random.permutation(key, len(x))[: len(x) // 2]
    return mean_loss(params, (x[rows], y[rows]))


def counted_loss(params, batch, key):
    """Dropout by a random number of a loop that waits for it."""
    rate = jax.random.poisson(key, 3.0, batch[0].shape) / 3
    return mean_loss(params, (batch[0] * rate, batch[1]))


LAYERED = {**WEIGHTS, "inner": jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)}
STATE = {"mean": jnp.zeros([]), "calls": 0}


@pytest.mark.parametrize("loss", [dropout_loss, layers_loss, mixed_loss, spread_loss, sampled_loss])
def test_a_moving_mean_beside_noise_is_no_fault(loss):
    params = LAYERED if loss is layers_loss else WEIGHTS
    key = jax.random.key(0)
    assert_window_equivalence(tracked(loss), params, (X, Y), 2, model_state=STATE, rng=key)


def test_a_mean_over_tokens_behind_dropout_needs_and_takes_its_weights():
    def loss(params, batch, key):
        keep = jax.random.bernoulli(key, 0.5, batch[0].shape)
        return token_loss(params, (batch[0] * keep, *batch[1:]))

    given = {"model_state": STATE, "rng": jax.random.key(0)}

    def count(batch):
        return batch[2].sum()

    assert_window_equivalence(tracked(loss), WEIGHTS, (X, Y, MASK), 2, weight_fn=count, **given)
    assert "random numbers held" in fault(tracked(loss), WEIGHTS, (X, Y, MASK), 2, **given)


def test_numbers_that_a_loop_waits_for_stay_random():
    assert_window_equivalence(counted_loss, WEIGHTS, (X, Y), 2, rng=jax.random.key(0))


def test_statistics_without_a_state_are_found_in_a_loop_with_dropout():
    message = fault(normalised_layers_loss, LAYERED, (X, Y), 2, rng=jax.random.key(0))
    assert "random numbers held at one value" in message
    assert "not a mean over examples" in message


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_state_that_moves_within_the_window_is_found_behind_dropout(dtype):
    def loss(params, state, batch, key):
        """Weighs a part of the loss by what the micro-batch before left."""
        part = 1 + 0.01 * state["step"].astype("float32")
        return part * dropout_loss(params, batch, key), {"step": state["step"] + 1}

    given = {"model_state": {"step": jnp.zeros([], dtype)}, "rng": jax.random.key(0)}
    assert "random numbers held" in fault(loss, WEIGHTS, (X, Y), 4, **given)
    assert_window_equivalence(loss, WEIGHTS, (X, Y), 1, **given)


# Losses that are not means over examples.


def token_loss(params, batch):
    """A mean over the tokens of the batch."""
    mask = batch[2]
    return (losses(params, batch)[:, None] * mask).sum() / mask.sum()


def test_a_mean_over_tokens_is_found_and_the_weights_that_would_fit():
    message = fault(token_loss, WEIGHTS, (X, Y, MASK), 3)
    assert "weight_fn=" in message
    tokens = np.array([part.sum() for part in np.split(MASK, 3)])
    assert ", ".join(f"{share:.3f}" for share in tokens / tokens.sum()) in message


def test_a_mean_over_tokens_passes_with_its_weights():
    def count(batch):
        return batch[2].sum()

    assert_window_equivalence(token_loss, WEIGHTS, (X, Y, MASK), 3, weight_fn=count)

    def summed(params, batch):
        return (losses(params, batch)[:, None] * batch[2]).sum()

    def tokens(params, batch):
        return summed(params, batch) / MASK.sum()

    assert_window_equivalence(
        tokens,
        WEIGHTS,
        (X, Y, MASK),
        3,
        weight_fn=count,
        normalize="ratio",
        micro_loss_fn=summed,
    )


def contrastive_loss(params, batch):
    """InfoNCE: each example against all others of its batch."""
    z = batch[0] @ params["w"]
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    return -jnp.diag(jax.nn.log_softmax(5 * z @ z.T)).mean()


def auxiliary_loss(params, batch):
    """A balance of the classes within the batch, as in mixtures of experts."""
    share = jax.nn.softmax(batch[0] @ params["w"]).mean(0)
    return mean_loss(params, batch) + (share**2).sum()


def order_loss(params, batch):
    """Each example against the next one of its batch."""
    z = jnp.tanh(batch[0] @ params["w"])
    return ((z - jnp.roll(z, 1, axis=0)) ** 2).mean()


def weak_order_loss(params, batch):
    return mean_loss(params, batch) + order_loss(params, batch)


def weak_auxiliary_loss(params, batch):
    share = jax.nn.softmax(batch[0].astype(jnp.float32) @ params["w"]).mean(0)
    return mean_loss(params, batch) + 0.01 * (share**2).sum()


def hidden_auxiliary_loss(params, batch):
    """In one parameter, beside a loss 1e5 times as large."""
    share = jax.nn.softmax(batch[0] @ params["router"]).mean(0)
    return 1e5 * mean_loss(params, batch) + (share**2).sum()


def test_a_fault_in_one_small_parameter_is_found_and_named():
    params = {**WEIGHTS, "router": WEIGHTS["w"]}
    message = fault(hidden_auxiliary_loss, params, (X, Y), 4)
    assert "not a mean over examples" in message
    assert "1 of 3 parameters differ:\n  ['router']" in message


def test_narrow_inputs_hide_nothing_where_the_arithmetic_is_wide():
    batch = (X.astype(jnp.bfloat16), Y)
    assert "not a mean over examples" in fault(weak_auxiliary_loss, WEIGHTS, batch, 4)


def test_mixup_with_the_reversed_batch_is_found_in_bfloat16():
    def loss(params, batch):
        def narrow(tree):
            return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

        x = narrow(0.8 * batch[0] + 0.2 * batch[0][::-1])
        params = narrow(params)
        y = batch[1]
        return (0.8 * losses(params, (x, y)) + 0.2 * losses(params, (x, y[::-1]))).mean()

    assert "not a mean over" in fault(loss, WEIGHTS, (X, Y), 4)


@pytest.mark.parametrize(
    "loss", [contrastive_loss, auxiliary_loss, weak_auxiliary_loss, order_loss, weak_order_loss]
)
@pytest.mark.parametrize("k", [2, 5])
def test_a_loss_in_which_examples_see_each_other_is_found(loss, k):
    assert "not a mean over examples" in fault(loss, WEIGHTS, (X, Y), k)


def test_a_penalty_of_the_parameters_is_no_fault():
    def loss(params, batch):
        return mean_loss(params, batch) + 0.1 * optax.tree.norm(params) ** 2

    assert_window_equivalence(loss, WEIGHTS, (X, Y), 4)


# Common factors.


@pytest.mark.parametrize("k", [4, 5])
@pytest.mark.parametrize("divisor", [1, 24], ids=["never normalised", "divided by the big batch"])
def test_a_sum_is_found_by_its_common_factor(k, divisor):
    def loss(params, batch):
        return losses(params, batch).sum() / divisor

    message = fault(loss, WEIGHTS, (X, Y), k)
    assert "a common factor" in message
    assert ("4 times" if k == 4 else "the sum of the micro-batches'") in message
    assert_window_equivalence(loss, WEIGHTS, (X, Y), k, normalize="sum")


def test_a_loss_that_is_divided_by_k_is_found_beside_that_of_the_big_batch():
    def divided(params, batch):
        return mean_loss(params, batch) / 8

    message = fault(mean_loss, WEIGHTS, (X, Y), 8, micro_loss_fn=divided)
    assert "a common factor" in message
    assert "8 times the window's" in message


# Optimizers.


@pytest.mark.parametrize(
    "tx",
    [
        chain(accumulate(4), optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
        chain(optax.zero_nans(), accumulate(4), optax.adam(1e-3)),
        chain(optax.scale(0.5), accumulate(4), optax.adam(1e-3)),
        optax.partition(
            {"a": accumulate(4, optax.adam(1e-3)), "b": chain(accumulate(4), optax.sgd(1.0))},
            {"w": "a", "b": "b"},
        ),
        accumulate(4, optax.adam(1e-3), should_skip_update_fn=optax.skip_not_finite),
        accumulate(
            4,
            optax.sgd(1.0),
            should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=1e3),
        ),
        chain(optax.add_decayed_weights(1e-2), accumulate(4), optax.sgd(0.1)),
        accumulate(4, optax.sgd(optax.linear_schedule(0.0, 1.0, 100))),
        accumulate(4, optax.adam(1e-3), optax.contrib.reduce_on_plateau()),
        accumulate(
            4,
            optax.adam(1e-3),
            optax.contrib.reduce_on_plateau(),
            average_extra_args=("value",),
        ),
        optax.masked(accumulate(4, optax.adam(1e-3)), {"w": True, "b": True}),
    ],
)
def test_an_optimizer_with_all_behind_the_gate_passes(tx):
    assert_window_equivalence(mean_loss, WEIGHTS, (X, Y), 4, tx=tx)


normalised_gradient = optax.stateless(
    lambda updates, params: jax.tree.map(lambda g: g / jnp.linalg.norm(g), updates)
)


def top_three(updates, params):
    """Sparsification of each micro-gradient: it does not depend on its scale."""
    del params

    def largest(g):
        return jnp.sort(jnp.abs(g).ravel())[-3]

    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) >= largest(g), g, 0), updates)


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (chain(optax.scale_by_adam(), accumulate(4)), "stateful transformation outside the gate"),
        (chain(optax.trace(0.9), accumulate(4)), "opt_state[0].trace"),
        (
            optax.inject_hyperparams(lambda rate: accumulate(4, optax.sgd(rate)))(1e-3),
            "opt_state.count",
        ),
        (chain(optax.clip_by_global_norm(0.1), accumulate(4)), "clipped or normalised outside"),
        (chain(optax.scale_by_sign(), accumulate(4)), "clipped or normalised outside"),
        (chain(accumulate(3), optax.sgd(1.0)), "not with micro-step 4"),
        (chain(accumulate(8), optax.sgd(1.0)), "not with micro-step 4"),
        (chain(optax.clip_by_global_norm(10.0), accumulate(4), optax.sgd(0.1)), "clipped or"),
        (chain(optax.adaptive_grad_clip(1.0), accumulate(4), optax.sgd(0.1)), "clipped or"),
        (chain(optax.stateless(top_three), accumulate(4), optax.sgd(0.1)), "clipped or"),
        (
            optax.partition(
                {"a": accumulate(4, optax.sgd(0.1)), "b": optax.sgd(1.0)}, {"w": "a", "b": "b"}
            ),
            "updates params['b'] in a micro-step off the boundary",
        ),
        (
            optax.masked(accumulate(4, optax.adam(1e-3)), {"w": True, "b": False}),
            "updates params['b']",
        ),
        (accumulate(4, optax.sgd(0.1), normalize="sum"), "normalize='sum'"),
        (optax.adam(1e-3), "must hold an accumulator"),
        (
            optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
            "must hold an accumulator",
        ),
        (optax.chain(normalised_gradient, accumulate(4)), "clipped or"),
        (
            accumulate(4, optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()),
            "no optax.MultiSteps",
        ),
    ],
)
def test_an_optimizer_with_something_outside_the_gate_is_found(tx, words):
    assert words in fault(mean_loss, WEIGHTS, (X, Y), 4, tx=tx)


def looked_up(updates, state, params=None, **extra_args):
    del params
    return jax.tree.map(lambda u: u / extra_args["tokens"], updates), state


def required(updates, state, params=None, *, tokens, **_):
    del params
    return jax.tree.map(lambda u: u / tokens, updates), state


def with_update(update):
    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def sam(**kwargs):
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(optax.sgd(0.1), ascent, **kwargs)


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        (sam(opaque_mode=True), ["grad_fn"]),
        (optax.lbfgs(), ["grad", "value_fn"]),
        (optax.scale_by_backtracking_linesearch(4), ["grad", "value_fn"]),
        (optax.contrib.sophia(0.1), ["obj_fn"]),
        (with_update(looked_up), ["tokens"]),
        (with_update(required), ["tokens"]),
    ],
)
def test_an_extra_arg_that_the_checker_has_not_is_named_with_what_to_pass(inner, names):
    with pytest.raises(ValueError, match="tx must need no other extra args") as error:
        assert_window_equivalence(mean_loss, WEIGHTS, (X, Y), 2, tx=chain(accumulate(2), inner))
    assert f"one that needs {names}" in str(error.value)
    for name in names:
        assert OF_THE_WINDOW.get(name, f"{name}=...") in str(error.value)


def test_an_optimizer_that_takes_no_value_passes():
    assert_window_equivalence(mean_loss, WEIGHTS, (X, Y), 2, tx=accumulate(2, sam()))


def test_another_error_of_tx_stays_what_it_is():
    wrong = optax.stateless(lambda updates, params: {"w": updates["w"]})
    with pytest.raises(ValueError, match="tree") as error:
        assert_window_equivalence(mean_loss, WEIGHTS, (X, Y), 2, tx=chain(wrong, accumulate(2)))
    assert "extra args" not in str(error.value)


# Arguments.


def test_has_aux_and_model_state_return_as_in_the_train_step():
    def with_aux(params, batch):
        return (mean_loss(params, batch), {"a": 1})

    assert_window_equivalence(with_aux, WEIGHTS, (X, Y), 4, has_aux=True)

    def both(params, state, batch):
        return (mean_loss(params, batch), (state, {"a": 1}))

    assert_window_equivalence(
        both, WEIGHTS, (X, Y), 4, has_aux=True, model_state={"n": jnp.ones(1)}
    )


@pytest.mark.parametrize(
    ("batch", "k", "kwargs", "message"),
    [
        ((X, Y), 0, {}, "num_microbatches must be an int from 1 to the 24 .* got 0"),
        ((X, Y), 25, {}, "num_microbatches .* got 25"),
        ((X, Y), 2.0, {}, r"num_microbatches .* got 2\.0"),
        ((X, Y), True, {}, "num_microbatches .* got True"),
        ((X, Y[:5]), 4, {}, r"one number of examples .*batch\[0\]': 24, 'batch\[1\]': 5"),
        (X[:0], 1, {}, "batch must hold at least one example"),
        ((X, 3.0), 4, {}, r"example axis first.*batch\[1\] is the scalar 3\.0"),
        ((), 4, {}, "batch must hold"),
        ((X, Y), 4, {"normalize": "none"}, "normalize must be one of"),
        ((0 * X, Y), 4, {"params": {"w": WEIGHTS["w"]}}, "nothing to compare"),
        ((1e-37 * X, Y), 4, {"params": {"w": WEIGHTS["w"]}}, "underflow"),
        ((X, Y), 4, {"params": {"b": 1, "w": WEIGHTS["w"]}}, r"params\['b'\] has dtype int32"),
        ((X, Y), 4, {"tx": "adam"}, "tx must be an optax gradient transformation, got 'adam'"),
        ((X, Y), 4, {"has_aux": True}, r"must return a pair \(\.\.\., aux\)"),
        ((X * np.nan, Y), 4, {}, r"finite to be compared; that of \['b'\]"),
    ],
)
def test_a_wrong_argument_is_named(batch, k, kwargs, message):
    params = kwargs.get("params", WEIGHTS)
    kwargs = {name: value for name, value in kwargs.items() if name != "params"}
    loss = mean_loss if "b" in params else lambda p, batch: (batch[0] @ p["w"]).mean()
    with pytest.raises(ValueError, match=message):
        assert_window_equivalence(loss, params, batch, k, **kwargs)


def test_it_runs_where_dtypes_are_not_promoted():
    params, x = {"w": jnp.ones((8, 3), jnp.bfloat16)}, jnp.asarray(X, jnp.bfloat16)
    tx = accumulate(4, optax.sgd(0.1))
    with jax.numpy_dtype_promotion("strict"):
        assert_window_equivalence(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x, 4, tx=tx)


def test_a_module_brings_its_own_state():
    with pytest.raises(ValueError, match=r"model_state must be None for an nnx\.Module"):
        assert_window_equivalence(nnx_loss, NnxNet(group_norm), (X, Y), 4, model_state={})
