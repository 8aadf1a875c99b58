"""A server that answers while a test asks it."""

import contextlib
import threading


@contextlib.contextmanager
def running(server):
    """Within it the server serves, from a thread; then it is closed."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
        assert not thread.is_alive()
