"""Make the objects of a run from its configuration, which nothing below takes.

Commands call `load.load_setup`, and hand what the modules here make from it to the
stages and to evaluation, which import none of them. No module here imports more than
two others of the room: begin with `context.py`, then `load.py`.
"""
