"""Kills runs with SIGKILL, resumes each to its end, and compares it with an uninterrupted one:

    PYTHONPATH=. python tests/kill_runs.py FOLDER KILLS [flags of train.py]         (where there is os.fork)

Every second kill comes at a random moment, the others between the write of a checkpoint and its renaming. Prints how
many fell into a save; fails at the first difference.
"""
import contextlib
import itertools
import os
import random
import signal
import sys
import time

import train
from test_train import assert_same_run


def start(args, last_save=0):  # -> process id of a run; this process computes nothing, so that it may fork
    """last_save: which of its checkpoints the run is killed at, when it is written and not yet renamed; 0: none."""
    replace = os.replace
    saves = itertools.count(1)

    def counted(source, target):
        if next(saves) == last_save:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    pid = os.fork()
    if pid == 0:
        os.replace = counted
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            os._exit(train.main(args, with_sample=False))
    return pid


folder, wanted, *flags = sys.argv[1:]
rng = random.Random(1)
kills = 0
saving = 0
for i in itertools.count():
    whole = os.path.join(folder, f"whole{i}")
    out = os.path.join(folder, f"killed{i}")
    args = [*flags, "--eval_interval", "1", "--objective", ["clm", "electra", "mlm", "mtp"][i % 4], "--seed", str(i)]
    assert os.waitpid(start([*args, "--out_dir", whole]), 0)[1] == 0
    while True:
        # best.pt alone is a run too: a kill may fall between it and the first ckpt.pt
        again = any(os.path.exists(os.path.join(out, name)) for name in ("best.pt", "ckpt.pt"))
        last_save = rng.randint(1, 9) if kills % 2 else 0
        pid = start(["--resume", "--out_dir", out] if again else [*args, "--out_dir", out], last_save)
        if not last_save:
            time.sleep(rng.uniform(0.05, 1.5))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if status == 0:                         # it was done before
            break
        assert os.WIFSIGNALED(status), f"the run ended by itself with {status}"
        kills += 1
        saving += os.path.isdir(out) and any(name.endswith(".tmp") for name in os.listdir(out))
    assert_same_run(whole, out)
    if kills >= int(wanted):
        break
assert saving >= kills // 2, "the others fell into a save"
print(f"{kills} kills, {saving} of them while a checkpoint was written, in {i + 1} runs: all equal to whole ones")
