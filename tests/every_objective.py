"""Trains every objective in turn, for tests of several processes:

    torchrun --nproc_per_node=2 tests/every_objective.py OUT [flags of train.py]
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import train  # noqa: E402
from objectives import OBJECTIVES  # noqa: E402

for name in [*OBJECTIVES, "clm:0.5,mlm:0.5"]:
    out = os.path.join(sys.argv[1], name.replace(":", "_"))
    code = train.main([*sys.argv[2:], "--objective", name, "--out_dir", out], with_sample=False)
    if code:
        sys.exit(code)
if train.WORLD > 1:
    train.torch.distributed.destroy_process_group()
