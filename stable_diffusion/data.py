"""Write realistic shards of training samples, or check a folder of them (format: stable_diffusion/shards.py).

    python -m stable_diffusion.data --out shards --shards 2 --samples 128
    python -m stable_diffusion.data --check shards

Needs numpy alone.
"""

import sys
from pathlib import Path

import numpy as np

from common.config import Parser, mistakes_in_one_line
from stable_diffusion.config import LATENT_SCALE
from stable_diffusion.shards import BadSample, Dropped, Samples
from stable_diffusion.synthetic import write


def check(samples: Samples) -> int:
    """Read every sample, print what is dropped and statistics of the rest; returns how many were dropped."""
    size = samples.shapes["moments"][-1]
    dropped, num_good = list(samples.dropped), 0
    sums, squares, power = np.zeros(4), np.zeros(4), np.zeros((4, size, size))
    log_variances, largest, context = [], 0.0, np.zeros(2)
    for index in range(len(samples)):
        try:
            arrays = samples.read(index)
        except BadSample as error:
            dropped.append(Dropped(*samples.name(index), str(error)))
            continue
        num_good += 1
        mean, log_variance = np.split(arrays["moments"].astype(np.float64), 2)
        sums += mean.mean(axis=(1, 2))
        squares += (mean**2).mean(axis=(1, 2))
        power += np.abs(np.fft.fft2(mean)) ** 2
        log_variances.append(np.quantile(log_variance, [0, 0.5, 1]))
        encoding = arrays["context"].astype(np.float64)
        context += encoding.mean(), (encoding**2).mean()
        largest = max(largest, float(np.abs(encoding).max()))
    print(f"folder      {samples.folder}")
    print(f"shards      {len(samples.shards)}")
    print(f"samples     {num_good:,} good, {len(dropped):,} dropped")
    for shard in sorted({one.shard for one in dropped}):
        here = [one for one in dropped if one.shard == shard]
        print(f"{shard}: {len(here):,} dropped")
        for one in here[:10]:
            print(f"    {one.key or '-':12s}  {one.reason}")
        if len(here) > 10:
            print(f"    and {len(here) - 10:,} more")
    if not num_good:
        return len(dropped)
    means, stds = sums / num_good, np.sqrt(squares / num_good - (sums / num_good) ** 2)
    low, middle, high = np.array(log_variances).T
    print(f"stored as   moments {samples.dtypes['moments']}, encodings {samples.dtypes['context']}")
    print("means       channel      mean       std  std x 0.18215  amplitude slope")
    for channel in range(4):
        slope = amplitude_slope(power[channel])
        scaled = LATENT_SCALE * stds[channel]
        print(f"            {channel:7d} {means[channel]:9.3f} {stds[channel]:9.3f} {scaled:14.3f} {slope:16.2f}")
    print(f"log-var     {low.min():.1f} to {high.max():.1f}, median {np.median(middle):.1f}")
    center = context[0] / num_good
    spread = np.sqrt(context[1] / num_good - center**2)
    print(f"encodings   mean {center:.3f}, std {spread:.3f}, largest magnitude {largest:.1f}")
    return len(dropped)


def amplitude_slope(power) -> float:
    """Slope of log amplitude over log frequency, from a power spectrum [size, size] as fft2 orders it; -1 is 1/f."""
    size = len(power)
    rows = np.fft.fftfreq(size, 1 / size)[:, None]
    frequency = np.rint(np.hypot(rows, rows.T)).astype(int)
    rings = np.arange(1, size // 2)
    amplitude = np.sqrt([power[frequency == ring].mean() for ring in rings])
    return float(np.polyfit(np.log(rings), np.log(amplitude), 1)[0])


def main(argv=None) -> int:
    """Exit status: 0, 1 where --check found something to drop, 2 after a mistake."""
    parser = Parser(prog="python -m stable_diffusion.data", description="Write or check shards of training samples.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", metavar="DIR", help="write generated shards here")
    action.add_argument("--check", metavar="DIR", help="read all samples here and print what is found")
    numbers = {
        "shards": (2, "shards to write"),
        "samples": (128, "samples in each"),
        "latent-size": (64, "height and width of the moments"),
        "context-tokens": (77, "tokens of a text encoding"),
        "context-dim": (1024, "width of a text encoding"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same content (0)")
    args = parser.parse_args(argv)
    for name in numbers:
        if getattr(args, name.replace("-", "_")) < 1:
            parser.error(f"--{name} takes a number from 1 up")
    if args.out == "":
        parser.error("--out takes a folder")
    if args.latent_size % 8:
        parser.error("--latent-size takes a multiple of 8")
    if args.seed < 0:
        parser.error("--seed takes a number from 0 up")
    sizes = (args.latent_size, args.context_tokens, args.context_dim)
    try:
        if args.check is not None:
            return 1 if check(Samples(args.check, *sizes)) else 0
        write(args.out, args.shards, args.samples, args.seed, *sizes)
    except (ValueError, OSError) as error:
        parser.error(str(error).replace("--data", "--check"))
    num_bytes = sum(path.stat().st_size for path in Path(args.out).glob("*.tar"))
    print(f"{args.out}: {args.shards} shards of {args.samples} samples, {num_bytes / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    with mistakes_in_one_line("stable_diffusion", "data"):
        status = main()
    sys.exit(status)
