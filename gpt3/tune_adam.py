"""How fast norm and update of common/fused_adam.py go over one GPU's parameters of GPT-3, by how they are cut up.

    python -m gpt3.tune_adam              the preset bench, 35 GB of GPU memory, a line for each setting
    python -m gpt3.tune_adam tiny

The fastest settings belong into TILES there. GB/s count the bytes that a pass must move: 4 a parameter for the norm, 30
for the update.
"""

import sys

import torch

from common import fused_adam
from common.fused_adam import FusedUpdate, Tiles
from gpt3.config import PRESETS
from gpt3.model import Embedding, PlainLayer
from gpt3.state import ADAM

# (block, warps) of either pass, for each chunk.
CHUNKS = (8192, 16384, 32768)
NORM = ((1024, 4), (2048, 4), (4096, 8), (2048, 8), (4096, 4))
UPDATE = ((512, 4), (1024, 8), (2048, 16), (1024, 4), (2048, 8))


def main(preset: str) -> None:
    from triton.testing import do_bench

    config, device = PRESETS[preset], torch.device("cuda")
    layers = [PlainLayer(config, torch.bfloat16, "meta") for _ in range(config.layers)]
    modules = [*layers, Embedding(config, torch.bfloat16, "meta")]
    shapes = [parameter.shape for module in modules for parameter in module.parameters()]
    params = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    masters, exp_avg, exp_avg_sq, grads = (
        [torch.full_like(param, value, dtype=torch.float32) for param in params] for value in (1.0, 0.0, 0.0, 1e-3)
    )
    step, found_inf, norm = (torch.zeros((), device=device) for _ in range(3))
    lr, scale, clip = (torch.tensor(value, device=device) for value in (1e-5, 1.0, ADAM["clip"]))
    options = ADAM["betas"], ADAM["eps"], ADAM["weight_decay"]
    num_parameters = sum(param.numel() for param in params)
    print(f"{num_parameters / 1e6:,.1f} M parameters in {len(params)} tensors", flush=True)
    for chunk in CHUNKS:
        for of_norm, of_update in zip(NORM, UPDATE, strict=True):
            fused_adam.TILES[4] = Tiles(chunk, *of_norm, *of_update)
            update = FusedUpdate(params, masters, exp_avg, exp_avg_sq, *options, grads)
            norm_ms = do_bench(lambda: update.norm(grads, out=norm), return_mode="median")  # noqa: B023
            state = (step, lr, scale, found_inf, norm, clip)
            update_ms = do_bench(lambda: update.step(grads, *state), return_mode="median")  # noqa: B023
            for name, setting, ms, size in (("norm", of_norm, norm_ms, 4), ("update", of_update, update_ms, 30)):
                rate = f"{ms:8.3f} ms {num_parameters * size / ms / 1e6:7,.0f} GB/s"
                print(f"chunk {chunk:6,} {name:6} block, warps {setting!s:10} {rate}", flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("python -m gpt3.tune_adam needs a GPU")
    main(*sys.argv[1:2] or ["bench"])
