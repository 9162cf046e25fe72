"""Kills runs with SIGKILL at random moments, resumes each to its end, and compares it with an uninterrupted one:

    python tests/kill_runs.py FOLDER KILLS [flags of train.py]      (where there is os.fork)

Every step saves, so that many kills fall into a save. Prints how many; exits with 1 at the first difference.
"""
import contextlib
import itertools
import os
import random
import signal
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]
# isort: off  train silences a warning of torch's, and so comes before it
import train  # noqa: E402
import torch._dynamo  # noqa: E402, F401  the optimizer imports it at its first step
from test_train import assert_same_run  # noqa: E402


def start(args):  # -> process id of a run; this process computes nothing, so that it may fork
    pid = os.fork()
    if pid == 0:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            os._exit(train.main(args))
    return pid


def main():
    folder, wanted, flags = sys.argv[1], int(sys.argv[2]), [*sys.argv[3:], "--eval_interval", "1"]
    rng, kills, saving = random.Random(1), 0, 0
    for i in itertools.count():
        whole, out = os.path.join(folder, f"whole{i}"), os.path.join(folder, f"killed{i}")
        args = [*flags, "--objective", ["clm", "electra", "mlm", "mtp"][i % 4], "--seed", str(i)]
        assert os.waitpid(start([*args, "--out_dir", whole]), 0)[1] == 0
        while True:
            # best.pt alone is a run too: a kill may fall between it and the first ckpt.pt
            again = any(os.path.exists(os.path.join(out, name)) for name in ("best.pt", "ckpt.pt"))
            pid = start(["--resume", "--out_dir", out] if again else [*args, "--out_dir", out])
            time.sleep(rng.uniform(0.05, 1.5))
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if status == 0:                     # it was done before
                break
            assert os.WIFSIGNALED(status), f"the run ended by itself with {status}"
            kills += 1
            saving += os.path.isdir(out) and any(name.endswith(".tmp") for name in os.listdir(out))
        assert_same_run(whole, out)
        if kills >= wanted:
            print(f"{kills} kills, {saving} of them while a checkpoint was written, in {i + 1} runs: all equal "
                  "to the uninterrupted ones")
            return


if __name__ == "__main__":
    main()
