"""The tables of the papers, as data: see `rsearch.evaluation.tables`."""
