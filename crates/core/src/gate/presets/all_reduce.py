# All GPUs of the node add up numbers with NCCL, and each must know the right sum.
import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

ELEMENTS = 64 * 1024 * 1024
ROUNDS = 10
output = os.environ.get("PITCREW_OUTPUT", "/dev/termination-log")


def fail(sentence):
    # torchrun ends a failed run with a long report, which would push this out of the log's tail.
    with open(output, "w") as told:
        told.write(sentence)
    sys.exit(sentence)


local = int(os.environ["LOCAL_RANK"])
wanted_gpus = int(os.environ.get("PITCREW_GPUS") or 0)
if wanted_gpus and torch.cuda.device_count() != wanted_gpus:
    fail(f"torch sees {torch.cuda.device_count()} GPUs and should see {wanted_gpus}")
torch.cuda.set_device(local)
dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=3))
rank, world = dist.get_rank(), dist.get_world_size()
wanted = world * (world + 1) / 2
numbers = torch.empty(ELEMENTS, device="cuda")
seconds = 0.0
for round_ in range(ROUNDS):
    numbers.fill_(rank + 1)
    torch.cuda.synchronize()
    begun = time.monotonic()
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    seconds += time.monotonic() - begun
    if not bool((numbers == wanted).all().item()):
        fail(f"GPU {local}: the sum in round {round_ + 1} is wrong")
if local == 0:
    moved = ELEMENTS * 4 * ROUNDS * 2 * (world - 1) / world
    result = {"gpus": world, "gigabytesPerSecond": round(moved / max(seconds, 1e-9) / 1e9, 2)}
    print(json.dumps(result))
    with open(output, "w") as told:
        json.dump(result, told)
dist.destroy_process_group()
