"""Plans in trainers, a module each: generic, slime, miles (and others), independent of each other.

What they share: `packer` (a step: observe, or pack with a fallback), `guarded` (failures, and
agreement between ranks), `observe` (what is logged), `layout` (invariants), `semantics` (what a
trainer's settings say about its loss), `samples` (routes to a window), `settings`.

Importing any of them changes nothing in any trainer, and imports neither torch nor a trainer.
"""
