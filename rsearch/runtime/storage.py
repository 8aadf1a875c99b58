"""Arrays on disk, as Orbax writes and reads them."""

import contextlib
import errno
import logging
import os
import warnings

import orbax.checkpoint as ocp

# What a disk says, in the words of Orbax's errors, that may pass.
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)


def write_tree(path, arrays):
    """Writes {name: array}; Orbax has each process write its shards.

    Raises:
        OSError: the disk refuses.
    """
    if not arrays:
        return
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(path, args=ocp.args.PyTreeSave(arrays))
    except Exception as error:
        for code in _REFUSALS:
            if os.strerror(code) in str(error):
                raise OSError(code, os.strerror(code), str(path)) from error
        raise


def read_tree(path, wanted, shardings):
    """{name: array} of those that are wanted.

    Args:
        path: as written.
        wanted: {name: anything with shape and dtype}.
        shardings: {name: of the array that is read}.
    """
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            sharding=shardings[name], global_shape=tuple(x.shape), dtype=x.dtype
        )
        for name, x in wanted.items()
    }
    args = ocp.args.PyTreeRestore(
        item=dict(wanted), restore_args=restore_args, partial_restore=True
    )
    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path, args=args)


@contextlib.contextmanager
def _quiet():
    """Without Orbax's log lines, which speak about its own layout."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what fails is raised as well
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
