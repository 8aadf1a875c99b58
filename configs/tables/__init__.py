"""The papers' tables as data; see `rsearch.evaluation.tables`."""

# Settings of an evaluation that searches with Google and reads the pages.
ONLINE = (
    "retrieval.api=serper",
    "retrieval.url=https://google.serper.dev",
    "retrieval.index=",
    "retrieval.fetch_pages=True",
)
# Why these settings do not apply to the embedded world.
NOT_ONLINE = "the embedded world has no open web"
