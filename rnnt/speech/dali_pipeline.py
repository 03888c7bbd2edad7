"""The benchmark's DALI pipeline: encoded audio in, normalised log-mel features out, on the CPU or on a GPU.

It decodes, resamples and trims silence on the CPU; dither, pre-emphasis, spectrogram, mel, dB, normalise and pad run on
the GPU where there is one. Order and numbers are those of NVIDIA's submission to MLPerf v3.1,
common/data/dali/pipeline.py. Two differences: files come as bytes from the host, which draws the random numbers, so
that any batch can be made again; and sample rate and speed change in a single resampling.

rnnt/speech/features.py has the same in plain torch. Needs nvidia-dali: ./setup.sh dali.
"""

import math

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as dali_math
from nvidia.dali.plugin.pytorch import feed_ndarray

from rnnt.speech import features
from rnnt.speech.folder import HOP, SAMPLE_RATE, BadAudio, num_frames


@pipeline_def
def _pipeline(noise, on_gpu):
    encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
    scale = fn.external_source(name="scale", dtype=types.FLOAT, ndim=0)
    audio, _ = fn.decoders.audio(encoded, dtype=types.FLOAT, downmix=True)
    # NaN shows in the sum, but neither in the smallest nor in the largest sample.
    extremes = fn.reductions.min(audio), fn.reductions.max(audio), fn.reductions.sum(audio)
    # Absurd samples are refused afterwards, by file. Here they must not stop an operator. NaN is replaced where the
    # sample is the first operand, and kept where it is the second or in clamp.
    audio = dali_math.min(dali_math.max(audio, -features.MAX_SAMPLE), features.MAX_SAMPLE)
    audio = fn.audio_resample(audio, scale=scale)
    begin, length = fn.nonsilent_region(audio, cutoff_db=features.SILENCE_DB, window_length=features.SILENCE_WINDOW)
    audio = fn.slice(audio, start=begin, shape=length, axes=[0])
    if on_gpu:
        audio = audio.gpu()
    offset = fn.external_source(name="offset", dtype=types.INT32, ndim=0)
    table = types.Constant(noise.table, device="gpu" if on_gpu else "cpu")
    audio = audio + fn.slice(table, start=offset, shape=length, axes=[0])
    audio = fn.preemphasis_filter(audio, preemph_coeff=features.PREEMPHASIS)
    power = fn.spectrogram(audio, nfft=features.FFT_SIZE, window_length=features.WINDOW, window_step=HOP)
    mel = fn.mel_filter_bank(power, sample_rate=SAMPLE_RATE, nfilter=features.NUM_MELS)
    # Decibels with multiplier ln(10) over a reference of 1 are ln.
    log = fn.to_decibels(mel, multiplier=math.log(10), reference=1.0, cutoff_db=math.log(features.LOG_FLOOR))
    return fn.pad(fn.normalize(log, axes=[1])), length, *extremes


class DaliExtractor:
    """Features of batches of encoded audio; TorchExtractor of rnnt/speech/source.py does the same in plain torch.

    batch: largest number of utterances. workers: threads that decode. device: of the features, which CUDA makes on the
    current stream.
    """

    def __init__(self, batch: int, noise: features.Noise, workers: int, device: torch.device):
        self.device, self._noise = device, noise
        self._on_gpu = device.type == "cuda"
        self._options = {
            "batch_size": batch,
            "num_threads": workers,
            "device_id": device.index or 0 if self._on_gpu else None,
            # The caller's thread makes batches ahead.
            "prefetch_queue_depth": 1,
        }
        self._build()

    def _build(self):
        self._pipe = _pipeline(self._noise, self._on_gpu, **self._options)
        self._pipe.build()

    def __call__(self, encoded: list[np.ndarray], scales: list[float], offsets: list[int]):
        """(features FP32 [B, 80, frames of 10 ms] on the device, frames of each utterance).

        encoded: each file's bytes, uint8. scales: new sample rate over old. offsets: into the noise. If some files
        cannot be read, it returns {row: BadAudio}.
        """
        try:
            return self._run(encoded, scales, offsets)
        except BadAudio:
            # DALI does not name the file that it cannot decode, so each is run by itself.
            return self._find_faults(encoded, scales, offsets)

    def _run(self, encoded, scales, offsets):
        inputs = {"encoded": encoded, "scale": np.float32(scales), "offset": np.int32(offsets)}
        stream = torch.cuda.current_stream(self.device) if self._on_gpu else None
        try:
            found, *others = self._pipe.run(stream, **inputs)
        except RuntimeError as error:
            # DALI: a pipeline that failed is invalid.
            self._build()
            if "fn.decoders.audio" not in str(error):
                raise
            raise BadAudio(f"cannot be decoded: {_reason(error)}") from None
        lengths, *extremes = ([one.at(row).item() for row in range(len(encoded))] for one in others)
        for lowest, highest, total in zip(*extremes, strict=True):
            features.require_sound(lowest, total if math.isnan(total) else highest)
        out = torch.empty([len(encoded), *found.shape()[0]], device=self.device)
        feed_ndarray(found.as_tensor(), out, cuda_stream=stream)
        return out, [num_frames(length) for length in lengths]

    def _find_faults(self, encoded, scales, offsets):
        faults = {}
        for row in range(len(encoded)):
            try:
                self._run(encoded[row : row + 1], scales[row : row + 1], offsets[row : row + 1])
            except BadAudio as error:
                faults[row] = error
        return faults


def _reason(error):
    """The line of DALI's message that names the fault, without the place in DALI's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "encountered:" in lines[:-1]:
        return lines[lines.index("encountered:") + 1].split("] ")[-1].split("failed: ")[-1]
    return lines[0] if lines else type(error).__name__
