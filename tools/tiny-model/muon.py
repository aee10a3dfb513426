"""Muon: momentum whose update is made orthogonal (Jordan et al. 2024), with the scale of Liu et al. 2025
(arXiv:2502.16982), by which one learning rate and weight decay do for it and for AdamW."""
import torch

MOMENTUM, NEWTON_STEPS = 0.95, 5


def orthogonal(matrices):
    """`[count, rows, columns]`, rows <= columns: about U·Vᵀ of each one's singular value decomposition, by
    Newton-Schulz iterations in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.float()


class Muon(torch.optim.Optimizer):
    """For matrices only. Those of one shape, or of its transpose, go through `orthogonal` together."""

    def __init__(self, matrices, lr, weight_decay):
        super().__init__(list(matrices), dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = {}
            for p in group["params"]:
                alike.setdefault(tuple(sorted(p.shape)), []).append(p)
            for (rows, columns), matrices in alike.items():
                updates = []
                for p in matrices:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - MOMENTUM)
                    update = p.grad.lerp(momentum, MOMENTUM)
                    updates.append(update if p.shape == (rows, columns) else update.mT)
                scale = 0.2 * columns ** 0.5
                for p, update in zip(matrices, orthogonal(torch.stack(updates))):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update if p.shape == (rows, columns) else update.mT, alpha=-group["lr"] * scale)
