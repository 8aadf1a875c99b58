"""Turn whatever other people's code raises into an error that says where it was raised.

A library documents a few of its exceptions. The others (a MemoryError, an ImportError
in the middle of a run, a panic of Rust code, which is no Exception) would end a run
with a traceback that names neither the file nor the service it was about.
"""

import contextlib
import errno
import pathlib
import traceback
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
MAX_CHARACTERS = 200  # of a library's message in ours
# Requests to stop, which are no failures.
REQUESTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@contextlib.contextmanager
def boundary(door: str) -> Iterator[None]:
    """Raise what fails within the block as a typed error that names the door.

    Errors of this package pass, as do errors of a device, which say themselves what
    they are about, and an OSError that names its file.

    Args:
        door: what is called in the block, for people: a file, a directory or a URL.

    Raises:
        ValueError: anything else that is no OSError.
        OSError: with the door for its file where it names none.
    """
    try:
        yield
    except REQUESTS:
        raise
    except BaseException as error:
        if _is_typed(error):
            raise
        if isinstance(error, OSError):
            code = error.errno or errno.EIO
            raise OSError(code, error.strerror or str(error), door) from error
        raise ValueError(f"{door}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message, in bounded length.

    Args:
        error: of any kind.
    """
    lines = str(error).strip().splitlines()
    message = f": {lines[0][:MAX_CHARACTERS]}" if lines else ""
    return type(error).__name__ + message


def _is_typed(error) -> bool:
    """Return whether an error says already what it is about."""
    kind = type(error)
    if kind.__module__.partition(".")[0] in ("rsearch", "jax", "jaxlib"):
        return True
    if isinstance(error, OSError):
        return error.errno is not None and error.filename is not None
    # Libraries raise ValueError as well, in words that do not name the door.
    frames = traceback.extract_tb(error.__traceback__)
    raised_here = pathlib.Path(frames[-1].filename).is_relative_to(PACKAGE)
    return kind is ValueError and raised_here
