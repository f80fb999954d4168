"""Carrying a placement out: experts move between EP ranks, exactly, between two optimizer steps.

    rounds     which expert goes where, in which order, and how many bytes (numpy only)
    nearest    the placement that moves least, and least between nodes (numpy only)
    sharded    experts that FSDP2 shards further over EDP ranks (numpy only)
    tensors    the tensors of a rank's experts, row by row
    transfer   stage, check, agree, commit over torch.distributed
    dispatch   the map between router and dispatcher
    checkpoint experts in logical order whatever the placement, and back
    norm       the gradient norm, summed in logical order
    reference  a small expert-parallel MoE layer in plain PyTorch

docs/state.md walks through a migration.
"""
