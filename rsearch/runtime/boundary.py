"""Turn whatever third-party code raises into an error that names its file or service.

A library documents only some of its exceptions. The others (a MemoryError, an
ImportError in the middle of a run, a panic in Rust code, which is not an Exception)
would end a run with a traceback that names neither the file nor the service concerned.
"""

import contextlib
import errno
import pathlib
import traceback
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
MAX_CHARACTERS = 200  # of a library's message that are quoted
# Requests to stop, which are not failures.
REQUESTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@contextlib.contextmanager
def boundary(resource: str) -> Iterator[None]:
    """Turn any error within the block into an error that names the resource.

    Errors of this package and of JAX, whose messages already say what they concern, are
    raised unchanged, and so is an OSError that names its file.

    Args:
        resource: the file, directory or URL that the block accesses, for messages.

    Raises:
        ValueError: any other error that is not an OSError.
        OSError: an OSError that names no file; the new one names the resource.
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
            raise OSError(code, error.strerror or str(error), resource) from error
        raise ValueError(f"{resource}: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, truncated."""
    lines = str(error).strip().splitlines()
    message = f": {lines[0][:MAX_CHARACTERS]}" if lines else ""
    return type(error).__name__ + message


def _is_typed(error) -> bool:
    """Return whether an error already says what it concerns."""
    kind = type(error)
    if kind.__module__.partition(".")[0] in ("rsearch", "jax", "jaxlib"):
        return True
    if isinstance(error, OSError):
        return error.errno is not None and error.filename is not None
    # Libraries also raise ValueErrors, whose messages do not name the resource.
    frames = traceback.extract_tb(error.__traceback__)
    is_from_package = pathlib.Path(frames[-1].filename).is_relative_to(PACKAGE)
    return kind is ValueError and is_from_package
