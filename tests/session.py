"""The folder that all processes of a test session share."""

import os
import tempfile

SESSION_FOLDER = "RSEARCH_TEST_SESSION"  # environment variable


def make_session_folder() -> tempfile.TemporaryDirectory:
    """Make the folder, and name it in the environment for JAX and child processes.

    Programs that one process of the session has compiled are loaded by the others.
    """
    folder = tempfile.TemporaryDirectory(prefix="rsearch-tests-")
    os.environ |= {
        SESSION_FOLDER: folder.name,
        "JAX_COMPILATION_CACHE_DIR": f"{folder.name}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return folder
