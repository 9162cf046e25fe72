"""Tests for a GPU, and of a training step that must not mix devices, for which no GPU is needed."""
from unittest import mock

import pytest
import torch
from conftest import NEEDS_CUDA, NoWaiting, randomized, settings, tensors_in
from test_model import choose_on_gpu

import model
import train
from data import make_rng
from model import ModelConfig, choose_attention, dense_mask
from objectives import NOISES, OBJECTIVES
from run import get_members

H = 2
T = 161                                         # odd: not a multiple of a kernel's tiles


@NEEDS_CUDA
@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rule", [0, 50, T, "each row", "mask"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_fast_attention_equals_a_dense_mask_forward_and_backward(dtype, tolerance, rule, D):
    B = 64
    q_pos = torch.arange(T, device="cuda")
    g = make_rng("attention", "cuda")
    prefix = torch.randint(0, T, (B,), generator=g, device="cuda")
    mask = (torch.rand(B, T, T, generator=g, device="cuda") < 0.5) | torch.eye(T, dtype=torch.bool, device="cuda")
    how = {"each row": dict(prefix=prefix), "mask": dict(prefix=0, mask=mask)}.get(rule, dict(prefix=rule))
    allowed = how.get("mask", dense_mask(how["prefix"], q_pos, T))
    *qkv, out_grad = torch.randn(B, T, 4, H, D, generator=g, device="cuda").to(dtype).permute(2, 0, 3, 1, 4)
    fast = [t.detach().requires_grad_() for t in qkv]           # not contiguous, as in a block
    y = choose_attention(q_pos=q_pos, T_k=T, config=ModelConfig(1, H, H * D), dtype=dtype, **how)(*fast)
    y.backward(out_grad)
    dense = [t.double().requires_grad_() for t in qkv]
    att = dense[0] @ dense[1].mT * D ** -0.5
    want = att.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ dense[2]
    want.backward(out_grad.double())
    for a, b in zip([y.detach(), *(t.grad for t in fast)], [want.detach(), *(t.grad for t in dense)]):
        assert float((a.double() - b).norm() / b.norm()) < tolerance


@NEEDS_CUDA
def test_a_model_computes_the_same_on_the_gpu_and_on_the_cpu():
    net = randomized(n_embd=64)
    x = torch.randint(0, 256, (4, 48), generator=make_rng("ids"))
    want = [net(x, prefix) for prefix in (0, 7, 48)]
    have = [net.cuda()(x.cuda(), prefix).cpu() for prefix in (0, 7, 48)]
    torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)


# ---- a training step on torch's device "meta", which computes no numbers
class OnlyMeta(NoWaiting):
    """Fails if an operation runs on the CPU, reads a tensor of the CPU that is not a single number, or waits."""
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = None
        if "fused_adamw" not in func.name():    # changes its arguments in place; has no version for this device
            out = super().__torch_dispatch__(func, types, args, kwargs)
        used = [t for t in tensors_in((args, kwargs)) if t.dim()] + tensors_in(out)
        assert all(t.is_meta for t in used), f"{func} reads or makes a tensor of the CPU"
        return out


class MetaGenerator(torch.Generator):  # one of the CPU, whose `device` is the requested one
    def __new__(cls, device="cpu"):
        g = super().__new__(cls)
        g.requested = torch.device(device)
        return g
    device = property(lambda self: self.requested)


@pytest.mark.parametrize("flags", [
    *({"name": name} for name in [*OBJECTIVES, "clm,electra"]), {"name": "mtp", "mtp_kind": "sequential"},
    {"name": "bart", "bart_noise": ",".join(NOISES)}, {"name": "nsp", "nsp_negatives": "swap"},
    {"name": "clm", "weight_decay": 0.1, "dtype": "bfloat16"},
    *({"name": name, "accum": 2, "doc_mask": True} for name, o in OBJECTIVES.items() if o.supports_doc_mask)], ids=str)
def test_a_step_on_a_gpu_mixes_no_devices_and_reads_nothing_back(flags, monkeypatch):
    """With the form of attention that is chosen on a GPU."""
    monkeypatch.setattr(torch, "Generator", MetaGenerator)
    monkeypatch.setattr(model, "choose_attention", choose_on_gpu)
    text = torch.zeros(1500, dtype=torch.uint8, device="meta")
    corpus = [dict(name="", weight=1.0, train=text, val=text, size=len(text), crc=0)]
    hp = settings(T=64, device="meta", n_layer=1, n_embd=16, max_iters=4, **flags)
    s = train.make_state(corpus, get_members(hp), hp)
    for step in range(len(s.members)):
        m = train.member_of_step(s.members, step)
        train.load_step_inputs(s, m, step)
        with OnlyMeta(), mock.patch.object(MetaGenerator, "__new__", None):      # makes no generators
            train.training_step(s, m, m.objective.loss, train.optimizer_step)
