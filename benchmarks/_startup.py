# What a user's script may look like: it imports torch at its top and has no main guard, though
# processes are started from it. Prints what the start-up of 16 Pong executors costs, as JSON.
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from support.pixels import NatureCNN
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.modules import ProbabilisticActor

from torchrl_hts import HTSCollector
from torchrl_hts.envs import make_atari

num_executors = int(sys.argv[1])


def make_and_note(folder, index):
    env = make_atari()
    Path(folder, str(index)).write_text(str(time.perf_counter()))  # one clock for all processes
    return env


def cpu_seconds(pid):
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / 100  # utime and stime, in ticks of 10 ms


trunk = TensorDictModule(NatureCNN((4, 84, 84)), ["observation"], ["hidden"])
head = ProbabilisticActor(
    TensorDictModule(torch.nn.Linear(512, 6), ["hidden"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
policy = TensorDictSequential(trunk, head).select_out_keys("action", "action_log_prob")

folder = tempfile.TemporaryDirectory()
began = time.perf_counter()
collector = HTSCollector(
    [partial(make_and_note, folder.name, index) for index in range(num_executors)],
    policy,
    frames_per_batch=5 * num_executors,
    num_executors=num_executors,
    seed=0,
)
constructed_s = time.perf_counter() - began
executors_ready_s = max(float(note.read_text()) for note in Path(folder.name).iterdir()) - began
batches = iter(collector)
next(batches)
first_batch_s = time.perf_counter() - began
next(batches)

time.sleep(1.0)  # all rounds that may be collected have been
pids = collector.worker_pids()
workers = collector.statistics(memory=True).workers
memory = {name: (worker.private_bytes or 0) / 2**20 for name, worker in workers.items()}
before = sum(map(cpu_seconds, pids.values()))
time.sleep(3.0)
idle_cpu_s = sum(map(cpu_seconds, pids.values())) - before
collector.shutdown()

executors = [value for name, value in memory.items() if name.startswith("executor")]
print(
    json.dumps(
        {
            "executors": num_executors,
            "executors_ready_s": executors_ready_s,
            "constructed_s": constructed_s,
            "first_batch_s": first_batch_s,
            "private_mib_per_executor_mean": sum(executors) / len(executors),
            "private_mib_per_executor_max": max(executors),
            "private_mib": memory,
            "idle_cpu_share": idle_cpu_s / 3.0,
        }
    )
)
