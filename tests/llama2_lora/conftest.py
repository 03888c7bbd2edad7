"""A short text to train on: to cut all of the standard library into windows takes longer than most tests."""

import functools
from types import SimpleNamespace

import pytest

from common.training.data import token_files
from llama2_lora.state import CACHE


@functools.cache
def _start_of_corpus():
    corpus = token_files.python_corpus(CACHE)
    return SimpleNamespace(tokens=corpus.tokens[:200_000], num_tokens=200_000, name=corpus.name)


@pytest.fixture(autouse=True)
def short_corpus(monkeypatch):
    start = _start_of_corpus()
    monkeypatch.setattr(token_files, "python_corpus", lambda cache: start)
