"""verl: who trains which sample, and in which micro-batch, from a plan (verl 0.9.0 and 0.9.1).

Off unless verl's processes are started with ROUTEPACK_VERL=observe or =pack; docs/guides/verl.md
has the settings. Importing this package reads no environment and changes nothing.

    plugin        what verl loads through its entry point `verl.plugins`; reads the switch
    hooks         changes a module of verl when verl imports it, and not before
    settings      what `+routepack.*` and the rest of verl's configuration say about a run
    checks        settings that plans cannot serve, and those under which repacking changes a loss
    trainer       the driver: what is changed in verl's trainer
    session       the driver: plans after verl's own balancing, reorders, writes the column
    routes        the driver: a window from the routes that the rollout recorded
    column        what the driver tells the workers: `routepack_mb`, a row of integers per sample
    microbatch    the workers: micro-batches that follow the column, if all ranks alike can
    observe       verl's own layout of a step, its cost, and a step's metrics

Shape suffixes: S samples of a batch, D data-parallel (DP) ranks, M rows (micro-batches run in
lockstep), P passes over a batch with a token cap of their own.
"""

from __future__ import annotations
