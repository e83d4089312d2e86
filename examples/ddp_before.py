"""Handwritten digits under PyTorch's DistributedDataParallel: an ordinary script, for torchrun only.

    torchrun --nproc-per-node 2 examples/ddp_before.py

What five lines make of it stands in ddp_after.py.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from digits import Shifted, load, make_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, BATCH = 10, 128


def main():
    dist.init_process_group("gloo")
    data = Shifted(load(held_out=False))
    sampler = DistributedSampler(data)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    images, labels = load(held_out=True)
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    if os.environ["RANK"] == "0":
        print(f"accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
