"""Radius in a hand-written loop: torchrun --nproc-per-node 2 docs/examples/radius_by_hand.py"""

import torch
import torch.distributed as dist

from radius.functional import select, sparse_all_reduce


def main(
    steps: int = 60, density: float = 0.4, interval: int = 10, lr: float = 0.002
) -> list[float]:
    weight = torch.zeros(256, requires_grad=True)
    velocity, residual, index = torch.zeros(256), torch.zeros(256), None
    target = torch.randn(256, generator=torch.Generator().manual_seed(0))
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for t in range(1, steps + 1):
        x = torch.randn(64, 256, generator=data)
        loss = (x @ (weight - target)).square().mean()
        (grad,) = torch.autograd.grad(loss, weight)
        resample = t % interval == 0
        rest = sparse_all_reduce(grad, None if resample else index, residual)
        if grad.isfinite().all():  # the same answer on every rank
            velocity.mul_(0.9).add_(grad)
            weight.data.sub_(velocity, alpha=lr)
            residual = rest
            if resample:
                index = select(velocity, density, group=dist.group.WORLD)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: loss {main()[-1]:.4f}")
    dist.destroy_process_group()
