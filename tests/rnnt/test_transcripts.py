"""rnnt/speech/transcripts: tokenizers, and what they refuse."""

import io

import numpy as np
import pytest

from rnnt.speech import transcripts

SENTENCES = ["the red boat sails home", "the old king sings", "a boat and a king", "we don't know why"]


def train(path, sentences, **options):
    """Write a sentencepiece model of a few sentences, without the letter z."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: ./setup.sh speech")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 5), model_writer=out, bos_id=-1, eos_id=-1, minloglevel=2, **options
    )
    path.write_bytes(out.getvalue())
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A model of 26 pieces."""
    path = tmp_path_factory.mktemp("pieces") / "small.model"
    return train(path, SENTENCES, vocab_size=26, model_type="unigram")


def test_characters_go_to_ids_and_back():
    tokenizer = transcripts.open_tokenizer("chars", vocab=29)
    said = "it doesn't matter"
    ids = tokenizer.encode(said)
    assert len(ids) == len(said) and max(ids) < tokenizer.num_tokens == 28
    assert tokenizer.encode("az' ") == [1, 26, 27, 0]
    assert tokenizer.decode(ids) == said


def test_decoded_text_has_its_words_one_space_apart():
    tokenizer = transcripts.open_tokenizer("chars", vocab=32)
    # 30 is a class of the model that no letter has.
    assert tokenizer.decode([0, 1, 0, 0, 2, 30, 0]) == "a b"


def test_normalising_lowers_case_and_spaces():
    assert transcripts.normalise("  THE Red\tBOAT ") == "the red boat"


@pytest.mark.parametrize("said", ["caf\u00e9", "number 7", "don\u2019t", "stop."])
def test_characters_outside_the_vocabulary_are_refused_by_name(said):
    with pytest.raises(transcripts.UnknownText, match="outside the vocabulary"):
        transcripts.open_tokenizer("chars", vocab=32).encode(said)


def test_too_small_a_vocabulary_names_the_flag():
    transcripts.open_tokenizer("chars", vocab=29)
    with pytest.raises(ValueError, match="--vocab 28 is too small, take 29"):
        transcripts.open_tokenizer("chars", vocab=28)


def test_pieces_go_to_ids_and_back(model_path):
    tokenizer = transcripts.open_tokenizer(str(model_path), vocab=64)
    ids = tokenizer.encode("the red king sings")
    assert all(0 <= number < 26 for number in ids) and len(ids) < len("the red king sings")
    assert tokenizer.decode(np.array(ids)) == "the red king sings"
    assert tokenizer.decode([*ids, 50]) == "the red king sings"


def test_pieces_refuse_what_they_cannot_write(model_path):
    with pytest.raises(transcripts.UnknownText, match="^words outside the vocabulary: 'zoo'$"):
        transcripts.open_tokenizer(str(model_path), vocab=64).encode("the red zoo")


def test_unknown_words_are_named_as_words(tmp_path):
    path = train(tmp_path / "words.model", SENTENCES, vocab_size=15, model_type="word")
    tokenizer = transcripts.open_tokenizer(str(path), vocab=64)
    assert tokenizer.decode(tokenizer.encode("the old boat")) == "the old boat"
    with pytest.raises(transcripts.UnknownText, match="^words outside the vocabulary: 'tea bat'$"):
        tokenizer.encode("the tea and the bat and tea")


def test_model_of_capitals_is_refused(tmp_path):
    path = train(tmp_path / "capitals.model", [one.upper() for one in SENTENCES], vocab_size=26, model_type="unigram")
    with pytest.raises(ValueError, match="--tokenizer .* in capitals, but transcripts are in lower case: train it on"):
        transcripts.open_tokenizer(str(path), vocab=64)


def test_bad_tokenizers_name_the_flag(model_path, tmp_path):
    other = tmp_path / "other.model"
    other.write_text("no model")
    with pytest.raises(ValueError, match="--tokenizer .* not a sentencepiece"):
        transcripts.open_tokenizer(str(other), vocab=64)
    with pytest.raises(ValueError, match="--tokenizer nowhere.model: no such file"):
        transcripts.open_tokenizer("nowhere.model", vocab=64)
    with pytest.raises(ValueError, match="--vocab 26 is too small, take 27"):
        transcripts.open_tokenizer(str(model_path), vocab=26)
