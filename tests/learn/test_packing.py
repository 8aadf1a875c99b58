import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.learn.batch import pack_segments, to_micro_batches
from rsearch.learn.logprobs import token_logprobs
from rsearch.learn.losses import row_weights
from rsearch.learn.objectives import imitation_loss, policy_loss
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.packing import pack_micro_batches, piece_rows
from rsearch.learn.train_state import create_state
from rsearch.learn.update import accumulate, put
from rsearch.models.lora import MATRICES, init_adapters
from rsearch.models.sharding import make_mesh, param_shardings
from rsearch.plan.flops import count_flops
from rsearch.types import Segment, Source
from tests.learn.learner import Learner
from tests.learn.test_critic import critic_of
from tests.learn.test_update import ADAMW, MODEL, all_logits, one_device
from tests.rollout import tiny

V, T = 40, 10


def conversations(lengths, seed=0):
    """Return rows of these lengths in two segments: a prompt and the policy's text."""
    rng = np.random.default_rng(seed)
    rows = []
    for n in lengths:
        ids = rng.integers(0, V, n).astype(np.int32)
        halves = ids[: n // 2], ids[n // 2 :]
        sources = Source.PROMPT, Source.POLICY
        rows.append(
            [
                Segment(source, half, np.zeros(len(half), np.float32), "")
                for source, half in zip(sources, halves)
            ]
        )
    return rows


@pytest.mark.parametrize(
    "num_rows, num_tokens, multiple, expected",
    (
        (96, 150, 1, 12),  # short rows: an eighth of them
        (16, 10_724, 2, 2),
        (64, 10_724, 2, 2),  # one long row per shard keeps a device busy
        (64, 10_724, 4, 4),
        (64, 2000, 2, 6),  # three rows per shard reach 4,096 tokens
        (4, 10_724, 4, 4),
    ),
)
def test_a_piece_has_enough_rows_to_keep_devices_busy(
    num_rows, num_tokens, multiple, expected
):
    assert piece_rows(num_rows, num_tokens, multiple) == expected


def batch_of(lengths, micro_batch=8):
    return to_micro_batches(pack_segments(conversations(lengths), T), micro_batch)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, T), min_size=16, max_size=16),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_every_token_is_packed_once_and_after_its_predecessor(lengths, multiple):
    batch = pack_micro_batches(batch_of(lengths), multiple=multiple)
    shape = batch.layout.source.shape
    assert shape == (2, 8 // multiple, multiple, T)  # for any lengths
    for m in range(2):
        used = []
        for i, n in enumerate(lengths[8 * m : 8 * m + 8]):
            layout = jax.tree.map(lambda x, m=m: x[m], batch.layout)
            k = layout.piece_index[i]
            assert layout.length[i] == n and (k >= 0) == (n > 0)
            places = layout.start[i] + np.arange(n)
            used += [(k, p) for p in places]
            rows = batch.tokens[m].reshape(-1)[layout.source[k]].reshape(-1)
            np.testing.assert_array_equal(rows[places], batch.tokens[m, i, :n])
            positions = layout.positions[k].reshape(-1)[places]
            np.testing.assert_array_equal(positions, range(n))
            assert len({int(p) // T for p in places}) == (n > 0)  # in one row
        assert len(set(used)) == len(used)


LONG = 600  # tokens of rows that are long enough to be joined


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, LONG), min_size=32, max_size=32),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_joined_rows_hold_every_token_in_order(lengths, multiple):
    rows = to_micro_batches(pack_segments(conversations(lengths), LONG), 32)
    apart = pack_micro_batches(rows, multiple=multiple).layout
    assert apart.source.shape == (1, 8, 4, LONG)
    layout = pack_micro_batches(rows, multiple=multiple, joins_rows=True).layout
    # As many tokens as the joined rows, rounded up to whole tiles and one token more.
    room = {1: 19 * 128 + 1, 2: 10 * 128 + 1, 4: LONG}[multiple]
    assert layout.source.shape == (1, 8, multiple, room)
    assert layout.piece_index.max() <= apart.piece_index.max()
    used = set()
    for i, n in enumerate(lengths):
        piece, start = int(layout.piece_index[0, i]), int(layout.start[0, i])
        assert (piece >= 0) == (n > 0)
        source = layout.source[0, piece].reshape(-1)[start : start + n]
        np.testing.assert_array_equal(source, i * LONG + np.arange(n))
        positions = layout.positions[0, piece].reshape(-1)[start : start + n]
        np.testing.assert_array_equal(positions, range(n))
        places = {(piece, place) for place in range(start, start + n)}
        assert len({place // room for _, place in places}) == (n > 0)
        assert not used & places
        used |= places


def test_conversations_in_joined_rows_have_the_same_scores_as_in_separate_rows():
    lengths = [500, 310, 600, 0, 420, 1, 2, 350, 280, 590, 75, 330, 444, 510, 128, 129]
    rows = to_micro_batches(pack_segments(conversations(lengths), LONG), 16)
    joined = pack_micro_batches(rows, joins_rows=True)
    assert joined.layout.source.shape == (1, 8, 1, 10 * 128 + 1)
    params, scores = tiny.params(vocab_size=V), []
    for batch in (rows, joined):
        layout = jax.tree.map(lambda x: jnp.asarray(x[0]), batch.layout)
        score = functools.partial(token_logprobs, MODEL, layout=layout)
        scores.append(jax.jit(score)(params, batch.tokens[0]))
    is_token = np.arange(LONG) < np.array(lengths)[:, None]
    for plain, packed_in in zip(*scores):
        expected = np.where(is_token, plain, 0.0)
        np.testing.assert_allclose(packed_in * is_token, expected, atol=1e-4)


def test_long_rows_outside_the_loss_skip_the_network():
    rows = to_micro_batches(pack_segments(conversations([LONG] * 16), LONG), 16)
    learnt = np.arange(16)[:, None] % 4 == 1
    rows = rows._replace(
        from_policy=rows.from_policy & learnt, in_response=rows.in_response & learnt
    )
    for joins_rows in (False, True):
        layout = pack_micro_batches(rows, joins_rows=joins_rows).layout
        is_there = layout.piece_index[0] >= 0
        np.testing.assert_array_equal(is_there, learnt[:, 0])
        np.testing.assert_array_equal(layout.length[0], np.where(is_there, LONG, 0))
        assert layout.piece_index.max() == 1


def test_short_rows_leave_pieces_empty():
    layout = pack_micro_batches(batch_of([5] * 8)).layout
    np.testing.assert_array_equal(
        sorted(layout.piece_index[0]), [0, 0, 1, 1, 2, 2, 3, 3]
    )
    full = pack_micro_batches(batch_of([T] * 8)).layout
    np.testing.assert_array_equal(sorted(full.piece_index[0]), range(8))


def test_rows_that_fill_only_one_piece_are_not_packed():
    assert pack_micro_batches(batch_of([5] * 8), multiple=8).layout is None


def test_conversations_in_one_row_do_not_attend_to_each_other():
    a, b = np.arange(4), np.arange(10, 16)
    tokens = np.concatenate([a, b])[None]
    positions = np.concatenate([np.arange(4), np.arange(6)])[None]
    params = tiny.params(vocab_size=V)
    together, _ = MODEL.apply({"params": params}, tokens, positions)
    alone = MODEL.apply({"params": params}, b[None], jnp.arange(6)[None])[0]
    np.testing.assert_allclose(together[0, 4:], alone[0], atol=1e-5)


@pytest.mark.parametrize(
    "devices",
    [
        # One device packs rows in the gradients' fast cases, and in those of scores.
        *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)),
        4,
    ],
)
def test_scores_and_updates_equal_those_of_separate_rows(devices):
    lengths = [3, 9, 4, 0, 2, 5, 3, 7, 10, 1, 2, 3, 4, 5, 6, 2]
    optimizer = make_optimizer(**ADAMW)
    mesh = make_mesh(devices=jax.devices()[:devices])
    learner = Learner(
        MODEL,
        optimizer,
        mesh,
        loss=imitation_loss,
        loss_mean="sequence",
        chunk_tokens=16,
    )
    plain = batch_of(lengths, 16)
    dense = pack_micro_batches(plain, multiple=devices)
    assert dense.layout is not None
    actual = []
    for batch in (plain, dense):
        batch = learner.put(batch)
        state = create_state(tiny.params(vocab_size=V), optimizer, mesh)
        scores = np.asarray(learner.score(state.params, batch))
        state, metrics = learner.update(state, batch)
        mask = plain.from_policy
        actual.append(jax.device_get((scores * mask, state.params, metrics)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual[0], actual[1]
    )


def test_log_probabilities_equal_those_from_all_logits():
    batch = pack_micro_batches(batch_of([3, 4, 2, 5, 6, 2, 3, 1]))
    tokens = batch.tokens[0]
    logits = all_logits(tiny.params(vocab_size=V), tokens)
    expected = tiny.log_softmax(logits)[:, :-1]
    expected = np.take_along_axis(expected, tokens[:, 1:, None], -1)[..., 0]
    optimizer, mesh = make_optimizer(**ADAMW), make_mesh(devices=jax.devices()[:1])
    learner = Learner(
        MODEL, optimizer, mesh, loss=imitation_loss, loss_mean="token", chunk_tokens=16
    )
    actual = learner.score(tiny.params(vocab_size=V), learner.put(batch))[0]
    mask = batch.from_policy[0].copy()
    mask[:, 0] = False  # no token precedes it
    assert mask.any() and not np.asarray(actual)[~mask].any()
    np.testing.assert_allclose(
        actual[:, 1:][mask[:, 1:]], expected[mask[:, 1:]], atol=1e-5
    )


def test_values_equal_those_of_separate_rows():
    critic, _, start = critic_of()
    plain = batch_of([3, 4, 2, 5, 6, 2, 3, 1])
    dense = pack_micro_batches(plain)
    params = start().params
    apart, together = (np.asarray(critic.score(params, b)) for b in (plain, dense))
    mask = np.arange(T) < plain.length[..., None]
    assert mask.any()
    np.testing.assert_allclose(together[mask], apart[mask], atol=1e-5)


def with_numbers(batch, seed):
    """Return the batch with random scores and advantages, and NaN outside the masks.

    Some rows are outside the loss; in the others some tokens count as retrieved.
    """
    rng = np.random.default_rng(seed)
    shape = batch.tokens.shape
    is_in = (np.arange(shape[1]) % 5 != 1)[None, :, None]
    is_text = np.arange(shape[2]) < batch.length[..., None]
    own = batch.from_policy & is_in
    both = own | (is_text & is_in & (rng.random(shape) < 0.5))

    def drawn(mask, mean=0.0):
        values = rng.normal(mean, 1.0, shape)
        return np.where(mask, values, np.nan).astype(np.float32)

    return batch._replace(
        from_policy=own,
        in_response=both,
        behavior_logp=drawn(own, -3.0),
        reference_logp=drawn(own, -3.0),
        sampled_logp=drawn(own, -3.0),
        advantage=drawn(own),
        values=drawn(both),
        returns=drawn(both),
    )


def learner_with_every_loss_term(mesh, by_sequence):
    """Return a learner whose loss has every term that a recipe can set."""
    loss = policy_loss(
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=3.0,
        kl_coef=0.1,
        kl_kind="k3",
        entropy_coef=0.01,
        tis_cap=2.0,
        by_sequence=by_sequence,
    )
    return Learner(
        MODEL,
        make_optimizer(**ADAMW),
        mesh,
        loss=loss,
        loss_mean="sequence" if by_sequence else "token",
        chunk_tokens=16,
        memorise_coef=0.3,
        kl_gain=0.1,
        adapter_scale=1.5,
    )


@pytest.mark.parametrize(
    ("dims", "by_sequence", "has_adapters"),
    [
        ((1, 1, 1), True, False),
        ((1, 1, 1), False, True),
        pytest.param((2, 2, 2), True, False, marks=pytest.mark.slow),
        pytest.param((1, 4, 2), False, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_packed_pieces_add_up(dims, by_sequence, has_adapters):
    axes = dict(zip(("data", "fsdp", "tensor"), dims))
    mesh = make_mesh(**axes, devices=jax.devices()[: np.prod(dims)])
    learner, base = learner_with_every_loss_term(mesh, by_sequence), None
    params = tiny.params(vocab_size=V)
    if has_adapters:
        base = jax.device_put(params, param_shardings(params, mesh))
        params = init_adapters(MODEL.spec, jax.random.key(3), rank=3, matrices=MATRICES)
        params = jax.tree.map(lambda x: x + 0.1, params)
    lengths = [3, 9, 4, 0, 2, 5, 3, 7, 10, 1, 2, 3, 4, 5, 6, 2, *[0] * 14, 10, 1]
    plain = with_numbers(batch_of(lengths, 16), 3)
    memory = batch_of([5, 0, 0, 1, 10, 3, 2, *[0] * 9], 16)
    actual = []
    for lay in (
        lambda b: b,
        lambda b: pack_micro_batches(b, multiple=dims[0] * dims[1]),
    ):
        rows, recalled = learner.put(lay(plain)), learner.put(lay(memory))
        assert (rows.layout is None) == (recalled.layout is None) == (not actual)
        actual.append(learner.gradients(params, jnp.float32(0.1), base, rows, recalled))
    metrics = actual[0][1]
    assert min(metrics[n] for n in ("kl", "memory_loss", "clip_fraction")) > 0.01
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *actual
    )


def test_gradients_of_a_critics_packed_pieces_add_up():
    critic, _, start = critic_of(over_response=True)
    plain = with_numbers(batch_of([3, 9, 4, 0, 2, 5, 3, 7], 8), 4)
    actual = [
        critic.update(start(), put(batch, one_device()))
        for batch in (plain, pack_micro_batches(plain))
    ]
    assert actual[0][1]["critic_loss"] > 0.1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *actual
    )


def gradients_of(model):
    """Return a function (params, batch) -> imitation loss's gradient and metrics."""

    def loss(params, rows, weights):
        actual = token_logprobs(model, params, rows.tokens, rows.layout)
        return imitation_loss(*actual, rows, weights)

    def gradients(params, batch):
        weights = row_weights(batch.from_policy, "token")
        return accumulate(loss, params, batch, weights)

    return gradients


def test_packing_adds_no_computation_and_little_memory():
    """A gradient takes the operations and about the memory of separate rows."""
    sizes = {"width": 128, "mlp_width": 512, "num_layers": 2}
    params = jax.eval_shape(lambda: tiny.params(**sizes))
    gradients = gradients_of(tiny.model(**sizes))
    operations, memory = {}, {}
    for name, batch in (
        ("apart", batch_of([T] * 8)),
        ("packed", pack_micro_batches(batch_of([T] * 8))),
    ):
        operations[name] = count_flops(gradients, (params, batch))
        compiled = jax.jit(gradients).lower(params, batch).compile()
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
    assert operations["packed"] == operations["apart"]
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    assert memory["packed"] - memory["apart"] < 1.5 * size, memory
