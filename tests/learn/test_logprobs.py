import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.learn import logprobs
from rsearch.learn.logprobs import token_logprobs
from rsearch.models.sharding import batch_sharding, make_mesh, param_shardings
from tests.rollout import tiny

V = 40
MODEL, PARAMS = tiny.model(vocab_size=V), tiny.params(vocab_size=V)
TOKENS = np.random.default_rng(0).integers(0, V, (3, 12)).astype(np.int32)


def naive(model, params, tokens, *, temperature=1.0):
    """Return the same as token_logprobs, with all logits at once."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden, _ = model.apply({"params": params}, tokens, positions)
    logits = model.apply({"params": params}, hidden, method="logits") / temperature
    logp = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))


def largest_array(jaxpr):
    """Return the size of a program's largest array, loops and calls included."""
    size = 0
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            size = max(size, getattr(variable.aval, "size", 0))
        for inner in jax.core.jaxprs_in_params(equation.params):
            size = max(size, largest_array(inner))
    return size


@pytest.mark.parametrize(
    "chunk_tokens, temperature", [(1, 0.7), (13, 0.7), (1000, 1.0)]
)
def test_chunks_do_not_change_the_results(chunk_tokens, temperature):
    settings = dict(temperature=temperature)
    expected = run(naive, **settings)
    result = run(token_logprobs, **settings, chunk_tokens=chunk_tokens)
    for ours, theirs in zip(result, expected):
        assert ours.shape == TOKENS.shape and not ours[:, 0].any()
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def run(function, tokens=TOKENS, **settings):
    return jax.jit(lambda p, t: function(MODEL, p, t, **settings))(PARAMS, tokens)


def gradient(function, **settings):
    """Return the gradient of a sum of log-probs and entropies, with random weights."""
    weights = np.random.default_rng(1).normal(size=(2, *TOKENS.shape))

    def total(params):
        both = function(MODEL, params, TOKENS, **settings)
        return sum((w * x).sum() for w, x in zip(weights, both))

    return jax.jit(jax.grad(total))(PARAMS)


def test_the_gradient_equals_that_with_all_logits_at_once():
    expected = gradient(naive, temperature=0.7)
    result = gradient(token_logprobs, temperature=0.7, chunk_tokens=9)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4)  # noqa: E731
    jax.tree.map(close, result, expected)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.5)])
def test_a_large_embedding_is_multiplied_without_transposing_it_first(
    monkeypatch, dtype, atol
):
    shape = dict(tie_embeddings=True, vocab_size=V)
    model = tiny.model(**shape).clone(dtype=jnp.dtype(dtype))
    weights = np.random.default_rng(1).normal(size=(2, *TOKENS.shape))

    def scores_and_gradient():
        def total(params):
            both = token_logprobs(model, params, TOKENS, chunk_tokens=9)
            return sum((w * x).sum() for w, x in zip(weights, both)), both

        return jax.jit(jax.grad(total, has_aux=True))(tiny.params(**shape))

    with monkeypatch.context() as elsewhere:  # a GPU, where it is transposed first
        elsewhere.setattr(logprobs, "platform_of", lambda mesh: "gpu")
        expected = scores_and_gradient()
    monkeypatch.setattr(logprobs, "LARGE_EMBEDDING", 0)
    result = scores_and_gradient()
    close = lambda a, b: np.testing.assert_allclose(a, b, 1e-2, atol)  # noqa: E731
    jax.tree.map(close, result, expected)
    norm = np.linalg.norm(expected[0]["embedding"])
    assert (
        np.linalg.norm(result[0]["embedding"] - expected[0]["embedding"]) < norm / 100
    )


@pytest.mark.parametrize("chunk_tokens", [3, 9, 1000])
def test_unwanted_tokens_are_0_and_change_nothing_else(chunk_tokens):
    wanted = np.random.default_rng(3).random(TOKENS.shape) < 0.4
    wanted[1] = False  # a row without tokens in the loss
    settings = dict(temperature=0.7, chunk_tokens=chunk_tokens)

    def masked(*args, **settings):
        return tuple(
            jnp.where(wanted, x, 0.0) for x in token_logprobs(*args, **settings)
        )

    for ours, theirs in zip(
        run(token_logprobs, wanted=wanted, **settings), run(masked, **settings)
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4)  # noqa: E731
    jax.tree.map(
        close,
        gradient(token_logprobs, wanted=wanted, **settings),
        gradient(masked, **settings),
    )


def test_gradients_of_bfloat16_chunks_are_summed_in_float32():
    """A sum in bfloat16 would make the embedding's gradient depend on their number."""
    tokens = np.random.default_rng(2).integers(0, V, (2, 129)).astype(np.int32)
    model = tiny.model(vocab_size=V).clone(dtype=jnp.bfloat16)

    def gradient(chunk_tokens):
        def total(params):
            inputs = model, params, tokens
            return token_logprobs(*inputs, chunk_tokens=chunk_tokens)[0].sum()

        return jax.jit(jax.grad(total))(PARAMS)["unembedding"]

    many, single = gradient(2), gradient(2048)
    assert jnp.linalg.norm(many - single) < 0.004 * jnp.linalg.norm(single)


def test_a_log_probability_does_not_depend_on_later_tokens():
    """It depends only on the tokens up to its own."""
    other = TOKENS.copy()
    other[:, 8:] = (other[:, 8:] + 1) % V
    first, second = (run(token_logprobs, t)[0] for t in (TOKENS, other))
    np.testing.assert_allclose(first[:, :8], second[:, :8], atol=1e-6)
    assert (np.abs(first - second)[:, 8:] > 1e-4).all()


def test_logits_of_a_large_vocabulary_are_never_all_in_memory():
    b, t, v, chunk = 4, 65, 5000, 32
    model = tiny.model(vocab_size=v)
    params = jax.eval_shape(lambda: tiny.params(vocab_size=v))
    tokens = jax.ShapeDtypeStruct((b, t), jnp.int32)

    def largest(function, **settings):
        def total(params, tokens):
            logp, entropy = function(model, params, tokens, **settings)
            return logp.sum() + entropy.sum()

        return largest_array(jax.make_jaxpr(jax.grad(total))(params, tokens).jaxpr)

    assert largest(naive) >= b * (t - 1) * v  # the measure would notice it
    assert largest(token_logprobs, chunk_tokens=chunk) <= chunk * v


def test_rows_spread_over_devices_are_not_gathered():
    """Each device scores its own rows: an eighth of the work, and nothing exchanged."""

    def compiled(**axes):
        mesh = make_mesh(**axes)
        params = jax.device_put(PARAMS, param_shardings(PARAMS, mesh))
        tokens = jax.device_put(np.tile(TOKENS[:1], (8, 1)), batch_sharding(mesh))
        score = jax.jit(lambda p, t: token_logprobs(MODEL, p, t, chunk_tokens=24)[0])
        return score.lower(params, tokens).compile()

    single, eight = compiled(devices=jax.devices()[:1]), compiled(data=8)
    assert eight.cost_analysis()["flops"] < single.cost_analysis()["flops"] / 7
    assert "all-gather" not in eight.as_text()
