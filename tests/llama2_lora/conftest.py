import pytest

from tests.helpers.llama2_lora_case import shorten_corpus


@pytest.fixture(autouse=True)
def short_corpus(monkeypatch):
    shorten_corpus(monkeypatch)
