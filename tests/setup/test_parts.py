"""The parts that a configuration names, and the values that it may not have."""

import dataclasses
import json

import pytest

from rsearch import index as index_command
from rsearch.config.checks import validate
from rsearch.config.recipes import run_command
from rsearch.data.chains import gold_passages
from rsearch.data.curation import question_record
from rsearch.data.questions import questions_fingerprint
from rsearch.models.spec import DecoderSpec
from rsearch.retrieval.encoder import encoder_fingerprint
from rsearch.retrieval.index import digest_of
from rsearch.retrieval.rerank import CrossEncoderScores
from rsearch.setup.load import load_setup
from rsearch.setup.methods import make_kit
from rsearch.setup.models import model_sources
from rsearch.setup.policy import (
    has_world,
    load_policy_tokenizer,
    policy_model,
    policy_protocol,
    rollout_limits,
)
from rsearch.setup.questions import read_questions
from rsearch.setup.search import check_index, open_search
from rsearch.tools.search import search_call
from rsearch.types import (
    Passage,
)
from rsearch.world.texts import WORLD_PROTOCOLS
from rsearch.world.world import NUM_PARAGRAPHS, make_world
from tests.models.tiny_bert import write_tiny_bert
from tests.small_run import config, quick_compilation

__all__ = ["quick_compilation"]


@pytest.fixture(scope="module")
def setup():
    return load_setup(config())


def world_of(c):
    return make_world(seed=c.seed, **c.world)


def test_the_world_is_made_if_any_field_names_it():
    c = config()
    elsewhere = dict(
        tokenizer__source="t",
        retrieval__corpus="c",
        sft__demonstrations="d",
        data__train="a.jsonl",
        data__dev="b.jsonl",
    )
    assert has_world(c)
    assert not has_world(config(**elsewhere))
    for name in elsewhere:
        fewer = {k: v for k, v in elsewhere.items() if k != name}
        assert has_world(config(**fewer)), name


def test_budgets_equal_the_longest_conversation_to_the_token(setup):
    c = config(
        rollout__max_prompt_tokens=10,
        rollout__max_turn_tokens=7,
        rollout__max_searches=2,
        rollout__max_observation_tokens=30,
    )
    tokenizer, spec = setup.tokenizer, setup.model.spec
    frame = setup.protocol.show_passages([""], [()])
    tags = len(tokenizer.encode(frame.before)) + len(tokenizer.encode(frame.after))
    limits, num_tokens = rollout_limits(c, tokenizer, setup.protocol, spec)
    assert num_tokens == 10 + 3 * 7 + 2 * (30 + tags)
    assert (limits.max_searches, limits.max_observation_tokens) == (2, 30)
    exact = config(rollout__context_tokens=num_tokens, **shape(c))
    assert rollout_limits(exact, tokenizer, setup.protocol, spec)[1] == num_tokens
    fewest = 10 + 2 * 7 + 30 + tags
    short = config(rollout__context_tokens=fewest, **shape(c))
    limits, num_tokens = rollout_limits(short, tokenizer, setup.protocol, spec)
    assert limits.max_tokens == num_tokens == fewest
    short.rollout.context_tokens -= 1
    with pytest.raises(ValueError, match=rf"context_tokens = .* = {fewest} tokens"):
        rollout_limits(short, tokenizer, setup.protocol, spec)


def test_what_a_writer_writes_has_a_budget_of_its_own(setup):
    budgets = dict(rollout__max_observation_tokens=9, rollout__max_written_tokens=31)
    shown = [config(**budgets, models__writer__source=s) for s in ("", "world:expert")]
    shown.append(config(rollout__max_observation_tokens=9, models__writer__source="x"))
    spec = setup.model.spec
    limits = [rollout_limits(c, setup.tokenizer, setup.protocol, spec) for c in shown]
    assert [each.max_observation_tokens for each, _ in limits] == [9, 31, 9]
    assert limits[1][1] > limits[0][1] == limits[2][1]


def test_passages_of_a_method_have_a_budget_of_their_own(setup):
    text = "a b c d e f g h i j k l m n o p q r s t"
    sizes = []
    for tokens in (0, 12):
        c = config(rollout__max_observation_tokens=5, eval__passage_tokens=tokens)
        kit = make_kit(dataclasses.replace(setup, config=c))
        sizes.append(len(setup.tokenizer.encode(kit.shorten(text))))
    assert sizes == [5, 12]


def shape(c):
    names = ("prompt", "turn", "observation")
    return {f"rollout__max_{n}_tokens": c.rollout[f"max_{n}_tokens"] for n in names}


def test_a_rollout_must_fit_the_models_context(setup):
    wide = dict(vocab_size=8, width=2, num_layers=1, num_heads=1, num_kv_heads=1)
    spec = DecoderSpec(**wide, head_dim=2, mlp_width=2, max_context=100)
    with pytest.raises(ValueError, match="but the model's context is 100"):
        rollout_limits(config(), setup.tokenizer, setup.protocol, spec)


@pytest.mark.fault(18, "vocabulary and embedding")
def test_an_embedding_may_have_spare_rows_but_not_too_few(setup):
    c, tokenizer = config(), setup.tokenizer
    size = len(setup.tokenizer.token_bytes)
    assert policy_model(c, tokenizer, None).spec.vocab_size == size
    more = config(model__vocab_size=size + 3)
    assert policy_model(more, tokenizer, None).spec.vocab_size == size + 3
    few = config(model__vocab_size=size - 1)
    words = rf"has {size} ids, .* only {size - 1} rows"
    with pytest.raises(ValueError, match=words) as refused:
        policy_model(few, tokenizer, None)
    assert repr(tokenizer.decode([size - 1])) in str(refused.value)


@pytest.mark.parametrize("name", sorted(WORLD_PROTOCOLS.keys() - {"rearag"}))
def test_the_worlds_tokenizer_has_a_token_for_every_tag_of_its_protocol(name):
    c = config(protocol__name=name)
    tokenizer = load_policy_tokenizer(c, world_of(c), None)
    frame = WORLD_PROTOCOLS[name].show_passages([""], [()])
    tags = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>"]
    for tag in [*tags, frame.before.strip(), frame.after.strip()]:
        assert len(tokenizer.encode(tag)) == 1, tag
    assert "<|end|>" in tokenizer.token_bytes[tokenizer.eos_ids[0]].decode()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [
    {"id": f"q{i}", "question": f"Q{i}?", "golden_answers": ["a"]} for i in range(5)
]


def test_questions_come_from_the_world_or_from_a_file(tmp_path):
    c, said = config(data__max_dev=2), []
    world = world_of(c)
    assert read_questions(c, "dev", world, said.append) == world.dev[:2]
    assert read_questions(c, "train", world, said.append) == world.train
    path = write(tmp_path / "q.jsonl", [*ROWS[:2], {"question": ""}, *ROWS[2:]])
    with pytest.raises(ValueError, match=r"q\.jsonl:3: "):
        read_questions(config(data__train=path), "train", None, said.append)
    skipping = config(data__train=path, data__on_bad="skip", data__max_train=3)
    actual = read_questions(skipping, "train", None, said.append)
    assert [q.id for q in actual] == ["q0", "q1", "q2"]
    (told,) = said
    assert told.startswith("left out of train: ") and "q.jsonl:3: " in told
    other = [{"ask": "Q?", "say": ["x"], "n": 7}]
    named = config(
        data__dev=write(tmp_path / "o.jsonl", other),
        data__fields_question="ask",
        data__fields_answers="say",
        data__fields_id="n",
    )
    (question,) = read_questions(named, "dev", None, said.append)
    assert (question.id, question.text, question.golden_answers) == ("7", "Q?", ("x",))
    # What a stage has chosen from that file has the usual fields.
    (tmp_path / "curate").mkdir()
    write(tmp_path / "curate" / "questions.jsonl", [question_record(question)])
    named.data.train = "stage:curate"
    assert read_questions(named, "train", None, said.append, tmp_path) == (question,)


def test_questions_for_chains_must_have_the_fields_that_chains_are_made_from(tmp_path):
    """They are refused when read, by file and line, not when a chain is made."""
    gold = {
        "context": {"title": ["T"], "sentences": [["s"]]},
        "supporting_facts": {"title": ["T"]},
        "question_decomposition": [{"question": "a?", "answer": "b"}],
    }
    broken = {**gold, "context": "T: s", "question_decomposition": [7]}
    rows = [{**row, "metadata": gold} for row in ROWS]
    rows[2] = {**ROWS[2], "metadata": broken}
    path = write(tmp_path / "q.jsonl", rows)
    own = dict(stages=("curate",), data__train=path, curate__method="chains")
    gold_only = {**own, "curate__observations": "gold"}
    for fields, told in (
        (gold_only, r"q\.jsonl:3: field context: expected an object .* 'T: s'"),
        ({**own, "curate__method": "no_reasoning"}, r"q\.jsonl:3: field question_dec"),
    ):
        with pytest.raises(ValueError, match=told):
            read_questions(config(**fields), "train", None, print)
    said = []
    skipping = config(**gold_only, data__on_bad="skip")
    actual = read_questions(skipping, "train", None, said.append)
    assert [q.id for q in actual] == ["q0", "q1", "q3", "q4"] and len(said) == 1
    # The fields are not read if the engine answers, or if no chain is made.
    for fields in (own, {**gold_only, "stages": ("rl",)}):
        assert len(read_questions(config(**fields), "train", None, print)) == 5


PUBLISHED = [  # a record each of HotpotQA, MuSiQue, FlashRAG's HotpotQA, and NQ
    {
        "_id": "5a7a",
        "question": "a?",
        "answer": "x",
        "context": [["T", ["s."]], ["U", ["s."]]],
        "supporting_facts": [["T", 0]],
    },
    {
        "id": "2hop__1_2",
        "question": "b?",
        "answer": "x",
        "paragraphs": [{"title": "T", "paragraph_text": "s.", "is_supporting": True}],
        "question_decomposition": [{"question": "c?", "answer": "x"}],
    },
    {
        "id": "train_0",
        "question": "c?",
        "answer": ["x"],
        "metadata": {
            "context": {"title": ["T"], "sentences": [["s."]]},
            "supporting_facts": {"title": ["T"], "sent_id": [0]},
        },
    },
    {"id": "nq_0", "question": "d?", "answer": ["x"]},
]


def test_records_with_gold_passages_are_read_as_published(tmp_path):
    own = dict(stages=("curate",), curate__method="chains", curate__observations="gold")
    path = write(tmp_path / "q.jsonl", PUBLISHED[:3])
    c = config(**own, data__train=path)
    actual = read_questions(c, "train", None, print)
    for question in actual:
        (passage,) = gold_passages(question, (), {})
        assert passage.contents == "T\ns."
    parted = config(
        stages=("curate",),
        curate__method="no_reasoning",
        data__train=write(tmp_path / "m.jsonl", PUBLISHED[1:2]),
    )
    assert len(read_questions(parted, "train", None, print)) == 1


def test_a_record_without_gold_passages_counts_as_bad(tmp_path):
    own = dict(stages=("curate",), curate__method="chains", curate__observations="gold")
    own["data__train"] = write(tmp_path / "q.jsonl", [*PUBLISHED[2:], PUBLISHED[1]])
    message = r"q\.jsonl:2: question nq_0: its gold passages are not known"
    with pytest.raises(ValueError, match=message):
        read_questions(config(**own), "train", None, print)
    said = []
    skipping = config(**own, data__on_bad="skip")
    actual = read_questions(skipping, "train", None, said.append)
    assert [q.id for q in actual] == ["train_0", "2hop__1_2"]
    (line,) = said
    assert line.startswith("left out of train: ") and "q.jsonl:2: question nq_0" in line


@pytest.mark.fault(9, "on_bad=skip")
def test_the_first_of_many_bad_records_are_named_and_all_are_counted(tmp_path):
    bad = [{"id": f"b{i}", "question": ""} for i in range(7)]
    path = write(tmp_path / "q.jsonl", [ROWS[0], *bad])
    said = []
    skipping = config(data__train=path, data__on_bad="skip")
    assert len(read_questions(skipping, "train", None, said.append)) == 1
    assert [line.count("q.jsonl:") for line in said] == [1] * 5 + [0]
    assert said[-1] == "left out of train: 7 bad records in all"


def test_a_question_of_the_world_needs_no_fields_that_the_world_provides(tmp_path):
    whole = dict(stages=("curate",), curate__method="no_reasoning")
    world = world_of(config())
    known = {"id": world.train[0].id, "question": "Q?", "golden_answers": ["a"]}
    path = write(tmp_path / "q.jsonl", [known])
    c = config(**whole, data__train=path)
    assert len(read_questions(c, "train", world, print)) == 1


def test_an_unknown_split_of_the_world_is_refused():
    c = config(data__dev="world:all")
    with pytest.raises(ValueError, match="world:train, world:dev, world:"):
        read_questions(c, "dev", world_of(c), print)


def test_a_saved_index_is_searched_and_another_encoder_is_refused(tmp_path):
    rows = [{"id": f"c{i}", "contents": f"T{i}\nword{i} here"} for i in range(9)]
    corpus, out = write(tmp_path / "c.jsonl", rows), tmp_path / "index"
    given = [f"--corpus={corpus}", "--encoder=hashed", f"--out={out}"]
    assert run_command(index_command.main, given) == 0
    named = dict(retrieval__corpus=corpus, retrieval__index=str(out))
    for changes in (named, {**named, "retrieval__corpus": ""}):
        search = open_search(config(**changes, retrieval__top_k=2), None)
        (actual,) = search(["T4 word4"])
        assert actual[0].id == "c4" and len(actual) == 2
    with pytest.raises(ValueError, match="encoder"):
        open_search(config(**named, retrieval__hashed_dim=64), None)
    with pytest.raises(ValueError, match=r"build one: python -m rsearch\.index"):
        open_search(config(retrieval__corpus=corpus), None)


def test_a_bm25_index_is_searched_without_the_encoder(tmp_path):
    rows = [{"id": f"c{i}", "contents": f"T{i}\nword{i} here"} for i in range(9)]
    corpus, out = write(tmp_path / "c.jsonl", rows), tmp_path / "index"
    flags = [f"--corpus={corpus}", "--kind=bm25", f"--out={out}"]
    assert run_command(index_command.main, flags) == 0
    digest = json.loads((out / "manifest.json").read_text())["digest"]
    named = dict(retrieval__index=str(out), retrieval__encoder="no/such/encoder")
    for of_corpus in ("", corpus):
        c = config(**named, retrieval__corpus=of_corpus, retrieval__top_k=3)
        search = open_search(c, None)
        assert search.fingerprint == f"index {digest}"
        found = [[p.id for p in row] for row in search(["T4 WORD4", "here", "?"])]
        assert found == [["c4"], ["c0", "c1", "c2"], []]
        assert "retrieval.encoder" not in model_sources(
            c, only_dev=True, asks_judge=False
        )
    assert "retrieval.encoder" in model_sources(
        config(**named), only_dev=True, asks_judge=False
    )  # the world is searched, not the index


def test_results_of_a_vector_index_and_a_bm25_index_are_merged(tmp_path):
    rows = [{"id": f"c{i}", "contents": f"T{i}\nword{i} here"} for i in range(9)]
    corpus = write(tmp_path / "c.jsonl", rows)
    vectors, words = tmp_path / "vectors", tmp_path / "words"
    for flags in (["--encoder=hashed", f"--out={vectors}"], [f"--out={words}"]):
        kind = [] if "--encoder=hashed" in flags else ["--kind=bm25"]
        assert (
            run_command(index_command.main, [f"--corpus={corpus}", *flags, *kind]) == 0
        )
    named = dict(retrieval__corpus="", retrieval__top_k=2)
    both = dict(retrieval__index=str(vectors), retrieval__bm25_index=str(words))
    search = open_search(config(**named, **both), None)
    alone = open_search(config(**named, retrieval__index=str(vectors)), None)
    assert search.fingerprint.startswith(alone.fingerprint + " ")
    (passages,) = search(["T4 word4"])
    assert passages[0].id == "c4" and len(passages) == 2
    assert passages[0].score == pytest.approx(2 / 61)
    swapped = dict(retrieval__index=str(words), retrieval__bm25_index=str(vectors))
    with pytest.raises(ValueError, match="bm25_index"):
        open_search(config(**named, **swapped), None)
    both["retrieval__bm25_index"] = str(vectors)
    with pytest.raises(ValueError, match="kind=bm25"):
        open_search(config(**named, **both), None)


LIMITS = ("max_query_tokens", "max_passage_tokens")


def test_the_corpus_and_encoder_of_an_index_are_checked_without_opening_it(tmp_path):
    rows = [{"id": f"c{i}", "contents": f"T{i}\nword{i} here"} for i in range(9)]
    paths = {"corpus": write(tmp_path / "c.jsonl", rows)}
    paths["other"] = write(tmp_path / "o.jsonl", rows[:5])
    for name, of_corpus, flag in (
        ("ngrams", "corpus", "--encoder=hashed"),
        ("words", "corpus", "--kind=bm25"),
        ("others", "other", "--kind=bm25"),
    ):
        paths[name] = str(tmp_path / name)
        given = [f"--corpus={paths[of_corpus]}", f"--out={paths[name]}", flag]
        assert run_command(index_command.main, given) == 0
    bert, settings = write_tiny_bert(tmp_path / "bert"), dict.fromkeys(LIMITS, 0)
    made_by = encoder_fingerprint(str(bert), family="minilm", dim=0, **settings)
    # A manifest as rsearch.index writes it; the vectors themselves are never read here.
    manifest = json.loads((tmp_path / "ngrams" / "manifest.json").read_text())
    del manifest["digest"]
    manifest["encoder"] = {"fingerprint": made_by, "dim": 24}
    manifest["digest"] = digest_of(manifest)
    paths["vectors"] = str(tmp_path / "vectors")
    (tmp_path / "vectors").mkdir()
    write(tmp_path / "vectors" / "manifest.json", [manifest])

    def check(**fields):
        fields = {"corpus": "", "encoder": "hashed", **fields}
        c = config(**{f"retrieval__{n}": paths.get(v, v) for n, v in fields.items()})
        check_index(c)

    encoded = dict(index="vectors", encoder=str(bert))
    for fields in (
        dict(index="ngrams"),
        dict(index="ngrams", corpus="corpus"),
        dict(index="ngrams", bm25_index="words"),
        dict(index="words", encoder="no/such"),
        encoded,
        encoded
        | {"encoder": "hub/id"},  # not on this machine: compared when it is loaded
    ):
        check(**fields)
    for fields, words in (
        (dict(index="ngrams", corpus="x.jsonl"), r"corpus = 'x\.jsonl': no such file"),
        (
            dict(index="ngrams", hashed_dim=64),
            "index = .*ngrams' was .*encoder = 'hashed'",
        ),
        (dict(index="vectors"), "index = .*vectors' was .*encoder = 'hashed'"),
        (encoded | {"index": "ngrams"}, "index = .*ngrams' was .*encoder = .*bert'"),
        (encoded | {"max_query_tokens": 8}, "encoder = .*max_query_tokens"),
        (encoded | {"family": "e4"}, "family.* = 'e4'"),
        (dict(index="words", bm25_index="words"), "index = .*words' is of kind=bm25"),
        (dict(index="words", on_devices=True), "on_devices = True .* kind=bm25"),
        (dict(index="ngrams", bm25_index="vectors"), "vectors, not of kind=bm25"),
        (dict(index="ngrams", bm25_index="others"), "different corpora"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            check(**fields)
        assert "\n" not in str(refused.value)
    (tmp_path / "c.jsonl").unlink()
    for index in ("ngrams", "words"):
        with pytest.raises(ValueError, match=r"the corpus of .* is not at .*c\.jsonl"):
            check(index=index)


@pytest.mark.fault(66, "corpus path that leads elsewhere")
@pytest.mark.parametrize("way", ["absolute", "relative", "link", "named cache"])
def test_nothing_is_written_next_to_a_corpus_that_only_the_manifest_names(
    tmp_path, capsys, way
):
    rows = [{"id": f"c{i}", "contents": f"T{i}\nword{i} here"} for i in range(9)]
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    corpus, out = write(home / "c.jsonl", rows), home / "index"
    flags = [f"--corpus={corpus}", "--encoder=hashed", f"--out={out}"]
    assert run_command(index_command.main, flags) == 0
    target = elsewhere / "c.jsonl"
    (home / "c.jsonl").rename(target)
    (home / "c.jsonl.offsets").unlink()
    if way == "link":
        (home / "c.jsonl").symlink_to(target)
    else:
        manifest = json.loads((out / "manifest.json").read_text())
        is_relative = way == "relative"
        stored = "../../elsewhere/c.jsonl" if is_relative else str(target)
        manifest |= {"corpus_path": stored}
        del manifest["digest"]
        manifest["digest"] = digest_of(manifest)
        (out / "manifest.json").write_text(json.dumps(manifest))
    before = {p.name for p in home.iterdir()}
    capsys.readouterr()
    named = dict(retrieval__corpus="", retrieval__index=str(out), retrieval__top_k=2)
    if way == "named cache":
        named["retrieval__corpus_cache"] = str(tmp_path / "cache")
    for _ in range(2):
        search = open_search(config(**named), None)
        assert search(["T4 word4"])[0][0].id == "c4"
        assert str(target) in capsys.readouterr().err
    assert [p.name for p in elsewhere.iterdir()] == ["c.jsonl"]
    assert {p.name for p in home.iterdir()} == before
    assert (tmp_path / "cache").exists() == (way == "named cache")


def test_passages_of_the_world_are_found_by_name():
    c = config(retrieval__top_k=2)
    world = world_of(c)
    search = open_search(c, world)
    assert len(search) == len(world.passages)
    (actual,) = search([world.entities["person"][0]])
    assert isinstance(actual[0], Passage) and len(actual) == 2
    assert actual[0].title == world.entities["person"][0]


def test_a_named_reranker_orders_what_the_search_finds(tmp_path):
    directory = write_tiny_bert(tmp_path, cross_encoder=True)
    plain = config(retrieval__top_k=4)
    world = world_of(plain)
    query = world.entities["person"][0]
    (candidates,) = open_search(plain, world)([query])
    named = dict(retrieval__reranker=str(directory), retrieval__rerank_from=4)
    search = open_search(config(**named, retrieval__top_k=2), world)
    (actual,) = search([query])
    scores = CrossEncoderScores(directory)(query, [p.contents for p in candidates])
    assert [p.id for p in actual] == [candidates[i].id for i in (-scores).argsort()[:2]]


@pytest.mark.parametrize("top_k, is_right", [(4, True), (5, False)])
def test_no_more_passages_are_kept_than_are_reranked(top_k, is_right):
    c = config(
        retrieval__reranker="any",
        retrieval__rerank_from=4,
        retrieval__top_k=top_k,
    )
    if is_right:
        return validate(c)
    with pytest.raises(ValueError, match=r"rerank_from = 4 .* the top_k = 5"):
        validate(c)


def test_the_protocol_has_the_texts_and_settings_of_its_configuration():
    c = config(
        protocol__name="rag_r1_mq",
        protocol__max_queries=2,
        protocol__quotes_keep_commas=False,
        protocol__json_ascii=True,
        protocol__instruction="ask {question}",
        rollout__on_invalid="end",
    )
    protocol = policy_protocol(c)
    assert protocol.max_queries == 2 and protocol.invalid_message is None
    assert protocol.parse('<search>"a, b"</search>') == search_call('"a', 'b"')
    assert "\\u00e9" in protocol.show_passages(["é"], [()]).content
    assert protocol.messages("x")[0]["content"].startswith("ask x")


def paragraphs_file(tmp_path, num=4):
    """Write questions with HotpotQA's paragraphs, whose titles name the question."""
    rows = [
        {
            "id": f"q{i}",
            "question": f"Who made {i}?",
            "golden_answers": ["x"],
            "metadata": {
                "context": [[f"T{i}-{j}", [f"made {i}."]] for j in range(3)],
                "supporting_facts": [[f"T{i}-0", 0]],
            },
        }
        for i in range(num)
    ]
    return write(tmp_path / "q.jsonl", rows)


@pytest.mark.parametrize("index", ["", "bm25"])
def test_each_question_searches_its_paragraphs_and_those_drawn_for_it(tmp_path, index):
    path = paragraphs_file(tmp_path)
    fields = dict(data__dev=path, data__train=path, stages=("rl",), retrieval__top_k=99)
    fields |= dict(retrieval__corpus="paragraphs", retrieval__index=index)
    fingerprints = set()
    for words, num in ((0, 3), (15, 5), (999, 12)):
        fields["retrieval__corpus_words"] = words
        setup = load_setup(config(**fields), only_dev=True)
        ids = [question.id for question in setup.dev]
        rows = setup.search(["made"] * len(ids), ids)
        titles = [sorted(passage.title for passage in row) for row in rows]
        for name, row in zip(ids, titles, strict=True):
            assert {f"T{name[1]}-{j}" for j in range(3)} <= {*row}
            assert len({*row}) == len(row) == num
        fingerprints.add(setup.inputs["retrieval"])
        # If fewer questions are asked, each still searches the same corpus.
        few = load_setup(config(**fields, eval__max_questions=2), only_dev=True)
        for name, row in zip(ids[:2], few.search(["made"] * 2, ids[:2]), strict=True):
            assert sorted(passage.title for passage in row) == titles[ids.index(name)]
    assert len(fingerprints) == 3
    uses_encoder = "retrieval.encoder" in model_sources(
        config(**fields, retrieval__encoder="x"), only_dev=True, asks_judge=False
    )
    assert uses_encoder == (index == "")


def test_questions_of_longbench_search_the_passages_of_their_context(tmp_path):
    passages = [f"Passage {i}:\nT{i}\nIt was made {i}.\n" for i in range(1, 4)]
    row = {"input": "Who made it?", "context": "\n".join(passages), "answers": ["x"]}
    row |= {"_id": "b", "length": 9, "dataset": "hotpotqa", "all_classes": None}
    path = write(tmp_path / "q.jsonl", [row])
    fields = dict(data__dev=path, data__train=path, stages=("rl",), retrieval__top_k=9)
    fields |= dict(retrieval__corpus="paragraphs", eval__methods=("in_context",))
    setup = load_setup(config(**fields), only_dev=True)
    ((question,), kit) = setup.dev, make_kit(setup)
    (found,) = setup.search(["made"], [question.id])
    texts = [f"T{i}\nIt was made {i}." for i in range(1, 4)]
    assert sorted(passage.contents for passage in found) == texts
    assert kit.paragraphs_of(question) == [(text, False) for text in texts]


def test_paragraphs_are_searched_only_in_an_evaluation(tmp_path):
    path = paragraphs_file(tmp_path)
    fields = dict(data__dev=path, data__train=path, retrieval__corpus="paragraphs")
    for settings in ({}, {"only_policy": True}):
        with pytest.raises(
            ValueError, match=r"config\.retrieval\.corpus = 'paragraphs'"
        ):
            load_setup(config(**fields, stages=("rl",)), **settings)


def test_the_worlds_questions_have_paragraphs_if_a_method_needs_them():
    fields = dict(data__dev="world:bridge", eval__methods=("in_context",))
    setup = load_setup(config(**fields), only_dev=True)
    asked = load_setup(config(data__dev="world:bridge"), only_dev=True).dev
    assert questions_fingerprint(setup.dev) == questions_fingerprint(asked)
    kit = make_kit(setup)
    of_questions = [kit.paragraphs_of(question) for question in setup.dev]
    assert len(of_questions) == 6
    assert all(any(is_gold for _, is_gold in marked) for marked in of_questions)
    every = {text for marked in of_questions for text, _ in marked}
    assert kit.paragraphs() == sorted(every) and len(every) >= NUM_PARAGRAPHS
    # Used as its corpus, they are all that a question's queries find.
    search = dict(retrieval__corpus="paragraphs", retrieval__top_k=99)
    setup = load_setup(config(**fields, **search), only_dev=True)
    ids = [question.id for question in setup.dev]
    for marked, found in zip(of_questions, setup.search(["Who?"] * len(ids), ids)):
        assert sorted(p.contents for p in found) == sorted(text for text, _ in marked)
