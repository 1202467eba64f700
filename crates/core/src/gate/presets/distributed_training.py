# A small network learns on all GPUs of all nodes together. The loss must stay finite and fall, and all must agree.
import datetime
import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist

STEPS = 50
output = os.environ.get("PITCREW_OUTPUT", "/dev/termination-log")


def fail(sentence):
    # torchrun ends a failed run with a long report, which would push this out of the log's tail.
    with open(output, "w") as told:
        told.write(sentence)
    sys.exit(sentence)


local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=3))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(rank)
inputs = torch.randn(256, 1024, device="cuda")
labels = torch.randint(0, 10, (256,), device="cuda")
begun = time.monotonic()
losses = []
for step in range(STEPS):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if not math.isfinite(losses[-1]):
        fail(f"rank {rank}: the loss is {losses[-1]} after {step + 1} steps")
if losses[-1] >= losses[0]:
    fail(f"rank {rank}: the loss went from {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps and should fall")
# Every rank has made the same steps, so every rank has the same weights.
weights = sum(parameter.detach().double().sum() for parameter in model.parameters())
least, most = weights.clone(), weights.clone()
dist.all_reduce(least, op=dist.ReduceOp.MIN)
dist.all_reduce(most, op=dist.ReduceOp.MAX)
if abs(most.item() - least.item()) > 1e-6 * max(1.0, abs(most.item())):
    fail(f"the ranks do not agree on the weights: their sums are from {least.item()} to {most.item()}")
if local == 0:
    result = {"gpus": world, "loss": losses[-1], "seconds": round(time.monotonic() - begun, 3)}
    print(json.dumps(result))
    with open(output, "w") as told:
        json.dump(result, told)
dist.destroy_process_group()
