# A small network learns a fixed batch on every GPU: forward, backward, step. The loss must stay finite and fall.
import json
import math
import os
import sys
import time

import torch

STEPS = 50
gpus = torch.cuda.device_count()
if gpus == 0:
    sys.exit("torch sees no GPU")
torch.manual_seed(0)
begun = time.monotonic()
worst = 0.0
for gpu in range(gpus):
    device = torch.device("cuda", gpu)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(256, 1024, device=device)
    labels = torch.randint(0, 10, (256,), device=device)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            sys.exit(f"GPU {gpu}: the loss is {losses[-1]} after {step + 1} steps")
    if losses[-1] >= losses[0]:
        sys.exit(f"GPU {gpu}: the loss went from {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps and should fall")
    worst = max(worst, losses[-1])
numbers = {"gpus": gpus, "loss": worst, "seconds": round(time.monotonic() - begun, 3)}
print(json.dumps(numbers))
with open(os.environ.get("PITCREW_OUTPUT", "/dev/termination-log"), "w") as output:
    json.dump(numbers, output)
