"""rnnt/speech/transcripts: tokenizers, and what they refuse."""

import io

import pytest

from rnnt.speech import transcripts


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A sentencepiece model of 26 pieces, without the letter z."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: ./setup.sh speech")
    sentences, out = (
        ["the red boat sails home", "the old king sings", "a boat and a king", "we don't know why"],
        io.BytesIO(),
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 5), model_writer=out, bos_id=-1, eos_id=-1, minloglevel=2, vocab_size=26
    )
    path = tmp_path_factory.mktemp("pieces") / "small.model"
    path.write_bytes(out.getvalue())
    return path


def test_characters_go_to_ids():
    tokenizer = transcripts.open_tokenizer("chars", vocab=29)
    said = "it doesn't matter"
    ids = tokenizer.encode(said)
    assert len(ids) == len(said) and max(ids) < tokenizer.num_tokens == 28
    assert tokenizer.encode("az' ") == [1, 26, 27, 0]


def test_normalising_lowers_case_and_spaces():
    assert transcripts.normalise("  THE Red\tBOAT ") == "the red boat"


@pytest.mark.parametrize("said", ["caf\u00e9", "number 7"])
def test_characters_outside_the_vocabulary_are_refused(said):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        transcripts.open_tokenizer("chars", vocab=32).encode(said)


def test_pieces_go_to_ids(model_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    tokenizer = transcripts.open_tokenizer(str(model_path), vocab=64)
    ids = tokenizer.encode("the red king sings")
    assert all(0 <= number < 26 for number in ids) and len(ids) < len("the red king sings")
    assert sentencepiece.SentencePieceProcessor(model_file=str(model_path)).decode(ids) == "the red king sings"
    with pytest.raises(ValueError, match="'the red zoo'$"):
        tokenizer.encode("the red zoo")


def test_bad_tokenizers_name_the_flag(model_path, tmp_path):
    other = tmp_path / "other.model"
    other.write_text("no model")
    with pytest.raises(ValueError, match="--tokenizer .* not a sentencepiece"):
        transcripts.open_tokenizer(str(other), vocab=64)
    with pytest.raises(ValueError, match="--tokenizer nowhere.model: no such file"):
        transcripts.open_tokenizer("nowhere.model", vocab=64)
    for name, num_tokens in (("chars", 28), (str(model_path), 26)):
        with pytest.raises(ValueError, match=f"--vocab {num_tokens} is too small, take {num_tokens + 1}"):
            transcripts.open_tokenizer(name, vocab=num_tokens)
