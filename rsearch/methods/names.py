"""Names of evaluation methods, and which of them are not programs."""

READER_METHODS = ("evidence", "reader_direct", "reader_rag")
# Methods that are not programs: the policy's own protocol, and those of a reader.
OTHER_METHODS = ("protocol", *READER_METHODS)


def split_name(spelling: str) -> tuple[str, list[str]]:
    """Return the name of a method and its settings, as `make_program` spells them.

    Args:
        spelling: element of config.eval.methods.
    """
    name, settings = [], []
    for word in spelling.split(":"):
        if "=" in word:
            settings.append(word)
        elif settings:  # a value may hold colons
            settings[-1] += f":{word}"
        else:
            name.append(word)
    return ":".join(name), settings
