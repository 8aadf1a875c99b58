"""Write and read arrays on disk with Orbax.

Orbax is imported where it is used, so that commands that only print their flags start
faster.
"""

import contextlib
import errno
import logging
import os
import pathlib
import warnings
from typing import Any

from rsearch.runtime.boundary import boundary, describe_error

# Disk errors, whose texts Orbax's exceptions quote.
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
# Errors of a network disk, or of one that has been unmounted.
_REFUSALS += (errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENOENT, errno.ETIMEDOUT)


def write_tree(path: pathlib.Path, arrays: dict[str, Any]) -> None:
    """Write {name: array}; each process writes its own shards.

    Raises:
        OSError: the disk refuses the write.
    """
    import orbax.checkpoint as ocp

    if not arrays:
        return
    try:
        with _silence(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(path, args=ocp.args.PyTreeSave(arrays))
    except BaseException as error:
        for code in _REFUSALS:
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code), str(path)) from error
        # The arrays have been checked, so TensorStore raised it: a file is missing.
        if isinstance(error, ValueError):
            raise OSError(errno.EIO, describe_error(error), str(path)) from error
        with boundary(str(path)):
            raise


def read_tree(
    path: pathlib.Path, wanted: dict[str, Any], shardings: dict[str, Any]
) -> dict[str, Any]:
    """Return {name: array} of the wanted leaves.

    Args:
        wanted: {name: anything with shape and dtype}.
        shardings: {name: sharding of the restored array}.
    """
    import orbax.checkpoint as ocp

    restore_args = {
        name: ocp.ArrayRestoreArgs(
            sharding=shardings[name], global_shape=tuple(x.shape), dtype=x.dtype
        )
        for name, x in wanted.items()
    }
    args = ocp.args.PyTreeRestore(
        item=dict(wanted), restore_args=restore_args, partial_restore=True
    )
    handler = ocp.PyTreeCheckpointHandler()
    with boundary(str(path)), _silence(), ocp.Checkpointer(handler) as reader:
        return reader.restore(path, args=args)


@contextlib.contextmanager
def _silence():
    """Silence Orbax's log lines and warnings, which describe its own layout."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # failures are also raised
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
