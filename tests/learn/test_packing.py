import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsearch.learn.batch import cut, pack_segments
from rsearch.learn.logprobs import token_logprobs
from rsearch.learn.objectives import imitation_loss
from rsearch.learn.optimizer import make_optimizer
from rsearch.learn.packing import packed
from rsearch.learn.train_state import create_state
from rsearch.learn.update import Learner
from rsearch.models.sharding import make_mesh
from rsearch.types import Segment, Source
from tests.learn.test_critic import critic_of
from tests.learn.test_update import ADAMW, MODEL, all_logits
from tests.rollout import tiny

V, T = 40, 10


def conversations(lengths, seed=0):
    """Rows of segments of these lengths: a prompt, then the policy's own words."""
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


def batch_of(lengths, micro_batch=8):
    return cut(pack_segments(conversations(lengths), T), micro_batch)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, T), min_size=16, max_size=16),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_every_token_lies_in_one_place_behind_those_before_it(lengths, multiple):
    batch = packed(batch_of(lengths), multiple=multiple)
    shape = batch.layout.source.shape
    assert shape == (2, 8 // multiple, multiple, T)  # whatever the lengths
    for m in range(2):
        used = []
        for i, n in enumerate(lengths[8 * m : 8 * m + 8]):
            (pieces,) = np.nonzero(batch.layout.is_token[m, :, i].any(1))
            assert len(pieces) == (n > 1)
            for k in pieces:
                layout = jax.tree.map(lambda x, m=m, k=k: x[m, k], batch.layout)
                assert layout.is_token[i].sum() == n - 1
                places = layout.place[i, :n]
                used += [(k, p) for p in places]
                rows = batch.tokens[m].reshape(-1)[layout.source].reshape(-1)
                np.testing.assert_array_equal(rows[places], batch.tokens[m, i, :n])
                positions = layout.positions.reshape(-1)[places]
                np.testing.assert_array_equal(positions, range(n))
                assert len({int(p) // T for p in places}) == 1  # in one row
                np.testing.assert_array_equal(np.diff(places), 1)
        assert len(set(used)) == len(used)


def test_short_rows_leave_pieces_empty():
    layout = packed(batch_of([5] * 8)).layout
    np.testing.assert_array_equal(
        layout.is_token[0].any((1, 2)), [True] * 4 + [False] * 4
    )
    full = packed(batch_of([T] * 8)).layout
    assert full.is_token[0].any((1, 2)).all()


def test_rows_that_all_devices_need_stay_as_they_are():
    assert packed(batch_of([5] * 8), multiple=8).layout is None


def test_neighbours_in_a_row_do_not_see_each_other():
    a, b = np.arange(4), np.arange(10, 16)
    tokens = np.concatenate([a, b])[None]
    positions = np.concatenate([np.arange(4), np.arange(6)])[None]
    params = tiny.params(vocab_size=V)
    together, _ = MODEL.apply({"params": params}, tokens, positions)
    alone = MODEL.apply({"params": params}, b[None], jnp.arange(6)[None])[0]
    np.testing.assert_allclose(together[0, 4:], alone[0], atol=1e-5)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_scores_and_updates_are_those_of_rows_of_their_own(devices):
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
    dense = packed(plain, multiple=devices)
    assert dense.layout is not None
    found = []
    for batch in (plain, dense):
        batch = learner.put(batch)
        state = create_state(tiny.params(vocab_size=V), optimizer, mesh)
        scores = np.asarray(learner.score(state.params, batch))
        state, metrics = learner.update(state, batch)
        mask = plain.from_policy
        found.append(jax.device_get((scores * mask, state.params, metrics)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found[0], found[1]
    )


def test_log_probabilities_are_those_of_all_logits():
    batch = packed(batch_of([3, 4, 2, 5, 6, 2, 3, 1]))
    tokens = batch.tokens[0]
    logits = all_logits(tiny.params(vocab_size=V), tokens)
    expected = tiny.log_softmax(logits)[:, :-1]
    expected = np.take_along_axis(expected, tokens[:, 1:, None], -1)[..., 0]
    optimizer, mesh = make_optimizer(**ADAMW), make_mesh(devices=jax.devices()[:1])
    learner = Learner(
        MODEL, optimizer, mesh, loss=imitation_loss, loss_mean="token", chunk_tokens=16
    )
    found = learner.score(tiny.params(vocab_size=V), learner.put(batch))[0]
    mask = batch.layout.is_token[0].any(0)
    assert mask.any() and not np.asarray(found)[~mask].any()
    np.testing.assert_allclose(
        found[:, 1:][mask[:, 1:]], expected[mask[:, 1:]], atol=1e-5
    )


def test_values_are_those_of_rows_of_their_own():
    critic, _, start = critic_of()
    plain = batch_of([3, 4, 2, 5, 6, 2, 3, 1])
    dense = packed(plain)
    params = start().params
    apart, together = (np.asarray(critic.score(params, b)) for b in (plain, dense))
    mask = dense.layout.is_token.any(1)
    np.testing.assert_allclose(together[mask], apart[mask], atol=1e-5)


def test_no_piece_leaves_a_copy_of_the_parameters_behind():
    """What a branch keeps is written for all pieces, if it is kept at all."""
    model = tiny.model(width=128, mlp_width=512, num_layers=2)
    params = jax.eval_shape(lambda: tiny.params(width=128, mlp_width=512, num_layers=2))
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    tokens = jax.ShapeDtypeStruct((8, T), jnp.int32)
    layout = jax.tree.map(lambda x: x[0], packed(batch_of([T] * 8)).layout)

    def temporary(layout):
        def total(params, tokens):
            logp, entropy = token_logprobs(model, params, tokens, layout)
            return logp.sum() + entropy.sum()

        compiled = jax.jit(jax.grad(total)).lower(params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert len(layout.source) == 8
    assert temporary(layout) - temporary(None) < 2 * size
