"""Whether kbench trains GPT-2 as PyTorch does: losses and gradients of both, from the same weights on the same batches.

    python3 benchmarks/train_agreement.py fp32 bf16 --data shakespeare_train.bin --results R [--json FILE]

fp32, TF32 off, 20 steps of AdamW at 3e-4 on 4 sequences of 64 tokens, and of 256: the first losses differ by at most
1e-5 of the loss, all by at most 2e-3, and the error of each of the 16 gradients, against PyTorch in float64, is at most
twice that of PyTorch in fp32.

bf16, 300 steps at 3e-4 with 10 of warm-up on 4 sequences of 1024 tokens: means of 20 losses differ from those of
PyTorch (autocast, fp32 weights, fused AdamW) by at most 0.02, or 3 times what two PyTorch runs differ by that have
another attention backend.

Everything runs in this process; memory is given back between the programs. The exit status is 1 where they disagree.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from train_inside import release, run_steps, training, workshop

from kbench.errors import KbenchError
from kbench.train.gradcheck import relative_error
from kbench.train.model import PRESETS, Model
from kbench.train.options import TrainOptions
from kbench.train.run import Inputs
from kbench.train.setup import Workshop

RATE = 3e-4
FP32_STEPS, BF16_STEPS, WARMUP = 20, 300, 10
WINDOW = 20  # steps whose mean loss is compared
# What has to be reached: see the text above.
FIRST_LOSS, ANY_LOSS, GRADIENT_RATIO = 1e-5, 2e-3, 2.0
LEAST_LIMIT, SPREADS = 0.02, 3.0
# A gradient this close to float64 is right, however close another one comes.
ROUNDED_ONLY = 1e-7
# Backends of scaled_dot_product_attention, the two first ones that work are compared: what they run on differs.
BACKENDS = ("flash", "cudnn", "efficient", "math")
DEVICES = {"cuda": "cuda", "emulator": "cpu"}  # kbench's name: PyTorch's


def note(line: str) -> None:
    print(f"[{time.perf_counter() - _BEGUN:6.1f} s] {line}", file=sys.stderr, flush=True)


_BEGUN = time.perf_counter()


# ---------------------------------------------------------------------------------------------- fp32


def fp32(shop: Workshop, options: TrainOptions) -> dict[str, Any]:
    """Losses and gradients in fp32, and the verdict."""
    device = DEVICES[shop.device.kind]
    ours, model, weights, batches, schedule = _kbench_fp32(shop, options)
    release(shop)
    import gpt2_torch

    note("PyTorch, fp32")
    single = gpt2_torch.Settings(device, "fp32", sdpa="math")
    double = gpt2_torch.Settings(device, "fp64", sdpa="math")
    theirs = gpt2_torch.train(model, weights, batches, schedule, single, keep_weights=False).losses
    gradients = gpt2_torch.loss_and_gradients(model, weights, batches[0], single)[2]
    empty_cache()
    note("PyTorch, float64")
    loss, _, right = gpt2_torch.loss_and_gradients(model, weights, batches[0], double)
    empty_cache()
    found = gradient_errors(ours["gradients"], gradients, right)
    return fp32_verdict(ours["losses"], theirs, loss, found) | _facts(options)


def _kbench_fp32(shop: Workshop, options: TrainOptions) -> Any:
    """kbench's part, in a function of its own so that its memory can be released."""
    with training(shop, options, note) as run:
        batches = run.batches(_steps(options))
        note(f"kbench, {options.dtype}, batch {options.batch} of {run.inputs.options.seq} tokens")
        run.trainer.gradient([batches[0]])
        gradients = run.trainer.gradients()
        reports, _ = run_steps(run.trainer, batches)
        found = {"losses": [report.loss for report in reports], "gradients": gradients}
        return found, run.inputs.model, run.weights, batches, _rates(run.inputs)


def gradient_errors(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], right: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Of each tensor: errors relative to float64, and how many times PyTorch's kbench's is."""
    found = []
    for name, exact in right.items():
        mine, other = relative_error(ours[name], exact), relative_error(theirs[name], exact)
        ratio = mine / max(other, sys.float_info.min)
        good = bool(ratio <= GRADIENT_RATIO or mine <= ROUNDED_ONLY)  # NaN is neither
        found.append({"tensor": name, "kbench": mine, "pytorch": other, "ratio": ratio, "agrees": good})
    return found


def fp32_verdict(
    ours: Sequence[float], theirs: Sequence[float], exact: float, gradients: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the figures amount to. exact: the first loss in float64."""
    first = abs(ours[0] - theirs[0]) / abs(theirs[0])
    largest = float(np.max(np.abs(np.array(ours) - np.array(theirs))))
    return {
        "part": "fp32",
        "agrees": bool(first <= FIRST_LOSS and largest <= ANY_LOSS and all(one["agrees"] for one in gradients)),
        "first_loss": {"kbench": ours[0], "pytorch": theirs[0], "float64": exact, "relative": first},
        "largest_difference": largest,
        "losses": {"kbench": list(ours), "pytorch": list(theirs)},
        "gradients": gradients,
    }


def fp32_lines(found: Mapping[str, Any]) -> list[str]:
    first = found["first_loss"]
    lines = [
        f"fp32, batch {found['batch']} of {found['seq']} tokens",
        f"first loss: kbench {first['kbench']:.7f}, PyTorch {first['pytorch']:.7f}, float64 {first['float64']:.7f}",
        f"  relative difference {first['relative']:.1e}, allowed {FIRST_LOSS:.0e}",
        f"{len(found['losses']['kbench'])} steps: largest difference {found['largest_difference']:.1e}, "
        f"allowed {ANY_LOSS:.0e}",
        f"{'gradient':9s} {'kbench':>9s} {'PyTorch':>9s} {'ratio':>6s}   error against float64; allowed "
        f"{GRADIENT_RATIO:g}",
    ]
    for one in found["gradients"]:
        mark = "" if one["agrees"] else "  too far"
        lines.append(f"{one['tensor']:9s} {one['kbench']:9.1e} {one['pytorch']:9.1e} {one['ratio']:6.2f}{mark}")
    return [*lines, "they agree" if found["agrees"] else "THEY DISAGREE"]


# ---------------------------------------------------------------------------------------------- bf16


def bf16(shop: Workshop, options: TrainOptions) -> dict[str, Any]:
    """Loss curves in bf16, and the verdict."""
    ours, model, weights, batches, schedule = _kbench_bf16(shop, options)
    release(shop)
    import gpt2_torch

    curves: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for backend in BACKENDS:
        if len(curves) == 2:
            break
        note(f"PyTorch, bf16, {backend} attention")
        settings = gpt2_torch.Settings(DEVICES[shop.device.kind], "bf16", sdpa=backend)
        try:
            curves[backend] = gpt2_torch.train(model, weights, batches, schedule, settings, keep_weights=False).losses
        except RuntimeError as error:  # such as: no kernel of this backend for these sizes
            failed[backend] = str(error).splitlines()[0]
            note(f"{backend} attention does not run: {failed[backend]}")
        empty_cache()
    if len(curves) < 2:
        raise SystemExit(f"PyTorch runs with fewer than two attention backends: {failed}")
    (one, theirs), (other, others) = curves.items()
    agrees, worst, limit = losses_agree(ours, theirs, others)
    return {
        "part": "bf16",
        "agrees": agrees,
        "largest_difference": worst,
        "limit": limit,
        "losses": {"kbench": ours, one: theirs, other: others},
    } | _facts(options)


def _kbench_bf16(shop: Workshop, options: TrainOptions) -> Any:
    with training(shop, options, note) as run:
        batches = run.batches(_steps(options))
        note(f"kbench, {options.dtype}, batch {options.batch} of {run.inputs.options.seq} tokens")
        reports, _ = run_steps(run.trainer, batches)
        losses = [report.loss for report in reports]
        return losses, run.inputs.model, run.weights, batches, _rates(run.inputs)


def losses_agree(
    ours: Sequence[float], theirs: Sequence[float], others: Sequence[float], window: int = WINDOW
) -> tuple[bool, float, float]:
    """Whether two training runs have the same curve: verdict, largest difference, limit.

    Means of `window` steps are compared. The limit is 3 times the largest such difference between two runs of one
    program that differ only in rounding, `theirs` and `others`, and at least 0.02. A loss that is not finite, or runs
    that are not equally long, never agree.
    """
    if not len(ours) == len(theirs) == len(others) or len(ours) < window:
        return False, float("nan"), LEAST_LIMIT
    if not np.isfinite([ours, theirs, others]).all():
        return False, float("nan"), LEAST_LIMIT
    means = [np.array(window_means(run, window)) for run in (ours, theirs, others)]
    worst = float(np.max(np.abs(means[0] - means[1])))
    limit = max(LEAST_LIMIT, SPREADS * float(np.max(np.abs(means[1] - means[2]))))
    return worst <= limit, worst, limit


def window_means(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """Of whole windows."""
    return [float(np.mean(losses[i : i + window])) for i in range(0, len(losses) - window + 1, window)]


def bf16_lines(found: Mapping[str, Any]) -> list[str]:
    names = list(found["losses"])
    means = [window_means(found["losses"][name]) for name in names]
    lines = [
        f"bf16, batch {found['batch']} of {found['seq']} tokens, means of {WINDOW} steps",
        f"{'steps':>9s}" + "".join(f" {name:>9s}" for name in names) + f" {'differs':>8s} {'spread':>8s}",
    ]
    for index, (mine, one, other) in enumerate(zip(*means, strict=True)):
        steps = f"{index * WINDOW + 1}-{(index + 1) * WINDOW}"
        lines.append(f"{steps:>9s} {mine:9.4f} {one:9.4f} {other:9.4f} {mine - one:+8.4f} {other - one:+8.4f}")
    lines.append(f"largest difference {found['largest_difference']:.4f}, allowed {found['limit']:.4f}")
    return [*lines, "they agree" if found["agrees"] else "THEY DISAGREE"]


# ---------------------------------------------------------------------------------------------- both


def empty_cache() -> None:
    """Give PyTorch's memory back to the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _rates(inputs: Inputs) -> list[float]:
    return [float(rate) for rate in inputs.settings.rates]


def _steps(options: TrainOptions) -> int:
    assert options.steps is not None
    return options.steps


def _facts(options: TrainOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("model", "batch", "seq", "steps", "dtype", "use", "data", "lr")}


def _options(chosen: argparse.Namespace, part: str, model: Model, seq: int) -> TrainOptions:
    """What is not said here is as the command has it, and as PyTorch's side has it: clipping at 1, no decay."""
    steps = chosen.steps or (FP32_STEPS if part == "fp32" else BF16_STEPS)
    return TrainOptions(
        model=chosen.model, batch=chosen.batch, seq=min(seq, model.context), dtype=part, steps=steps, use=chosen.use,
        lr=RATE, warmup=WARMUP if part == "bf16" else 0, data=chosen.data, val_every=0, recompute=0,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=("fp32", "bf16"))
    parser.add_argument("--model", default="d12", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, nargs="+", help="tokens; 64 and 256 in fp32, 1024 in bf16")
    parser.add_argument("--steps", type=int, help=f"{FP32_STEPS} in fp32, {BF16_STEPS} in bf16")
    parser.add_argument("--data", help="a token file; kbench's own story if left out")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where times of versions are")
    parser.add_argument("--use", default="best", help="kbench's versions, as `kbench train --use`")
    parser.add_argument("--device", default="cuda", choices=DEVICES, help="emulator: to try this script out")
    parser.add_argument("--json", type=Path, help="also write the figures here, after each part")
    chosen = parser.parse_args(arguments)
    try:
        import torch
    except ImportError:
        raise SystemExit("this benchmark needs PyTorch: pip install torch") from None
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    model, document = PRESETS[chosen.model], []
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else "CPU"
    print(f"kbench beside PyTorch {torch.__version__}, {chosen.model}, {where}")
    with workshop(chosen.device, chosen.results, note) as shop:
        for part in chosen.parts:
            for seq in chosen.seq or ((64, 256) if part == "fp32" else (1024,)):
                run, lines = (fp32, fp32_lines) if part == "fp32" else (bf16, bf16_lines)
                try:
                    found = run(shop, _options(chosen, part, model, seq))
                    print("\n".join(lines(found)), flush=True)
                except KbenchError as error:
                    found = {"part": part, "seq": seq, "agrees": False, "error": str(error)}
                    print(f"{part}, {seq} tokens: {error}", flush=True)
                document.append(found)
                release(shop)
                if chosen.json:
                    chosen.json.write_text(json.dumps(document, indent=1))
    return 0 if all(found["agrees"] for found in document) else 1


if __name__ == "__main__":
    sys.exit(main())
