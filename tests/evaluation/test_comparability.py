"""Which rows of results are comparable, and which facts each row records."""

import pytest

from rsearch.config import recipes
from rsearch.evaluation.comparability import (
    MUST_BE_EQUAL,
    SAMPLES,
    SEEDS,
    answers_fingerprint,
    disagreements,
    is_same_manifest,
    judge_manifest,
    row_facts,
    row_manifest,
    shown_fields,
)
from rsearch.methods.table import method_settings

INPUTS = {"tokenizer": "t", "retrieval": "index i", "model.source": "m"}
GREEDY = {"temperature": 0.0, "top_p": 1.0}


def facts(seed=0, dataset="d", people=400, judged_by=None, made_by=(), **more):
    row = {"dataset": dataset, "questions": "q", "normalize": "squad", **more}
    row |= {"made_by": {"retrieval.top_k": 1, **dict(made_by)}}
    row |= {"judged_by": judged_by} if judged_by else {}
    return row_facts(row, {"seed": seed, "world.people": people})


def drawn(seed, digest, **more):
    made_by = {"retrieval": f"memory:{digest} hashed:512"} | more.pop("made_by", {})
    return facts(seed, "world:dev", questions=digest, made_by=made_by, **more)


@pytest.mark.parametrize(
    ("one", "two", "fields"),
    [
        (facts(), facts(), []),
        (facts(), facts(seed=1), []),
        (facts(), facts(questions="r"), ["questions"]),
        (facts(), facts(questions="r", dataset="e"), []),
        (facts(), facts(normalize="flashrag"), ["normalize"]),
        (facts(), facts(made_by={"retrieval.top_k": 3}), ["retrieval.top_k"]),
        (facts(), facts(made_by={"retrieval": "index j"}), []),
        (
            facts(made_by={"retrieval": "index i"}),
            facts(made_by={"retrieval": "index j"}),
            ["retrieval"],
        ),
        (
            facts(made_by={"retrieval.url": "http://a"}),
            facts(made_by={"retrieval.url": "http://b"}),
            ["retrieval.url"],
        ),
        (
            facts(made_by={"sampling.temperature": 0.0}),
            facts(made_by={"sampling.temperature": 0.7}),
            ["sampling.temperature"],
        ),
        (
            facts(made_by={"rollout.max_searches": 1}),
            facts(made_by={"rollout.max_searches": 2}),
            [],
        ),
        (facts(), facts(judged_by={"prompt": "x"}), []),
        (
            facts(judged_by={"prompt": "x", "source": "j"}),
            facts(judged_by={"prompt": "y", "source": "j"}),
            ["judged_by.prompt"],
        ),
        # In the embedded world, each seed draws its own questions and passages.
        (drawn(0, "a"), drawn(1, "b"), []),
        (drawn(0, "a"), drawn(0, "b"), ["questions", "retrieval"]),
        (drawn(0, "a"), drawn(0, "a", people=9), []),
        (drawn(0, "a"), drawn(1, "b", people=9), ["world.people"]),
        (
            drawn(0, "a"),
            drawn(1, "b", made_by={"retrieval": "memory:b hashed:64"}),
            ["retrieval.encoder"],
        ),
        (
            drawn(0, "a"),
            drawn(1, "b", made_by={"retrieval": "index i"}),
            ["retrieval"],
        ),
    ],
)
def test_rows_disagree_in_the_fields_that_must_be_equal(one, two, fields):
    first, second = disagreements([one, two])
    assert first == [] and [d.field for d in second] == fields
    assert all(d.position == 0 and d.field in str(d) for d in second)


def test_each_row_is_compared_with_the_first_that_records_the_field():
    urls = [{}, *({"retrieval.url": url} for url in "aba")]
    several = disagreements([facts(made_by=made_by) for made_by in urls])
    actual = [[(d.field, d.position) for d in of_row] for of_row in several]
    assert actual == [[], [], [("retrieval.url", 1)], []]
    rows = [drawn(0, "a"), drawn(1, "b"), drawn(1, "c")]
    assert [d.position for d in disagreements(rows)[2]] == [1, 1]


def test_facts_that_are_not_recorded_are_named():
    old = row_facts({"dataset": "d"}, {"seed": 0})
    assert old.missing == ("made_by", "normalize", "questions")
    assert facts().missing == ()
    assert "judged_by.temperature" in facts(judged_by={"source": "j"}).missing


@pytest.mark.parametrize(
    ("method", "recorded", "others"),
    [
        ("protocol", {"retrieval.top_k", "rollout.max_searches", "tokenizer"}, set()),
        ("direct", {"rollout.max_turn_tokens", "sampling.top_p"}, {"retrieval"}),
        ("rag", {"retrieval", "retrieval.top_k"}, {"rollout.max_searches"}),
        ("reader_direct", {"models.reader.source"}, {"tokenizer", "retrieval.top_k"}),
        ("reader_rag", {"models.reader.name", "retrieval"}, {"model.weights"}),
    ],
)
def test_a_row_records_what_its_method_uses(method, recorded, others):
    config = recipes.load("configs/base.py")
    config = recipes.apply_overrides(config, {"models.reader.source": "r"})
    manifest = row_manifest(config, method, inputs=INPUTS, sampling=GREEDY)
    assert recorded <= manifest.keys() and not others & manifest.keys()
    assert manifest["seed"] == 0


def test_samples_are_recorded_and_rows_of_other_samples_are_not_reused():
    config = recipes.load("configs/base.py")
    at_endpoint = {"models.subject.source": "http://a/v1"}
    sampled = {"temperature": 0.7, "top_p": 1.0, "samples": 4, "seeds": [0, 1]}
    for changes, method in (({}, "protocol"), (at_endpoint, "rag")):
        changed = recipes.apply_overrides(config, changes)
        greedy, four, two = (
            row_manifest(changed, method, inputs=INPUTS, sampling=sampling)
            for sampling in (GREEDY, sampled, sampled | {"samples": 2})
        )
        assert not {SAMPLES, SEEDS} & greedy.keys()
        assert (four[SAMPLES], four[SEEDS]) == (4, [0, 1])
        assert is_same_manifest(four, four) and is_same_manifest(greedy, greedy)
        for others in ((four, two), (greedy, four), (four, greedy)):
            assert not is_same_manifest(*others)
        # Rows of one table may be means over different numbers of samples.
        assert disagreements([facts(made_by=four), facts(made_by=two)])[1] == []


def test_a_subjects_rows_of_other_temperatures_are_not_compared():
    rows = []
    for temperature in (0.0, 0.7):
        changes = {
            "models.subject.source": "http://a/v1",
            "models.subject.temperature": temperature,
        }
        config = recipes.apply_overrides(recipes.load("configs/base.py"), changes)
        manifest = row_manifest(config, "rag", inputs=INPUTS, sampling=GREEDY)
        rows.append(facts(made_by=manifest))
    (difference,) = disagreements(rows)[1]
    assert difference[:3] == ("sampling.temperature", 0.7, 0.0)


def test_a_row_records_all_settings_of_its_method_and_others_make_it_stale():
    config = recipes.load("configs/base.py")
    manifests = [
        row_manifest(config, "ircot", inputs=INPUTS, sampling=GREEDY, settings=settings)
        for settings in (
            method_settings("ircot"),
            {**method_settings("ircot"), "rounds": 5},
        )
    ]
    assert manifests[0]["ircot.rounds"] == 10
    assert manifests[0]["ircot.answers"] == "reader"
    assert not is_same_manifest(*manifests)
    bare = row_manifest(config, "ircot", inputs=INPUTS, sampling=GREEDY)
    assert is_same_manifest(bare, manifests[0])  # of an earlier version
    rag = row_manifest(
        config, "rag", inputs=INPUTS, sampling=GREEDY, settings=method_settings("rag")
    )
    rows = [facts(made_by=manifest) for manifest in (manifests[0], rag)]
    assert disagreements(rows) == [[], []] and shown_fields(rows) == []


@pytest.mark.parametrize(
    ("method", "asked"), [("rag", "subject"), ("cot", "subject"), ("protocol", "model")]
)
def test_a_row_of_a_subjects_method_records_the_subject_and_not_the_policy(
    method, asked
):
    config = recipes.load("configs/base.py")
    config = recipes.apply_overrides(config, {"models.subject.source": "http://a/v1"})
    manifest = row_manifest(config, method, inputs=INPUTS, sampling=GREEDY)
    assert ("models.subject.source" in manifest) == (asked == "subject")
    assert ("model.weights" in manifest) == (asked == "model")
    assert "tokenizer" in manifest


def test_budgets_and_weights_may_differ_and_are_shown():
    config = recipes.load("configs/base.py")
    rows = []
    for searches, weights, digest in ((1, "m", "a"), (2, "n", "b")):
        changed = recipes.apply_overrides(config, {"rollout.max_searches": searches})
        made_by = row_manifest(
            changed,
            "protocol",
            inputs=INPUTS | {"model.source": weights},
            sampling=GREEDY,
            digest=digest,
        )
        assert made_by["params"] == digest
        assert not set(MUST_BE_EQUAL[2:]) - {"eval.answer_from"} - made_by.keys()
        rows.append(facts(made_by=made_by))
    assert disagreements(rows) == [[], []]
    assert {*shown_fields(rows)} == {"rollout.max_searches", "model.weights"}


@pytest.mark.parametrize(
    ("method", "overrides", "hangs_on_policy"),
    [
        ("protocol", {}, True),
        ("rag", {}, True),
        ("evidence", {"models.reader.source": "r"}, True),
        ("reader_direct", {"models.reader.source": "r"}, False),
        ("rag", {"models.subject.source": "http://a/v1"}, False),
    ],
)
def test_a_row_depends_on_the_policys_parameters_only_if_its_method_uses_them(
    method, overrides, hangs_on_policy
):
    config = recipes.apply_overrides(recipes.load("configs/base.py"), overrides)
    earlier, first, other = (
        row_manifest(config, method, inputs=INPUTS, sampling=GREEDY, digest=digest)
        for digest in ("", "a", "b")
    )
    assert is_same_manifest(first, other) != hangs_on_policy
    assert is_same_manifest(first, dict(first)) and is_same_manifest(earlier, first)


def test_a_judge_is_recorded_with_its_prompt_and_sampling():
    config = recipes.load("configs/base.py")
    assert judge_manifest(config, {}) == {}
    judged = {"models.eval_judge.source": "j", "models.eval_judge.temperature": 0.5}
    manifest = judge_manifest(recipes.apply_overrides(config, judged), {})
    assert manifest["temperature"] == 0.5 and manifest["source"] == "j"
    assert manifest.keys() >= {"prompt", "golds", "max_reply_tokens"}
    assert not facts(judged_by=manifest).missing


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("eval.methods", ("rag",), False),
        ("eval.judge_golds", "any", False),
        ("models.eval_judge.source", "http://localhost/v1", False),
        ("models.subject.timeout_seconds", 9.0, False),
        ("models.writer.max_retries", 9, False),
        ("rollout.max_concurrent", 9, False),
        ("sets", {"one": {"data": {"dev": "world:dev"}}}, False),
        ("eval.answer_tokens", 9, True),
        ("eval.top_p", 0.5, True),
        ("models.subject.temperature", 0.5, True),
        ("models.reader.name", "x", True),
        ("models.writer.temperature", 0.5, True),
        ("protocol.system", "x", True),
        ("retrieval.top_k", 9, True),
        ("rollout.max_turn_tokens", 9, True),
        ("reward", {"em": {"weight": 1.0}}, True),
    ],
)
def test_answers_are_reused_if_all_fields_that_they_depend_on_are_the_same(
    name, value, counts
):
    config = recipes.load("configs/base.py")
    changed = recipes.apply_overrides(config, {name: value})
    assert changed.to_dict() != config.to_dict()
    assert (answers_fingerprint(changed) != answers_fingerprint(config)) == counts
