import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.models.attention.cached import Cache, empty_cache
from rsearch.models.decoder import Decoder, init_params, param_shapes
from rsearch.models.products import multiply
from rsearch.models.rotary import rotary_frequencies, rotate
from rsearch.models.spec import DecoderSpec, LinearScaling, RopeScaling
from tests.models import reference

SPEC = DecoderSpec(
    vocab_size=50,
    width=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=40,
    qkv_bias=True,
)


@pytest.fixture(scope="module")
def params():
    return reference.random_params(SPEC)


@pytest.fixture(scope="module", params=list(reference.CONFIGS))
def family(request, tmp_path_factory):
    """(transformers' model, our model, our parameters) of one family."""
    theirs = reference.random_reference(request.param)
    directory = tmp_path_factory.mktemp("model")
    theirs.save_pretrained(directory)
    return theirs, *reference.load(directory)


@pytest.fixture(scope="module")
def smollm2(real_models):
    """(transformers' model, its tokenizer, our model, our parameters), in float32."""
    directory = real_models / "smollm2-135m-instruct"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return theirs, tokenizer, *reference.load(directory)


def spec_of(**changes):
    return DecoderSpec(**{**SPEC.__dict__, **changes})


# Cosines and sines: a quarter turn for the first pair, no turn for the second.
QUARTER = tuple(jnp.array(x)[None, None, None] for x in ([0.0, 1.0], [1.0, 0.0]))


def test_a_quarter_turn_swaps_the_halves_of_a_head():
    x = jnp.array([1.0, 2.0, 3.0, 4.0])[None, None, None]
    turned = rotate(x, QUARTER)
    # Channel 0 pairs with 2: (1, 3) -> (-3, 1). Channel 1 pairs with 3 and stays.
    np.testing.assert_allclose(turned[0, 0, 0], [-3, 2, 1, 4], atol=1e-6)


def test_a_quarter_turn_of_neighbours_leaves_the_other_channels_unchanged():
    x = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[None, None, None]
    turned = rotate(x, QUARTER, pairs="neighbours")
    # Channel 0 pairs with 1: (1, 2) -> (-2, 1). Channels 2 and 3 stay. So do 4 and 5,
    # for which there is no frequency.
    np.testing.assert_allclose(turned[0, 0, 0], [-2, 1, 3, 4, 5, 6], atol=1e-6)


def test_only_the_rotated_part_of_a_head_determines_the_frequencies():
    spec = spec_of(head_dim=8, rotary_dim=4, rope_theta=100.0)
    np.testing.assert_allclose(rotary_frequencies(spec), [1.0, 0.1], rtol=1e-6)


def test_rotary_frequencies_fall_from_one_by_powers_of_theta():
    spec = spec_of(head_dim=4, rope_theta=100.0)
    np.testing.assert_allclose(rotary_frequencies(spec), [1.0, 0.1], rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    scaling = LinearScaling(factor=4.0)
    spec = spec_of(head_dim=4, rope_theta=100.0, rope_scaling=scaling)
    np.testing.assert_allclose(rotary_frequencies(spec), [0.25, 0.025], rtol=1e-6)


def test_llama3_scaling_divides_long_waves_and_leaves_short_ones():
    scaling = RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=128,
    )
    spec = spec_of(head_dim=6, rope_theta=1000.0, rope_scaling=scaling)
    # Wavelengths 6.3, 62.8 and 628: below 128 / 4, between, above 128 / 1.
    smooth = (128 * 0.1 / (2 * math.pi) - 1) / 3
    between = 0.1 * ((1 - smooth) / 8 + smooth)
    expected = [1.0, between, 0.01 / 8]
    np.testing.assert_allclose(rotary_frequencies(spec), expected, rtol=1e-6)


def test_num_params_is_the_number_of_parameters():
    glm4 = dict(fused_mlp=True, post_norms=True, rotary_dim=4)
    variants = [dict(), dict(qkv_bias=False, tie_embeddings=True)]
    variants += [dict(qkv_bias=False, qk_norm=True), glm4]
    for spec in (spec_of(**changes) for changes in variants):
        shapes = jax.eval_shape(
            lambda key, spec=spec: init_params(Decoder(spec), key), jax.random.key(0)
        )
        assert spec.num_params == sum(x.size for x in jax.tree.leaves(shapes))


def test_logits_equal_those_of_transformers(family):
    theirs, model, params = family
    tokens = np.random.default_rng(0).integers(0, 160, (3, 120))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.std(expected) > 0.5  # Otherwise agreement would mean little.
    actual = reference.full_logits(model, params, tokens)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4)


def test_cached_steps_equal_the_full_pass(family):
    _, model, params = family
    tokens = np.random.default_rng(2).integers(0, 160, (2, 24), np.int32)
    expected = reference.full_logits(model, params, tokens)

    # Chunks have one size, so that the step is compiled once. The greedy continuation
    # below tests steps of one token.
    @jax.jit
    def step(params, cache, tokens, start):
        positions = jnp.broadcast_to(start + jnp.arange(8)[None], tokens.shape)
        hidden, cache = model.apply({"params": params}, tokens, positions, cache)
        return model.apply({"params": params}, hidden, method="logits"), cache

    cache = empty_cache(model.spec, 2, 24, model.dtype)
    for start in (0, 8, 16):
        chunk = slice(start, start + 8)
        logits, cache = step(params, cache, tokens[:, chunk], start)
        np.testing.assert_allclose(logits, expected[:, chunk], atol=5e-5)


def test_the_greedy_continuation_equals_transformers(family):
    theirs, model, params = family
    prompt = np.random.default_rng(1).integers(0, 160, 40, np.int32)
    actual = reference.greedy(model, params, prompt, 24)
    assert actual.tolist() == reference.reference_greedy(theirs, prompt, 24)


@pytest.mark.parametrize("num", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_smollm2_predicts_what_transformers_predicts(smollm2, shared_data, num):
    theirs, tokenizer, model, params = smollm2
    passages = reference.real_passages(shared_data, 40)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in passages]
    ids = [row for row in ids if len(row) <= 128][:num]
    assert len(ids) == num and sum(map(len, ids)) > 50 * num
    predict = jax.jit(
        lambda params, tokens: jnp.argmax(
            reference.full_logits(model, params, tokens), -1
        )
    )
    for start in range(0, num, 4):
        rows = ids[start : start + 4]
        ours = predict(params, np.array([row + [0] * (128 - len(row)) for row in rows]))
        for row, tokens in zip(ours, rows):
            with torch.no_grad():
                expected = theirs(torch.tensor([tokens])).logits[0].argmax(-1)
            np.testing.assert_array_equal(row[: len(tokens)], expected.numpy())


@pytest.mark.parametrize("num", [12, pytest.param(64, marks=pytest.mark.slow)])
def test_smollm2_continues_as_transformers_does(smollm2, shared_data, num):
    theirs, tokenizer, model, params = smollm2
    text = reference.real_passages(shared_data, 3)[1]
    prompt = tokenizer(text, add_special_tokens=False).input_ids[:48]
    actual = reference.greedy(model, params, jnp.array(prompt), num)
    assert actual.tolist() == reference.reference_greedy(theirs, prompt, num)


@jax.jit
def extend(params, cache, tokens, positions):
    """Return the logits of new tokens after a cache, and the extended cache."""
    hidden, cache = Decoder(SPEC).apply({"params": params}, tokens, positions, cache)
    return Decoder(SPEC).apply({"params": params}, hidden, method="logits"), cache


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_ragged_cached_decoding_equals_a_full_forward_pass(params, data):
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=3, max_size=3))
    tokens = np.random.default_rng(0).integers(0, 50, (3, 20))
    expected = reference.full_logits(Decoder(SPEC), params, tokens)
    cache = empty_cache(SPEC, 3, 20, jnp.float32)
    # The contents of slots that were not written must not be read.
    cache = Cache(cache.k + 99.0, cache.v - 99.0)
    done = [0, 0, 0]
    actual = np.zeros((3, 20, 50))
    while done != lengths:
        # Each row places some of its tokens anywhere in a chunk of 4. The rest of the
        # chunk is padding: any id, at a position without a slot.
        chunk = np.full((3, 4), 7)
        positions = np.full((3, 4), 20)
        taken = []
        for row in range(3):
            left = lengths[row] - done[row]
            n = data.draw(st.integers(min(1, left), min(4, left)))
            columns = sorted(data.draw(st.permutations(range(4)))[:n])
            chunk[row, columns] = tokens[row, done[row] : done[row] + n]
            positions[row, columns] = np.arange(done[row], done[row] + n)
            taken += [(row, column, positions[row, column]) for column in columns]
            done[row] += n
        logits, cache = extend(params, cache, jnp.array(chunk), jnp.array(positions))
        for row, column, position in taken:
            actual[row, position] = logits[row, column]
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(actual[row, :n], expected[row, :n], atol=2e-5)
        np.testing.assert_array_equal(cache.k[:, row, :, n:], 99.0)


def test_padding_on_the_right_has_no_influence(params):
    tokens = np.random.default_rng(0).integers(0, 50, (2, 12))
    other = tokens.copy()
    other[:, 8:] = 3
    first = reference.full_logits(Decoder(SPEC), params, tokens)[:, :8]
    second = reference.full_logits(Decoder(SPEC), params, other)[:, :8]
    np.testing.assert_array_equal(first, second)


def test_padding_on_the_left_has_no_influence(params):
    tokens = np.random.default_rng(0).integers(0, 50, (1, 9))
    expected = reference.full_logits(Decoder(SPEC), params, tokens)
    for pad in (1, 5):
        padded = np.concatenate([np.full((1, pad), 7), tokens], 1)
        positions = np.concatenate([np.full((1, pad), 16), np.arange(9)[None]], 1)
        cache = empty_cache(SPEC, 1, 16, jnp.float32)
        logits, _ = extend(params, cache, jnp.array(padded), jnp.array(positions))
        np.testing.assert_allclose(logits[:, pad:], expected, atol=2e-5)


def test_only_differences_between_positions_matter(params):
    tokens = jnp.array([[1, 2, 3, 4, 5]])
    model = Decoder(SPEC)
    positions = jnp.arange(5)[None]

    @jax.jit
    def hidden_at(positions):
        return model.apply({"params": params}, tokens, positions)[0]

    near, far = hidden_at(positions), hidden_at(positions + 1000)
    np.testing.assert_allclose(near, far, atol=1e-3)


def test_bfloat16_computation_is_close_to_float32(params):
    tokens = np.random.default_rng(0).integers(0, 50, (2, 16))
    exact = reference.full_logits(Decoder(SPEC), params, tokens)
    rough = reference.full_logits(Decoder(SPEC, dtype=jnp.bfloat16), params, tokens)
    assert rough.dtype == jnp.float32
    # bfloat16 keeps 8 bits; a few roundings per layer add up to a few per cent.
    error = np.std(np.asarray(rough) - exact) / np.std(exact)
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("num_tokens", [3, 20])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_in_bfloat16_and_their_gradients_are_rounded_once(
    is_transposed, num_tokens
):
    rng = np.random.default_rng(0)
    shapes = (2, num_tokens, 24), (4, 8, 24) if is_transposed else (24, 4, 8)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    d_y = jnp.asarray(rng.normal(size=(2, num_tokens, 32)), jnp.bfloat16)

    def product(x, kernel):
        return multiply(x, kernel, mesh=None, is_transposed=is_transposed)

    y, pull = jax.vjp(product, x, kernel)
    exact_x, exact_kernel, exact_d = (np.asarray(a, float) for a in (x, kernel, d_y))
    form = "btd,hcd->bthc" if is_transposed else "btd,dhc->bthc"
    exact_d = exact_d.reshape(2, num_tokens, 4, 8)
    d_x = "bthc,hcd->btd" if is_transposed else "bthc,dhc->btd"
    d_kernel = "btd,bthc->hcd" if is_transposed else "btd,bthc->dhc"
    expected = (
        np.einsum(form, exact_x, exact_kernel).reshape(y.shape),
        np.einsum(d_x, exact_d, exact_kernel),
        np.einsum(d_kernel, exact_x, exact_d),
    )
    for ours, exact in zip((y, *pull(d_y)), expected, strict=True):
        assert ours.dtype == jnp.bfloat16
        # Half a unit in the last of 8 bits, plus the error of float32 sums.
        np.testing.assert_allclose(np.asarray(ours, float), exact, 2**-8, 1e-5)


def test_a_cpu_multiplies_bfloat16_without_widening_it():
    """The gradient of a kernel is included: it sums over the rows of both matrices."""
    shapes = (1, 64, 96), (96, 128), (1, 64, 128)
    x, kernel, d_y = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)

    def operands(function):
        """Return the operand types, as {"bf16", "f32"}, of a function's products."""
        text = jax.jit(function).lower(x, kernel, d_y).compile().as_text()
        types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
        return {types[name] for name in re.findall(r" dot\((%[\w.-]+)", text)}

    def product(x, kernel, _=None):
        return multiply(x, kernel, mesh=None)

    if operands(product) != {"bf16"}:
        pytest.skip("this processor cannot multiply bfloat16 numbers")
    pull = lambda x, kernel, d_y: jax.vjp(product, x, kernel)[1](d_y)  # noqa: E731
    assert operands(pull) == {"bf16"}


def test_a_cpu_writes_one_layer_in_bfloat16_without_rewriting_all_layers():
    """The stacks are those a gradient keeps; 300 tokens are attended block by block."""
    model = Decoder(SPEC, dtype=jnp.bfloat16)
    tokens = jnp.zeros((1, 300), jnp.int32)

    def loss(params):
        hidden, _ = model.apply({"params": params}, tokens, jnp.arange(300)[None])
        return jnp.sum(hidden.astype(jnp.float32))

    shapes = param_shapes(SPEC)
    text = jax.jit(jax.grad(loss)).lower(shapes).compile().as_text()
    writes = re.findall(r" dynamic-update-slice\((%[\w.-]+)", text)
    assert writes
    # Converting the array that is written to takes as long as rewriting all of it.
    assert not [name for name in writes if "convert" in name]


def test_remat_does_not_change_gradients(params):
    tokens = jnp.array([[1, 2, 3, 4, 5]])

    def gradient(model):
        def loss(params):
            hidden, _ = model.apply({"params": params}, tokens, jnp.arange(5)[None])
            return jnp.sum(jnp.sin(hidden))

        return jax.jit(jax.grad(loss))(params)

    plain, remade = gradient(Decoder(SPEC)), gradient(Decoder(SPEC, remat=True))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remade)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_new_value_head_returns_zeros_and_a_set_one_a_dot_product(params):
    model = Decoder(SPEC, value_head=True)
    made = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    hidden = jnp.arange(48.0).reshape(2, 24)
    values = model.apply({"params": made}, hidden, method="values")
    np.testing.assert_array_equal(values, [0, 0])
    made["value"] = jnp.zeros(24).at[3].set(2.0)
    values = model.apply({"params": made}, hidden, method="values")
    np.testing.assert_array_equal(values, [6, 54])
