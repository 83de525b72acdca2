"""Radius under DDP: torchrun --nproc-per-node 2 docs/examples/radius_ddp_hook.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from radius.ddp_hook import RadiusHook, radius_hook


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = RadiusHook(optimizer, density=0.4, interval=10, start=10)
    model.register_comm_hook(state, radius_hook)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x[:, :4].sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: loss {main()[-1]:.4f}")
    dist.destroy_process_group()
