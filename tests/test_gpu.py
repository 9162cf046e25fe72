"""Tests for a GPU, and of a training step on a CPU that pretends to be one."""
import pytest
import torch
from conftest import NEEDS_CUDA, NoWaiting, randomized, settings, tensors_in
from torch import Tensor
from torch.overrides import TorchFunctionMode

import train
from data import from_bytes, make_rng
from experiments import gpu_check
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
    """In rows of the GPU; test_model.py compares the forms of attention on the CPU."""
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


# ---- a training step on a CPU that pretends to be a GPU
def on_gpu(t):  # is this tensor marked as one of the GPU? The mark is on its memory, so its views have it, too
    return getattr(t.untyped_storage(), "on_gpu", False)


class Operations(NoWaiting):
    """Runs each operation on the CPU, and marks the results that would be on the GPU. In a step, fails if an operation
    runs on the CPU, reads a tensor of the CPU that is not a single number, or waits for the device."""
    in_step = False
    call_has_gpu = False                        # has the call that contains this operation a tensor of the GPU?

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = tensors_in((args, kwargs))
        device = kwargs.get("device")
        if device is None:
            result_on_gpu = self.call_has_gpu or any(map(on_gpu, given))
        else:
            result_on_gpu = self.call_has_gpu or "cuda" in str(device)
            kwargs["device"] = torch.device("cpu")
        if self.in_step:
            on_cpu = [t for t in given if t.dim() and not on_gpu(t)]
            assert result_on_gpu and not on_cpu, f"{func} reads or makes a tensor of the CPU"
            out = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            out = func(*args, **kwargs)
        old = {t.untyped_storage()._cdata for t in given}
        for t in tensors_in(out):
            if t.untyped_storage()._cdata not in old:           # in new memory
                t.untyped_storage().on_gpu = result_on_gpu
        return out


class FakeGpu(TorchFunctionMode):
    """Tensors on "cuda" are in the memory of the CPU, but their device is cuda:0, and they have a mark. torch does not
    call this class in hooks of a backward pass: a .cpu() in a hook is not noticed, but mixed devices are."""
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = str([*args[1:2], kwargs.get("device")]) if func is Tensor.to else ""
        to_gpu = "cuda" in target
        # clip_grad_norm_ moves a 0-D tensor to the device of the gradients, which is the CPU here
        to_cpu = func in (Tensor.cpu, Tensor.tolist) or "cpu" in target and args[0].dim() > 0
        generator = kwargs.get("generator")
        if generator is not None:
            assert generator.device.type == torch.device(kwargs.get("device", "cpu")).type, f"{func}: another device"
        if func is Tensor.pin_memory or to_gpu and on_gpu(args[0]):
            return args[0]
        if to_gpu or to_cpu and on_gpu(args[0]):
            assert not Operations.in_step, f"{func} copies between the devices in a step"
            copy = args[0].clone()
            copy.untyped_storage().on_gpu = to_gpu
            return copy if to_gpu else func(copy)
        if func == Tensor.is_cuda.__get__:
            return on_gpu(args[0])
        if func == Tensor.device.__get__ and on_gpu(args[0]):
            return torch.device("cuda", 0)
        Operations.call_has_gpu = "device" not in kwargs and any(map(on_gpu, tensors_in((args, kwargs))))
        return func(*args, **kwargs)


class FakeGenerator(torch.Generator):  # one of the CPU, whose `device` is the requested one
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
    monkeypatch.setattr(torch, "Generator", FakeGenerator)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with FakeGpu(), Operations():
        text = from_bytes(b"\0abc defg. hijk\n" * 99).to("cuda")
        corpus = [dict(name="", weight=1.0, train=text, val=text, size=len(text), crc=0, split="")]
        hp = settings(T=64, device="cuda", n_layer=1, n_embd=16, max_iters=4, **flags)
        s = train.prepare(corpus, get_members(hp), hp)
        for step in range(2):
            m = train.member_of_step(s.members, step)
            train.load_step_inputs(s, m, step)
            with monkeypatch.context() as inside:
                inside.setattr(Operations, "in_step", True)
                train.training_step(s, m)


# ---- experiments.gpu_check
@pytest.mark.slow
def test_the_gpu_check_reports_failures(tmp_path, monkeypatch):
    steps = [gpu_check.Step("good", ["-c", "print('fine')"]), gpu_check.Step("bad", ["-c", "1 / 0"]),
             gpu_check.Step("slow", ["-c", "import time; print('begun', flush=True); time.sleep(60)"])]
    monkeypatch.setattr(gpu_check, "list_steps", lambda flags: steps)
    assert gpu_check.main(["--device", "cpu", "--out_dir", str(tmp_path), "--minutes", ".05"]) == 1
    report = (tmp_path / "report.txt").read_text()
    assert "1. good: passed" in report and "2. bad: FAILED with exit code 1" in report
    assert "ZeroDivisionError" in report and "3. slow: stopped: out of time" in report and "begun" in report
