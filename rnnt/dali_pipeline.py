"""The benchmark's DALI pipeline: encoded audio in, normalised log-mel features out, on the CPU or on a GPU.

decode, resample, silence trim (CPU) | dither, pre-emphasis, spectrogram, mel, dB, normalise, pad (GPU where there is
one), in the order and with the numbers of NVIDIA's submission to MLPerf v3.1, common/data/dali/pipeline.py. Two
differences: files come as bytes from the host, which draws what is random (see rnnt/features.py), so that any batch can
be made again; and speed, where it is not 16 kHz times one, changes in a single resampling.

rnnt/features.py has the same in plain torch. nvidia-dali is imported here alone: ./setup.sh dali.
"""

import math

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali import math as dali_math
from nvidia.dali.plugin.pytorch import feed_ndarray

from rnnt import features
from rnnt.speech_folder import HOP, SAMPLE_RATE, BadAudio, num_frames


@pipeline_def
def _pipeline(noise, on_gpu):
    encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
    scale = fn.external_source(name="scale", dtype=types.FLOAT, ndim=0)
    audio, _ = fn.decoders.audio(encoded, dtype=types.FLOAT, downmix=True)
    # Neither least nor largest tells of NaN, the sum does.
    extremes = fn.reductions.min(audio), fn.reductions.max(audio), fn.reductions.sum(audio)
    # What is refused afterwards must not stop an operator, which would not say whose file it is. NaN goes where the
    # sample stands first, and stays where it stands second or in clamp.
    audio = dali_math.min(dali_math.max(audio, -features.MAX_SAMPLE), features.MAX_SAMPLE)
    audio = fn.audio_resample(audio, scale=scale)
    begin, length = fn.nonsilent_region(audio, cutoff_db=features.SILENCE_DB, window_length=features.SILENCE_WINDOW)
    audio = fn.slice(audio, start=begin, shape=length, axes=[0])
    if on_gpu:
        audio = audio.gpu()
    if noise is not None:
        offset = fn.external_source(name="offset", dtype=types.INT32, ndim=0)
        table = types.Constant(noise.table, device="gpu" if on_gpu else "cpu")
        audio = audio + fn.slice(table, start=offset, shape=length, axes=[0])
    audio = fn.preemphasis_filter(audio, preemph_coeff=features.PREEMPHASIS)
    power = fn.spectrogram(audio, nfft=features.FFT_SIZE, window_length=features.WINDOW, window_step=HOP)
    mel = fn.mel_filter_bank(power, sample_rate=SAMPLE_RATE, nfilter=features.NUM_MELS)
    # ln: decibels of multiplier ln(10) over a reference of 1.
    log = fn.to_decibels(mel, multiplier=math.log(10), reference=1.0, cutoff_db=math.log(features.LOG_FLOOR))
    return fn.pad(fn.normalize(log, axes=[1])), length, *extremes


class DaliExtractor:
    """Features of batches of encoded audio; rnnt/speech.py has the same in plain torch.

    batch: the most utterances in one. noise: see rnnt/features.py; None adds no dither. workers: threads that decode.
    device: where features are made, with CUDA on the stream that is current in the call.
    """

    def __init__(self, batch: int, noise: features.Noise | None, workers: int, device: torch.device):
        self.device, self._noise = device, noise
        self._on_gpu = device.type == "cuda"
        self._options = {
            "batch_size": batch,
            "num_threads": workers,
            "device_id": device.index or 0 if self._on_gpu else None,
            # Batches are made ahead by the caller's thread.
            "prefetch_queue_depth": 1,
        }
        self._build()

    def _build(self):
        self._pipe = _pipeline(self._noise, self._on_gpu, **self._options)
        self._pipe.build()

    def __call__(self, encoded: list[np.ndarray], scales: list[float], offsets: list[int]):
        """(features FP32 [B, 80, frames of 10 ms] on the device, frames of each utterance).

        encoded: a file's bytes each, uint8. scales: new sample rate over old. offsets: into the noise. Where some
        cannot be read, {row: BadAudio} instead of both.
        """
        try:
            return self._run(encoded, scales, offsets)
        except BadAudio:
            # Which row it is takes a run of its own for each: DALI does not name it where it cannot decode.
            return self._find_faults(encoded, scales, offsets)

    def _run(self, encoded, scales, offsets):
        inputs = {"encoded": encoded, "scale": np.array(scales, np.float32)}
        if self._noise is not None:
            inputs["offset"] = np.array(offsets, np.int32)
        stream = torch.cuda.current_stream(self.device) if self._on_gpu else None
        try:
            found, *others = self._pipe.run(stream, **inputs)
        except RuntimeError as error:
            # A pipeline that failed is invalid, DALI says.
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
    """The line of a DALI message that says what happened, without the place in DALI's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "encountered:" in lines[:-1]:
        return lines[lines.index("encountered:") + 1].split("] ")[-1].split("failed: ")[-1]
    return lines[0] if lines else type(error).__name__
