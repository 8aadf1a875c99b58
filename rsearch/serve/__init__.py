"""Services over HTTP: the server, and the description of its routes.

Imports `runtime`. Begin with `server.py`.
"""
