"""The folder that all processes of a test session share."""

import os
import tempfile

SESSION_FOLDER = "RSEARCH_TEST_SESSION"  # environment variable


def make_session_folder() -> tempfile.TemporaryDirectory:
    """Make the folder, and name it in the environment that child processes inherit."""
    folder = tempfile.TemporaryDirectory(prefix="rsearch-tests-")
    os.environ[SESSION_FOLDER] = folder.name
    return folder
