"""Trains every objective in turn, for tests of several processes:

    PYTHONPATH=. torchrun --nproc_per_node=2 tests/every_objective.py OUT [flags of train.py]
"""
import os
import sys

import train
from objectives import OBJECTIVES

for name in [*OBJECTIVES, "clm:0.5,mlm:0.5"]:
    out = os.path.join(sys.argv[1], name.replace(":", "_"))
    if train.main([*sys.argv[2:], "--objective", name, "--out_dir", out], with_sample=False):
        sys.exit(1)
if train.WORLD > 1:
    train.torch.distributed.destroy_process_group()
