"""What `rsearch.bench` measures: this package beside its peers, on the same machine.

A kind of benchmark is a module with FLAGS, as the commands have them, and

    measure(bench: Bench, *, <flags>) -> list[Row]

(`CONFIG`, a recipe, too where it takes a configuration: `measure(bench, config, ...)`).
What it compares are subjects: "rsearch" and its peers. Each runs in a process of its
own, which `children.compare` starts, so that memory and threads are its own; the
processes take turns, one repetition each, and wait while another measures. A subject is
a function `make(**settings)` in a module of this package, that only such a process
imports; it prepares everything and returns a function that does one repetition and
returns a dict of numbers. A peer that is not installed is a Row with `missing`. What
they share, weights or vectors, is made by processes of its own before (`alone`): the
process that starts them all uses no accelerator.

A Row is the median of the repetitions with the lowest and the highest beside it, how
many times better than a peer rsearch does, and the bound of the machine (`machine`)
that the work would meet first, with the share of it that is reached.
"""
