"""Setups: what all stages of a run share, and the checks of its inputs."""

import json
import pathlib

import jax
import numpy as np
import pytest

from rsearch.hosts import processes
from rsearch.setup import load
from rsearch.setup.checks import check_names
from rsearch.setup.load import load_setup
from rsearch.setup.questions import drop_long_prompts
from rsearch.setup.weights import initial_params
from rsearch.types import Question
from tests.methods.test_adaptive import write_labels
from tests.small_run import config, quick_compilation

__all__ = ["quick_compilation"]


ONLY_GOLD = ("in_context:only_gold=true",)
ENGINE = {"retrieval__engine": "tests.rollout.scripted:find"}  # has no encoder
SKR = ("direct", "skr:labels=labels.jsonl")


def host(tree):
    return jax.tree.map(np.asarray, tree)


def test_parameters_follow_from_the_seed_on_any_mesh():
    made = [
        host(initial_params(load_setup(config(**changes))))
        for changes in (
            # The size is set: another seed makes another world, with other words.
            dict(model__vocab_size=2048),
            dict(model__vocab_size=2048, mesh__fsdp=4, mesh__tensor=2),
            dict(model__vocab_size=2048, seed=1),
        )
    ]
    jax.tree.map(np.testing.assert_array_equal, made[0], made[1])
    assert (made[0]["embedding"] != made[2]["embedding"]).mean() > 0.99
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(made[0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data__dev": "world:dew"}, "config.data.dev = 'world:dew'"),
        ({"data__dev": ""}, "config.data.dev is empty: name"),
        ({"data__dev": "questions.jsonl"}, "questions.jsonl:2: "),
        ({"retrieval__corpus": "paragraphs"}, "good.jsonl:1: the question has no para"),
        ({"eval__methods": ("in_context",)}, "good.jsonl:1: the question has no para"),
        (
            {"data__dev": "long.jsonl", "eval__methods": ONLY_GOLD},
            "long.jsonl:1: none of the question's paragraphs is gold",
        ),
        (
            {"data__dev": "long.jsonl", "retrieval__corpus": "paragraphs"},
            "long.jsonl:2: field context: expected 'Passage 1:', got 'Passage 3:'",
        ),
        ({"retrieval__corpus": "", "retrieval__index": "none"}, "none is not a dir"),
        ({"retrieval__corpus": "x.jsonl"}, "config.retrieval.index is empty"),
        ({"retrieval__corpus": "my x.jsonl"}, "index --corpus='my x.jsonl' --enc"),
        ({"retrieval__corpus": ""}, "index --corpus=FILE --encoder"),
        ({"eval__methods": ("ragg",)}, "config.eval.methods = 'ragg'"),
        ({"eval__methods": ("direct", "ircot:top_k=9")}, "'ircot:top_k=9': a method"),
        # It searches only after the model's first reply.
        ({"eval__methods": ("self_ask:top_k=9",)}, "asks for 9 passages per query"),
        ({"eval__methods": ("direct", "iter_retgen:rounds=0")}, "rounds = 0: must be"),
        ({"eval__methods": ("direct", "skr:k=0")}, "k = 0: must be at least 1"),
        ({"eval__methods": SKR, **ENGINE}, "config.retrieval.engine = 'tests.rollout"),
        ({"eval__top_p": 2.0}, "config.eval.top_p = 2.0"),
    ],
)
def test_inputs_are_checked_without_loading_them(
    tmp_path, monkeypatch, fields, message
):
    monkeypatch.chdir(tmp_path)
    good = {"question": "Who?", "golden_answers": ["Ada"]}
    pathlib.Path("good.jsonl").write_text(json.dumps(good))
    pathlib.Path("questions.jsonl").write_text(json.dumps(good) + "\n{}\n")
    long = [{"input": "Who?", "answers": ["Ada"], "_id": name} for name in "ab"]
    for number, row in zip((1, 3), long, strict=True):
        row["context"] = f"Passage {number}:\nAda\nIt is she."
    pathlib.Path("long.jsonl").write_text("\n".join(map(json.dumps, long)))
    write_labels(tmp_path / "labels.jsonl", ("How?", "rag"))
    shared, questions = load.Shared(), {"data__dev": "good.jsonl"}
    questions |= {"data__train": "good.jsonl", "stages": ("rl",)}
    for methods in (("protocol", "direct"), (*SKR, "self_ask:top_k=1")):
        usable = config(**questions, eval__methods=methods)
        load.check_inputs(usable, home=tmp_path, shared=shared)
    with pytest.raises(ValueError) as refused:
        load.check_inputs(config(**questions | fields), home=tmp_path, shared=shared)
    assert message in str(refused.value)


def test_labels_of_an_evaluated_question_are_refused(tmp_path):
    dev, labels = tmp_path / "dev.jsonl", tmp_path / "labels.jsonl"
    row = {"id": "ada", "question": "Who?", "golden_answers": ["Ada"]}
    dev.write_text(json.dumps(row))
    methods = "direct", f"skr:labels={write_labels(labels, ('Who?', 'rag'))}"
    labelled = config(data__dev=str(dev), eval__methods=methods)
    with pytest.raises(ValueError, match="question ada is among those"):
        load_setup(labelled, only_dev=True)
    write_labels(labels, ("How?", "rag"))
    load_setup(labelled, only_dev=True)


@pytest.mark.fault(11, "left out and listed")
def test_training_questions_that_do_not_fit_are_left_out_and_listed(tmp_path):
    rows = [
        {"id": name, "question": text, "golden_answers": ["a"]}
        for name, text in (("short", "Who?"), ("long", "Who " * 60), ("too", "Is it?"))
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    train = dict(data__train=str(path), rollout__max_prompt_tokens=20)
    few = dict(
        rl__questions_per_step=2, rl__micro_batch=4, mesh__data=4, mesh__tensor=2
    )
    setup = load_setup(config(**train, **few), log=said.append)
    assert [q.id for q in setup.train] == ["short", "too"]
    (told,) = [line for line in said if line.startswith("left out of train")]
    assert "long, prompt " in told and told.endswith(" > 20 tokens")
    with pytest.raises(ValueError, match=r"gives 2 questions, fewer than .* = 4"):
        load_setup(config(**train))
    assert load_setup(config(**train), only_dev=True).train == ()
    load_setup(config(**train, stages=("sft",)))


def test_evaluated_questions_are_drawn_by_a_seed():
    """A smaller draw is part of a larger one, whatever the order of the questions."""
    questions = [Question(f"q{i}", "Who " * (i % 7), ("a",)) for i in range(50)]

    def asked(limit, seed, order=1, are_kept=True):
        drawn, _ = drop_long_prompts(
            questions[::order],
            "dev",
            count_tokens=lambda text: len(text.split()),
            max_tokens=5,
            log=lambda line: None,
            limit=limit,
            draw_seed=seed,
            are_kept=are_kept,
        )
        return [q.id for q in drawn]

    ids = [q.id for q in questions]
    assert asked(10, None) == ids[:10]
    draws = [asked(10, seed) for seed in range(9)]
    assert len(set(map(frozenset, draws))) == len(draws)
    for seed, drawn in enumerate(draws):
        assert len(drawn) == 10 and asked(20, seed)[:10] == drawn
        assert asked(10, seed, order=-1) == drawn
        every = asked(0, seed)
        assert sorted(every) == sorted(ids)
        short = [name for name in every if int(name[1:]) % 7 <= 5]
        assert asked(10, seed, are_kept=False) == short[:10]


def test_stages_share_the_tokenizer_and_count_prompts_with_their_own_instruction(
    tmp_path,
):
    rows = [
        {"id": name, "question": text, "golden_answers": ["a"]}
        for name, text in (
            ("short", "Who?"),
            ("long", "Who " * 60),
            ("too", "Is it the cat?"),
        )
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = dict(data__train=str(path), data__dev=str(path), stages=("sft",))
    fields["rollout__max_prompt_tokens"] = 20
    shared, setups, said = load.Shared(), [], []
    for words in ("{question}", "{question}", "Who " * 4 + "{question}"):
        c = config(**fields, protocol__instruction=words)
        said.append([])
        setups.append(load_setup(c, log=said[-1].append, shared=shared))
    assert len({id(setup.tokenizer) for setup in setups}) == 1
    assert [q.id for q in setups[0].train] == ["short", "too"]
    assert setups[1].train == setups[0].train
    assert [q.id for q in setups[2].train] == ["short"]
    left_out = [
        [s for s in lines if s.startswith(("left out", "in dev"))] for lines in said
    ]
    assert left_out[0] == left_out[1] and len(left_out[0]) == 2


def test_the_protocol_uses_the_configurations_texts():
    c = config(protocol__system="Go.", protocol__instruction="Now: {question}")
    setup = load_setup(c, only_dev=True)
    assert setup.protocol.messages("{x}?") == [
        {"role": "system", "content": "Go."},
        {"role": "user", "content": "Now: {x}?"},
    ]
    assert setup.protocol.invalid_message == c.protocol.invalid_message


@pytest.mark.fault(12, "in train and dev", "decontaminate")
def test_training_questions_that_are_also_held_out_are_reported_and_left_out(tmp_path):
    asked = {"train": ["Who?", "Is it the cat?", "Why?", "When?", "Where?"]}
    asked["dev"] = ["is it  a cat", "WHO", "Whose?"]
    for split, texts in asked.items():
        rows = [{"question": text, "golden_answers": ["a"]} for text in texts]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    files = {f"data__{split}": str(tmp_path / f"{split}.jsonl") for split in asked}
    files |= dict(rl__questions_per_step=1, rl__micro_batch=2)
    files |= dict(mesh__data=2, mesh__tensor=4, model__num_heads=4)
    files |= dict(model__num_kv_heads=4)
    for drops, left, how in (
        (False, asked["train"], "config.data.decontaminate = True leaves them out"),
        (True, ["Why?", "When?", "Where?"], "left out of train"),
    ):
        said = []
        own = config(**files, data__decontaminate=drops)
        setup = load_setup(own, log=said.append)
        assert [q.text for q in setup.train] == left and len(setup.dev) == 3
        (told,) = [line for line in said if "also held out" in line]
        assert told.startswith("2 of 5 training questions are also held out, such as ")
        assert told.endswith(how)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(reward={"answer_me": {}}), "unknown reward term config.reward.answer_me"),
        (dict(reward={"answer_em": {"wait": 1}}), "did you mean weight"),
        # An override of a stage that may begin hours later.
        (
            dict(overrides={"rl": {"reward": {"answer_me": {}}}}),
            "config.overrides.rl: unknown reward term config.reward.answer_me",
        ),
        (dict(protocol__name="search"), "must be one of search_r1, r_search"),
        (dict(protocol__instruction="ask"), r"a text that holds \{question\}"),
        (dict(world__films=1000), "config.world.films = 1000: at most 676"),
        (dict(mesh__data=2), "mesh does not fit"),
        (
            dict(mesh__tensor=2, model__mlp_width=383),
            "config.mesh.tensor = 2 does not divide the mlp_width 383",
        ),
        (dict(model__source="/nowhere"), "/nowhere"),
    ],
)
def test_a_configuration_that_cannot_be_set_up_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        load_setup(config(**changes))


@pytest.mark.parametrize(("num_hosts", "is_lazy"), [(1, True), (2, False)])
def test_several_hosts_load_a_model_together_and_not_on_its_first_call(
    monkeypatch, num_hosts, is_lazy
):
    """A host that loads it on its first call would wait for hosts that never do."""
    calls = []

    def load_agent(*given, is_lazy, **_):
        calls.append(is_lazy)

    monkeypatch.setattr(load, "load_agent", load_agent)
    monkeypatch.setattr(processes, "num_hosts", lambda: num_hosts)
    load_setup(config(models__writer__source="/no/writer"), only_dev=True, is_over=True)
    assert calls == [is_lazy]


@pytest.mark.parametrize(
    "fields",
    [
        {"protocol__max_queries": 2},
        {"protocol__json_ascii": True},
        {"protocol__quotes_keep_commas": False},
    ],
)
def test_settings_that_a_protocol_does_not_have_are_refused(fields):
    (name,) = fields
    field = name.replace("__", ".")
    with pytest.raises(ValueError, match=rf"config\.{field}.*'search_r1'"):
        check_names(config(**fields))
    check_names(config(protocol__name="rag_r1_mq", **fields))


def test_evidence_is_read_only_with_a_protocol_that_has_it():
    fields = {"eval__methods": ("evidence",), "models__reader__source": "world:judge"}
    with pytest.raises(ValueError, match=r"config\.protocol\.name = 'search_r1'"):
        check_names(config(**fields))
    check_names(config(protocol__name="r_search", **fields))


def test_marks_of_a_method_are_text_if_an_endpoint_answers():
    fields = dict(
        models__subject__source="http://localhost/v1",
        models__subject__name="m",
        eval__scored_by="policy",
    )
    with pytest.raises(ValueError, match=r"'self_rag:top_k=1'.*spelled=true"):
        check_names(config(eval__methods=("direct", "self_rag:top_k=1"), **fields))
    check_names(config(eval__methods=("self_rag:spelled=true",), **fields))
    check_names(config(eval__methods=("self_rag",)))
