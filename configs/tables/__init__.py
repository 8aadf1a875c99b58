"""The tables of the papers, as data: see `rsearch.evaluation.tables`."""

# Settings of an evaluation that searches by Google, and reads the pages.
ONLINE = (
    "retrieval.api=serper",
    "retrieval.url=https://google.serper.dev",
    "retrieval.index=",
    "retrieval.fetch_pages=True",
)
# Why they are no settings of the embedded world.
NOT_ONLINE = "the embedded world has no open web"
