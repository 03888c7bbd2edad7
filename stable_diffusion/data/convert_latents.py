"""Make shards of the benchmark's encoded training set, tar files of pickles. Run once; training reads no pickle.

    python -m stable_diffusion.data.convert_latents --in DIR --out NEW --trust-input
    python -m stable_diffusion.train --data NEW

The set (LAION-400M subset, 832 shards 00000.tar to 00831.tar, 6,513,144 samples) has two members for each sample,
<key>.pyd and <key>.txt. The .pyd is a pickled dict of two numpy arrays:
    image_embed      [1, 8, 64, 64]   moments of the VAE: 4 channels of means, 4 of log-variances
    captions_embed   [77, 1024]       OpenCLIP ViT-H-14, penultimate layer
and the .txt the caption, which training does not read. Both arrays are float32: not written down anywhere, but at
446,464 bytes a sample the 832 shards have the 2.7T that the submission's README names; float16 would not.
Sources: mlcommons/training_results_v5.0, NVIDIA's stable_diffusion encode_captions.py (writes it) and README.md;
NeMo 25.04, stable_diffusion_dataset.py, build_train_valid_precached_clip_datasets (reads it) and ldm/ddpm.py, get_input
(squeezes the 1). MLCommons hands out shards of <key>.npy, with captions not encoded: those hold no .pyd.

A child process of limited memory and time converts each tar file (common/training/data/trusted_pickles.py). Bad
samples, and those after a damaged place, are left out, named and counted. A shard that is in --out already is kept, so
a conversion that was stopped goes on.
"""

import os
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from common.config import Parser, mistakes_in_one_line
from common.training.data import trusted_pickles
from common.training.data.limits import first_line, open_regular, shown
from common.training.data.trusted_pickles import Limits
from stable_diffusion.data.shards import DTYPES, BadSample, require_finite, shapes_of, write_shard

STORED = {"moments": "image_embed", "context": "captions_embed"}
SHAPES = shapes_of(latent_size=64, context_tokens=77, context_dim=1024)
LIMITS = Limits(memory_gib=4, minutes=60)
MAX_NAMED = 10


# ------------------------------------------------------------------------------------------------
# In the child: one tar file


def write(path: str, out: str) -> dict:
    """Unpickle the samples of a tar file and write the good ones. Runs in a child of `trusted_pickles.run`.

    Returns:
        "written", a number; "dropped", a number; "named", the first dropped ones as [key, reason].
    """
    dropped = []
    written = write_shard(out, _good_samples(path, dropped))
    if not written:
        raise ValueError("no sample is good: " + ": ".join(filter(None, dropped[0])))
    return {"written": written, "dropped": len(dropped), "named": dropped[:MAX_NAMED]}


def _good_samples(path, dropped):
    """The arrays by name of each good sample; others are added to `dropped` as (key, reason)."""
    dtypes = {}
    for key, content in _pickles(path, dropped):
        try:
            arrays = decode(content)
            for name, array in arrays.items():
                if dtypes.setdefault(name, array.dtype.name) != array.dtype.name:
                    raise BadSample(f"{name} of dtype {array.dtype} where the others are {dtypes[name]}")
        except BadSample as error:
            dropped.append((key, str(error)))
        else:
            yield arrays


def decode(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of a .pyd member by name, checked. Raises BadSample."""
    try:
        stored = trusted_pickles.load_bytes(content)
    except ValueError as error:
        raise BadSample(str(error)) from None
    arrays = {}
    for name, key in STORED.items():
        array = stored.get(key) if isinstance(stored, dict) else None
        if not isinstance(array, np.ndarray):
            raise BadSample(f"no array {key} in it")
        if name == "moments" and array.ndim == 4 and array.shape[0] == 1:
            array = array[0]
        if array.dtype.name not in DTYPES.values() or not array.dtype.isnative or array.shape != SHAPES[name]:
            expected = f"{' or '.join(DTYPES.values())} {SHAPES[name]}"
            raise BadSample(f"{name} of {array.dtype} {array.shape}, not {expected}")
        arrays[name] = array
    require_finite(arrays)
    return arrays


def _pickles(path, dropped):
    """(key, content) of each .pyd member; damage that ends the reading is added to `dropped` as (key, reason)."""
    found, last, fault = False, "its start", None
    with open(path, "rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # it keeps every header otherwise
                    # As webdataset splits names: the extension is all that follows the first dot.
                    key, _, kind = os.path.basename(member.name).partition(".")
                    # Asked before a size that a damaged header names is read into memory.
                    if member.offset_data + member.size > os.fstat(file.fileno()).st_size:
                        raise tarfile.ReadError(f"{os.path.basename(member.name)} is cut off")
                    if kind == "pyd" and member.isreg():
                        found = True
                        yield key, tar.extractfile(member).read()
                    last = key
                file.seek(tar.offset)
                # tarfile takes a damaged header for the end.
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError("no end of the archive")
                fault = None if found else "holds no .pyd, which the benchmark's encode_captions.py makes"
        except (tarfile.TarError, OSError) as error:
            fault = f"damaged after {last}, the rest is lost: {first_line(error)}"
    if fault:
        dropped.append(("", fault))


# ------------------------------------------------------------------------------------------------
# In the parent: a folder of them


def convert(folder: Path, out: Path, limits: Limits) -> tuple[int, int]:
    """Convert all tar files of `folder` that `out` has no shard of; returns the samples written and dropped.

    Shards appear whole or not at all. The first few dropped samples are named on stderr.

    Raises:
        ValueError: In one line that names --in or --out.
    """
    tars = sorted(folder.glob("[!.]*.tar"))
    if not tars:
        raise ValueError(f"--in {shown(folder)}: no folder with tar files (*.tar)")
    written, dropped = 0, 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.absolute(), prefix=".convert-") as partial:
            for tar in tars:
                shard = out / f"{tar.stem}.safetensors"
                if not shard.exists():
                    answer = _convert_one(tar, Path(partial, shard.name), limits)
                    os.replace(Path(partial, shard.name), shard)
                    for key, reason in answer["named"][: max(0, MAX_NAMED - dropped)]:
                        sample = " ".join(filter(None, (tar.name, key)))
                        print(shown(f"data: dropped {sample}: {reason}"), file=sys.stderr)
                    written += answer["written"]
                    dropped += answer["dropped"]
    except OSError as error:
        raise ValueError(f"--out {shown(out)}: cannot write there ({error.strerror})") from None
    return written, dropped


def _convert_one(tar, shard, limits):
    open_regular(tar, "--in").close()
    try:
        arguments = [str(tar.absolute()), str(shard)]
        return trusted_pickles.run("stable_diffusion.data.convert_latents:write", arguments, limits)
    except ValueError as error:
        raise ValueError(f"--in: {shown(tar)}: {error}") from None


def main(argv=None) -> int:
    """Exit status: 0, or 1 where a sample was dropped. Raises ValueError where a tar file cannot be converted."""
    parser = Parser(
        prog="python -m stable_diffusion.data.convert_latents", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--in", dest="folder", type=Path, required=True, metavar="DIR", help="folder of tar files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the shards")
    trusted_pickles.add_flags(parser, LIMITS)
    args = parser.parse_args(argv)
    written, dropped = convert(args.folder, args.out, trusted_pickles.require_trust(args, parser))
    print(f"{shown(args.out)}: {written:,} samples written, {dropped:,} dropped")
    return 1 if dropped else 0


if __name__ == "__main__":
    with mistakes_in_one_line("stable_diffusion", "data.convert_latents"):
        status = main()
    sys.exit(status)
