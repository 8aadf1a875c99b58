"""Chat templates are rendered as transformers renders them, within resource limits."""

import re
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rsearch.models.chat_template import ChatTemplate
from tests.models.test_tokenizer import small, with_template

__all__ = ["small"]  # a fixture

GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}<|user|>{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Like DeepSeek-R1's template: earlier thoughts are left out.
DROPS_THOUGHT = (
    "{% for m in messages %}{% set c = m['content'] %}{% if m.role == 'assistant' and "
    "'</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|' + m.role + '|>' + c }}{% endfor %}<|assistant|><think>\n"
)
# Like Qwen3's template: thoughts are kept only after the last question, reformatted.
MOVES_THOUGHT = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning_content = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')
                .split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning_content %}
            {{- '<|assistant|><think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|assistant|>' + content }}{%- endif %}
    {%- else %}{{- '<|' + m.role + '|>' + content }}{%- endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
"""
# Like QwQ's template: line feeds before any reply are left out.
STRIPS_REPLIES = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|' + m.role + '|>' + c }}{% endfor %}<|assistant|><think>\n"
)
THOUGHT = "<think>\nI <|end|> know.\n</think>\n\nParis <|user|>"
TURNS = (
    ("user", "Who?"),
    ("assistant", THOUGHT),
    ("user", "x\n"),
    ("assistant", THOUGHT),
    ("user", "\ny"),
    ("assistant", "\n\nNo."),
)


def chat_of(turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.fault(69, "generation blocks", "thoughts of earlier turns")
@pytest.mark.parametrize("number", range(1, len(TURNS) + 1))
@pytest.mark.parametrize(
    "source", [GENERATION, DROPS_THOUGHT, MOVES_THOUGHT, STRIPS_REPLIES]
)
def test_a_chat_is_rendered_as_by_transformers(small, source, number):
    chat = chat_of(TURNS[:number])
    tokenizer = with_template(small, source)
    ids = tokenizer.encode_prompt(chat)
    written, _ = render_jinja_template(
        [chat], chat_template=source, add_generation_prompt=True, eos_token="<|end|>"
    )
    assert tokenizer.decode(ids) == written[0]
    # The text of a message never becomes a control token, in a thought or elsewhere.
    plain = [(r, re.sub(r"<\|\w+\|>", "it", content)) for r, content in TURNS[:number]]
    expected = tokenizer.encode_prompt(chat_of(plain)).tolist()

    def control(ids):
        return [i for i in ids if i in tokenizer.control_ids]

    assert control(ids.tolist()) == control(expected)


@pytest.mark.fault(69, "contents rewritten")
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content.replace('k', '') }}{% endfor %}",
        "{% for m in messages %}{{ 'x' if 'know' in m.content }}{{ m.content }}"
        "{% endfor %}",
        "{% for m in messages %}{{ m.content[2:] }}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_contents_is_refused(small, source):
    with pytest.raises(ValueError, match=r"chat template .*\['user'\]"):
        with_template(small, source).encode_prompt(chat_of([("user", "I know.")]))


@pytest.mark.fault(69, "contents rewritten")
def test_the_template_sees_an_empty_message_as_empty(small):
    source = "{% for m in messages %}<|user|>{% if m.content %}x{{ m.content }}"
    tokenizer = with_template(small, source + "{% endif %}{% endfor %}")
    ids = tokenizer.encode_prompt(chat_of([("user", ""), ("user", "y")]))
    assert tokenizer.decode(ids) == "<|user|><|user|>xy"


@pytest.mark.fault(69, "helpers of templates")
@pytest.mark.parametrize(
    "source",
    [
        "{{ [{'a': '<é>'}] | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=2) }}",
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.role ~ 1 ~ none }}{% continue %}{% endfor %}",
        "{% macro f(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ f(1) ~ f('a', y=3) }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(3) %}"
        "{% set ns.x = ns.x + [i * 2] %}{% endfor %}{{ ns.x | join(', ') }}",
        "{{ messages | map(attribute='role') | list }}{{ messages | length }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{{ '%s-%02d' % ('a', 7) }}{{ '{:>4}'.format(1) }}{{ 'a-b'.split('-') }}",
        "{{ messages[0].content | trim | upper }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}",
        "{% set x %}{{ bos_token }}{{ 'é' | urlencode }}{% endset %}{{ x * 2 }}",
        "{% for k, v in {'a': (1, 2)}.items() %}{{ k }}{{ v[0] }}{% endfor %}",
        "{% filter indent(2) %}a\nb{% endfilter %}{{ 'a' in ['a'] }}{{ 1.5 + 2 }}",
        "{% generation %}{% set y = 1 %}{% endgeneration %}{{ y is defined }}",
        "{{ messages | groupby('role') | list | length }}{{ 'x' | center(5) }}",
    ],
)
def test_template_functions_and_filters_act_as_in_transformers(source):
    variables = dict(add_generation_prompt=True, bos_token="<s>")
    written, _ = render_jinja_template(
        [chat_of(TURNS)], chat_template=source, **variables
    )
    variables |= dict(messages=chat_of(TURNS), tools=None, documents=None)
    assert ChatTemplate(source).render(variables) == written[0]


DOUBLES = (
    "{%% set ns = namespace(x='ab', y=[1]) %%}"
    "{%% for i in range(60) %%}%s{%% endfor %%}"
)
ENDLESS = [
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x'.zfill(10 ** 9) }}",
    "{{ '\t'.expandtabs(10 ** 9) }}",
    "{{ ('x' * 99999).join(range(99999) | map('string')) }}",
    "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ [1] | batch(10 ** 9, 0) | list }}",
    "{{ [1] | slice(10 ** 9) | list }}",
    "{{ range(99999) | map('center', 99999) | list }}",
    "{{ lipsum(n=10 ** 9) }}",
    DOUBLES % "{% set ns.x = ns.x ~ ns.x %}",
    DOUBLES % "{% set ns.x = ns.x + ns.x %}",
    DOUBLES % "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
    DOUBLES % "{% set ns.y = [ns.y, ns.y] %}",
    DOUBLES % "{% set ns.y = dict(a=ns.y, b=ns.y) %}",
    "{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}",
    "{% set a = 'x' * 99999 %}{% macro f() %}{% for i in range(9999) %}{{ a }}"
    "{% endfor %}{% endmacro %}{% set b = f() %}",
]


@pytest.mark.fault(70, "endless template", "number format of a billion")
@pytest.mark.parametrize("source", ENDLESS)
def test_an_endless_template_is_refused_quickly(small, source):
    start = time.thread_time()
    with pytest.raises(ValueError, match="chat template") as refused:
        with_template(small, source).encode_prompt(chat_of(TURNS[:1]))
    assert "\n" not in str(refused.value)
    assert time.thread_time() - start < 3


@pytest.mark.slow
@pytest.mark.fault(70, "endless template")
def test_nested_loops_end_at_the_time_limit(small):
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ValueError, match="runs for more than"):
        with_template(small, loops).encode_prompt(chat_of(TURNS[:1]))


@pytest.mark.fault(70, "endless template")
@pytest.mark.parametrize(
    "source", ["x" * 2**20, "{{ " + "[" * 9999, "{{ 1" + "+1" * 9999]
)
def test_a_template_that_is_too_large_does_not_compile(small, source):
    with pytest.raises(ValueError, match="chat template"):
        with_template(small, source)


def test_a_long_message_is_not_taken_for_an_endless_template(small):
    tokenizer = with_template(small, DROPS_THOUGHT)
    chat = chat_of([("user", "who " * 30_000), TURNS[1]])
    assert len(tokenizer.encode_prompt(chat)) > 30_000
