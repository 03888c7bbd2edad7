"""Small folders of audio for the tests of speech: tones instead of voices."""

import io

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: ./setup.sh speech")


def tone(seconds, pitch=200.0, rate=16000, seed=0):
    """float64 samples: a few harmonics that swell and fade, with a little noise, loud from begin to end."""
    time = np.arange(round(seconds * rate)) / rate
    sound = sum(np.sin(2 * np.pi * k * pitch * time) / k for k in (1, 2, 3, 5, 8))
    sound *= 0.6 + 0.4 * np.sin(2 * np.pi * 3 * time)
    return 0.1 * sound + 0.01 * np.random.default_rng(seed).standard_normal(len(time))


def encode(samples, rate=16000):
    """The bytes of a FLAC file of 16-bit samples."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def write_speech(folder, said, speaker="1"):
    """LibriSpeech's layout. said: list of (seconds or a file's bytes, transcript or None)."""
    place = folder / speaker / "7"
    place.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (sound, transcript) in enumerate(said):
        name = f"{speaker}-7-{number:04d}"
        content = sound if isinstance(sound, bytes) else encode(tone(sound, 120 + 10 * number, seed=number))
        (place / f"{name}.flac").write_bytes(content)
        if transcript is not None:
            lines.append(f"{name} {transcript}\n")
    (place / f"{speaker}-7.trans.txt").write_text("".join(lines))
    return folder
