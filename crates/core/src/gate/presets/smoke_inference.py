# A small network answers on every GPU, and gives the answers that it gives on the CPU.
import json
import os
import sys
import time

import torch

ROUNDS = 100
gpus = torch.cuda.device_count()
if gpus == 0:
    sys.exit("torch sees no GPU")
# Full precision, so that the two can be compared.
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024))
inputs = torch.randn(32, 1024)
slowest = 0.0
with torch.no_grad():
    wanted = model(inputs)
    for gpu in range(gpus):
        device = torch.device("cuda", gpu)
        there, question = model.to(device), inputs.to(device)
        answer = there(question).cpu()
        if not torch.allclose(answer, wanted, rtol=1e-3, atol=1e-3):
            sys.exit(f"GPU {gpu} gives other answers than the CPU")
        torch.cuda.synchronize(device)
        begun = time.monotonic()
        for _ in range(ROUNDS):
            there(question)
        torch.cuda.synchronize(device)
        slowest = max(slowest, (time.monotonic() - begun) / ROUNDS)
numbers = {"gpus": gpus, "milliseconds": round(slowest * 1000, 3)}
print(json.dumps(numbers))
with open(os.environ.get("PITCREW_OUTPUT", "/dev/termination-log"), "w") as output:
    json.dump(numbers, output)
