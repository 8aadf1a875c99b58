"""What recipes share on the embedded world: a small pretrained model, on CPU."""


def sizes(c):
    """The world's text, a small model that has read it, and short prompts.

    A model this small reads few words: its prompt is the question alone.
    """
    c.model.source = "world:base"
    c.tokenizer.source = ""
    c.protocol.instruction = "{question}"
    c.protocol.direct = "Answer: {question}"
    c.protocol.rag = "{passages} Answer: {question}"
    c.rl.update(kl_coef=0.0, lr=3e-4)
    c.eval.update(at_start=True, methods=("protocol", "direct", "rag"))
