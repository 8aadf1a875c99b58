"""A byte-level BPE tokenizer learned from a small text, for training from scratch."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rsearch.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

# A token never spans two matches. A tag is one match, so that it can become one token,
# and so is a name with underscores; a word includes the space before it. The text
# around the argument of a function call, as Python prints it in a code fence, is also
# one match. No match is a control token.
PIECES = (
    r"\{'[a-z]+': '[a-z]+', '[a-z]+': \{'[a-z]+': '|'\}\}\n```|: \n```\n|\nAction"
    r"|</?[a-z_]+>|<\|[a-z]+_[a-z_]+\|>|[a-z0-9]+(?:_[a-z0-9]+)+"
    r"| ?[A-Za-z]+| ?[0-9]+|\n+| ?[^\sA-Za-z0-9<]+|\s|<"
)


def train_tokenizer(texts: Sequence[str], *, vocab_size: int = 4096) -> Tokenizer:
    """Learn a tokenizer in which the frequent words of `texts` are single tokens.

    It can also encode any other text, byte by byte if necessary.

    Args:
        texts: texts to learn from; a word that occurs twice may become a token.
        vocab_size: maximum number of ids; the 256 bytes and the control tokens are
            always included.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(ROLES),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(
        tokenizer.to_str(),
        eos_tokens=[ROLES[0]],
        chat_template=TEMPLATE,
        name="the embedded tokenizer",
    )
