"""The delayed update of HTS-RL for any TorchRL loss and any optimizer, written as a displacement.

Round j is gathered with the behaviour parameters theta_j. With `lag` the number of updates by which
they are behind, the parameters follow

    theta_0 = theta_1 = ... = theta_lag
    theta_{j+lag+1} = theta_{j+lag} + (phi_j - theta_j)

where phi_j is what the user's whole inner loop (advantages, epochs, minibatches, clipping,
optimizer steps) makes of theta_j. With one optimizer step per round and a lag of 1 this is the
one-step-delayed gradient, theta_{j+2} = opt(theta_{j+1}, grad L(theta_j; D_j)), of I.-J. Liu,
R. A. Yeh and A. G. Schwing, *High-Throughput Synchronous Deep RL*, NeurIPS 2020 (arXiv 2012.09849).
Invariants I2 and I3 are those of ``_rounds/schedule.py``.
"""

from __future__ import annotations

from torchrl_hts.delayed_gradient.displacement import DelayedGradient, GradientAt

__all__ = ["DelayedGradient", "GradientAt"]
