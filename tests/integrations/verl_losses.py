"""verl's policy losses under two packings of the same samples; prints JSON, read by a test.

python verl_losses.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

LENGTHS = [3, 7, 2, 5, 6, 4]  # tokens of each response
PACKINGS = ([[0, 1], [2, 3, 4], [5]], [[0, 2, 5], [1, 3], [4]])
DP_SIZE = 2


def loss_of(mode: str, aggregation: str, packing: list[list[int]], **changes: Any) -> float:
    """The summed losses of the micro-batches, each padded to its own longest response."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(4, n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    policy = PolicyLossConfig(
        loss_mode=mode, dro_beta=0.1, kl_cov_ratio=0.2, clip_cov_ratio=0.2, clip_cov_lb=-10.0,
        clip_cov_ub=10.0,
        rollout_correction=RolloutCorrectionConfig(
            loss_type="reinforce", rollout_is="token", **changes.pop("correction", {})
        ),
    )  # fmt: skip
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=aggregation,
        policy_loss=policy,
        **changes,
    )
    config.global_batch_info.update(
        dp_size=DP_SIZE,
        batch_num_tokens=sum(LENGTHS),
        global_batch_size=len(LENGTHS),
        loss_scale_factor=config.loss_scale_factor,
    )
    total = 0.0
    for micro_batch in packing:
        longest = max(LENGTHS[i] for i in micro_batch)
        padded = torch.zeros(4, len(micro_batch), longest, dtype=torch.float64)
        mask = torch.zeros(len(micro_batch), longest, dtype=torch.bool)
        for row, i in enumerate(micro_batch):
            padded[:, row, : LENGTHS[i]] = samples[i]
            mask[row, : LENGTHS[i]] = True
        old, change, advantages, _ = padded
        loss, _ = core_algos.get_policy_loss_fn(mode)(
            old_log_prob=-old.abs(),
            log_prob=-old.abs() + 0.1 * change,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=None,
        )
        total += float(loss)
    return total


def both(mode: str, aggregation: str = "token-mean", **changes: Any) -> list[float]:
    return [loss_of(mode, aggregation, packing, **dict(changes)) for packing in PACKINGS]


def main() -> None:
    found = {
        "modes": {mode: both(mode) for mode in core_algos.POLICY_LOSS_REGISTRY},
        "aggregations": {
            name: both("vanilla", name)
            for name in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
                         "seq-mean-token-sum-norm")
        },
        "scaled": both("vanilla", "seq-mean-token-sum-norm", loss_scale_factor=8),
        "normalised": both("bypass_mode", correction={"rollout_is_batch_normalize": True}),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
