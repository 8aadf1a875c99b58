import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsearch.learn.logprobs import token_logprobs
from rsearch.models import unstacked as layers
from rsearch.models.sharding import make_mesh
from rsearch.rollout import decode
from rsearch.rollout.scheduler import RolloutEngine
from rsearch.tools.search import search_tool
from rsearch.types import SEARCH, Source
from tests.rollout import tiny
from tests.rollout.tiny import log_softmax, sorted_nucleus

V = tiny.tokenizer().vocab_size


@pytest.fixture(scope="module")
def compiled():
    """A function that returns the setup for a temperature and top_p, compiled once."""
    made = {}

    def get(temperature=1.0, top_p=1.0):
        key = temperature, top_p
        if key not in made:
            made[key] = tiny.make_engine(temperature=temperature, top_p=top_p)
        return made[key]

    return get


def rollouts_of(groups):
    return [rollout for group in groups for rollout in group.rollouts]


def policy_columns(rollout):
    """Yield (position, id, logp) of each token that the policy wrote."""
    start = 0
    for segment in rollout.segments:
        if segment.source == Source.POLICY:
            for i, (token, logp) in enumerate(zip(segment.token_ids, segment.logp)):
                yield start + i, int(token), float(logp)
        start += len(segment.token_ids)


def padded(rollouts):
    """Return [B, T] ids, padded with zeros on the right."""
    rows = [tiny.row_of(r) for r in rollouts]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


def test_the_rollouts_are_ragged_and_end_at_different_turns(compiled):
    rollouts = rollouts_of(compiled().roll_out(tiny.questions(8)))
    assert len({r.num_tokens for r in rollouts}) > 12
    assert {len(r.policy_texts) for r in rollouts} == {1, 2, 3, 4}
    assert {len(r.searches) for r in rollouts} >= {0, 1, 2}
    shown = {len(s.token_ids) for r in rollouts for s in r.segments if s.source == 3}
    assert len(shown) > 4


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_log_probs_equal_scored_ones(compiled, temperature):
    rollouts = rollouts_of(compiled(temperature).roll_out(tiny.questions(8)))
    scored, _ = token_logprobs(
        tiny.model(),
        tiny.params(),
        padded(rollouts),
        temperature=temperature,
        chunk_tokens=100,
    )
    for row, rollout in zip(np.asarray(scored), rollouts):
        for position, _, logp in policy_columns(rollout):
            assert abs(row[position] - logp) <= 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_log_probs_equal_those_of_a_full_forward_pass(compiled, temperature):
    rollouts = rollouts_of(compiled(temperature).roll_out(tiny.questions(8)))
    for rollout, row in zip(rollouts, padded(rollouts)):
        full = log_softmax(tiny.full_logits(row) / temperature)
        for position, token, logp in policy_columns(rollout):
            assert abs(full[position - 1, token] - logp) <= 1e-4


@pytest.mark.parametrize("are_apart", [False, True])
def test_rollouts_in_bfloat16_agree_with_the_trainer_in_bfloat16(
    monkeypatch, are_apart
):
    monkeypatch.setattr(layers, "LARGE_LAYERS", 0 if are_apart else 2**26)
    setup = tiny.make_engine(dtype=jnp.bfloat16)
    rollouts = rollouts_of(setup.roll_out(tiny.questions(4)))
    model = tiny.model().clone(dtype=jnp.bfloat16)
    scored, _ = token_logprobs(model, tiny.params(), padded(rollouts))
    gaps = [
        abs(row[position] - logp)
        for row, rollout in zip(np.asarray(scored), rollouts)
        for position, _, logp in policy_columns(rollout)
    ]
    # With 8 bits of mantissa, logits of up to 8 are off by a few hundredths.
    assert 0 < np.mean(gaps) < 0.03 and max(gaps) < 0.25
    # To add a token to a cache in bfloat16, a CPU would convert all of it to float32.
    assert setup.sampler.rows.context.cache.k.dtype == jnp.uint16


def test_the_final_cached_state_equals_that_of_a_full_forward_pass(compiled):
    setup = compiled()
    rollouts = rollouts_of(setup.roll_out(tiny.questions(2), seed=3))
    context = setup.sampler.rows.context  # there are as many rows as rollouts
    tokens = padded(rollouts)
    for i, rollout in enumerate(rollouts):
        # The row holds the tokens of the segments: neither side lost or added one.
        assert context.length[i] == rollout.num_tokens
        full = tiny.full_logits(tokens[i])[rollout.num_tokens - 1]
        np.testing.assert_allclose(context.logits[i], full, atol=1e-4)


def test_a_wrong_cache_would_be_noticed(compiled):
    """The tests above are sensitive: an early token changes all later logits."""
    row = padded(rollouts_of(compiled().roll_out(tiny.questions(1))))[0]
    other = row.copy()
    other[2] = (other[2] + 1) % V
    changed = np.abs(tiny.full_logits(row) - tiny.full_logits(other))
    assert changed[3:].max(-1).min() > 1e-2


@pytest.mark.parametrize("temperature, top_p", [(0.7, 0.8)])
def test_nucleus_log_probs_equal_those_from_sorting(compiled, temperature, top_p):
    rollouts = rollouts_of(compiled(temperature, top_p).roll_out(tiny.questions(4)))
    sizes = set()
    for rollout, row in zip(rollouts, padded(rollouts)):
        full = tiny.full_logits(row) / temperature
        for position, token, logp in policy_columns(rollout):
            nucleus_logp = sorted_nucleus(full[position - 1], top_p)
            assert abs(nucleus_logp[token] - logp) <= 1e-4
            sizes.add(np.isfinite(nucleus_logp).sum())
    assert len(sizes) > 5


def test_greedy_decoding_takes_the_likeliest_token_with_log_prob_0(compiled):
    rollouts = rollouts_of(compiled(0.0).roll_out(tiny.questions(2)))
    for rollout, row in zip(rollouts, padded(rollouts)):
        full = tiny.full_logits(row)
        for position, token, logp in policy_columns(rollout):
            assert full[position - 1].argmax() == token
            assert logp == 0.0


def ids_by_sample(groups):
    return {
        (g.question.id, i): [s.token_ids.tolist() for s in r.segments]
        for g in groups
        for i, r in enumerate(g.rollouts)
    }


@pytest.fixture(scope="module")
def expected(compiled):
    """The tokens of six questions' rollouts with eight rows and instant searches."""
    ids = ids_by_sample(compiled().roll_out(tiny.questions(6)))
    assert len({str(ids_of_one[1]) for ids_of_one in ids.values()}) == len(ids) == 24
    return ids


SHUFFLED = [tiny.questions(6)[i] for i in (3, 0, 5, 1, 4, 2)]


def test_a_rollouts_tokens_do_not_depend_on_other_rollouts(compiled, expected):
    assert ids_by_sample(compiled().roll_out(SHUFFLED)) == expected
    alone = compiled().roll_out(SHUFFLED[4:5])
    assert ids_by_sample(alone) == {k: expected[k] for k in ids_by_sample(alone)}


def slow_search(salt):
    """Return `tiny.search` with a delay of 0 to 30 ms set by salt and first query."""

    def search(queries):
        words = f"{salt} {queries[0]}".encode("utf-8", "replace")
        time.sleep(zlib.crc32(words) % 31 / 1000)
        return tiny.search(queries)

    return search


def test_a_rollouts_tokens_do_not_depend_on_search_latency(compiled, expected):
    setup = compiled()
    for salt in range(4):
        host = tiny.make_host(search=slow_search(salt))
        engine = RolloutEngine(setup.sampler, host, num_rows=8, group_size=4)
        batch = SHUFFLED[salt:] + SHUFFLED[:salt]
        groups = engine(setup.params, batch, jax.random.key(0))
        assert [g.question for g in groups] == batch
        assert ids_by_sample(groups) == expected


def test_log_probs_are_bit_identical_whatever_the_search_latency(compiled):
    """Therefore a resumed run equals one that was not interrupted."""
    setup = compiled()
    columns = []
    for salt in range(3):
        host = tiny.make_host(search=slow_search(salt))
        engine = RolloutEngine(setup.sampler, host, num_rows=16, group_size=4)
        groups = engine(setup.params, tiny.questions(6), jax.random.key(0))
        columns.append([list(policy_columns(r)) for r in rollouts_of(groups)])
    assert columns[0] == columns[1] == columns[2]


@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_a_rollouts_tokens_do_not_depend_on_the_number_of_rows(
    compiled, expected, num_rows
):
    setup = compiled()
    host = tiny.make_host(search=slow_search(num_rows))
    engine = RolloutEngine(setup.sampler, host, num_rows=num_rows, group_size=4)
    before = setup.sampler.num_read
    groups = engine(setup.params, SHUFFLED, jax.random.key(0))
    assert ids_by_sample(groups) == expected
    # Each prompt is read once, whatever the number of rows.
    assert setup.sampler.num_read - before == len(SHUFFLED)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_rollouts_tokens_do_not_depend_on_sharing_cache_pages(expected, devices):
    """There are so few pages that some rollouts restart, and draw the same tokens."""
    mesh, parts = None, 1
    if devices == 8:
        mesh, parts = make_mesh(data=2, fsdp=2, tensor=2), 4
    slots = tiny.make_sampler().row_pages  # pages of one token
    longest = -(-slots // 16) * 16
    setup = tiny.make_engine(
        num_rows=8 * parts,
        mesh=mesh,
        page_tokens=16,
        cache_tokens=parts * (longest + 16),
    )
    assert ids_by_sample(setup.roll_out(SHUFFLED)) == expected
    assert setup.engine.num_restarts > 0
    traces = setup.sampler.num_traces
    setup.roll_out(SHUFFLED)
    assert setup.sampler.num_traces == traces


def test_decoding_in_small_blocks_draws_the_same_tokens(expected, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK_SIZE", 3)
    setup = tiny.make_engine(num_rows=8, search=slow_search(0))
    assert setup.sampler.queue_size(8) == 3
    assert ids_by_sample(setup.roll_out(SHUFFLED)) == expected


def test_overlapping_searches_do_not_change_rollouts(expected, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK_SIZE", 2)
    search = slow_search(0)
    search.searches_at_once = 3
    setup = tiny.make_engine(num_rows=8, search=search)
    assert ids_by_sample(setup.roll_out(SHUFFLED)) == expected


def test_separate_layers_draw_the_same_tokens_as_a_scan(expected, monkeypatch):
    monkeypatch.setattr(layers, "LARGE_LAYERS", 0)
    setup = tiny.make_engine(num_rows=8)
    assert len(setup.params[layers.SEPARATE]) == 2
    assert ids_by_sample(setup.roll_out(tiny.questions(6))) == expected


def test_a_larger_group_starts_with_the_samples_of_a_smaller_one(compiled):
    batch = tiny.questions(2)
    expected = ids_by_sample(compiled().roll_out(batch))
    setup = compiled()
    engine = RolloutEngine(setup.sampler, setup.host, num_rows=8, group_size=2)
    pairs = ids_by_sample(engine(setup.params, batch, jax.random.key(0)))
    assert pairs == {k: v for k, v in expected.items() if k[1] < 2}


def test_another_key_draws_other_tokens(compiled):
    batch = tiny.questions(2)
    first, second = (ids_by_sample(compiled().roll_out(batch, s)) for s in (0, 1))
    assert all(first[k][1] != second[k][1] for k in first)


@pytest.fixture
def num_compiled():
    """A list that grows with each program that XLA compiles."""
    compiled = []

    def listen(event, _duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_is_traced_or_compiled_after_the_first_call(num_compiled):
    setup = tiny.make_engine(num_rows=6)
    setup.roll_out(tiny.questions(1))
    traces, before = setup.sampler.num_traces, len(num_compiled)
    assert before > 0
    setup.roll_out(tiny.questions(7), seed=1)
    setup.host.tools[SEARCH] = search_tool(slow_search(0))
    setup.roll_out(tiny.questions(5), seed=2)
    assert setup.sampler.num_traces == traces
    assert len(num_compiled) == before


def test_a_turn_ends_exactly_at_its_first_stop_string_or_end_of_text(compiled):
    eos = set(tiny.tokenizer().eos_ids)
    reasons = set()
    for rollout in rollouts_of(compiled().roll_out(tiny.questions(16), seed=4)):
        for segment in rollout.segments:
            if segment.source != Source.POLICY:
                continue
            ids = segment.token_ids.tolist()
            texts = [tiny.tokenizer().decode(ids[: i + 1]) for i in range(len(ids))]
            stopped = ["r" in t or "in" in t for t in texts]
            ended = [i in eos for i in ids]
            assert not any(stopped[:-1]) and not any(ended[:-1])
            assert stopped[-1] or ended[-1] or len(ids) == 10
            reasons.add((stopped[-1], ended[-1]))
    assert reasons == {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("num_rows", [8, 6])
def test_eight_devices_write_the_same_as_one(compiled, num_compiled, num_rows):
    """Six rows are replicated on every device; eight are sharded."""
    batch = tiny.questions(4)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    eight = tiny.make_engine(temperature=0.0, mesh=mesh, num_rows=num_rows)
    assert ids_by_sample(eight.roll_out(batch)) == ids_by_sample(
        compiled(0.0).roll_out(batch)
    )
    traces, before = eight.sampler.num_traces, len(num_compiled)
    eight.host.tools[SEARCH] = search_tool(slow_search(1))
    eight.roll_out(batch)
    assert eight.sampler.num_traces == traces
    assert len(num_compiled) == before
