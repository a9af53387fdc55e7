"""A transformer translates German into English: 6 + 6 layers, 121 tensors, tied embeddings, layer norm without gains.

The paper says WMT16 En-De; what its authors ran is Multi30k, German to English. 100 epochs in batches of 128
sentences, the learning rate rising linearly, epoch by epoch, to the 50th and falling to zero in the 100th; its peak is
tuned over {0.0001, 0.001, 0.01, 0.1, 1}. Labels are smoothed by 0.1, and the loss is summed over words. The authors
add positions to embeddings as they are. Nero is also run with scaled embeddings, as in the first transformer.
"""

from functools import partial
from importlib.util import find_spec

from torch import nn

from nero_lab.data import Dataset, Pairs, pairs
from nero_lab.models.transformer import Translator
from nero_lab.protocol import Contender, Seconds, Task, rise_and_fall


def bleu(model: nn.Module, data: Dataset) -> dict[str, float]:
    """Compute BLEU on the test sentences, as tokenised, by greedy decoding; nothing without sacrebleu."""
    assert isinstance(model, Translator)
    assert isinstance(data, Pairs)
    if find_spec("sacrebleu") is None:
        return {}
    import sacrebleu

    longest = 10 + data.test.labels.shape[1]
    found = [
        data.to_text(sentence)
        for words, *_ in data.batches("test")
        for sentence in model.translate(words[:, 0], pairs.BEGIN, pairs.END, longest).tolist()
    ]
    score = sacrebleu.corpus_bleu(found, [data.references], tokenize="none", force=True).score
    return {"test_bleu": round(score, 2)}


task = Task(
    name="translation",
    shows="Table 1, Figure 7",
    title="Nero trains a large transformer to a lower perplexity than the others",
    dataset="multi30k",
    model=Translator,
    contenders={
        "nero": Contender("nero", best=0.001),
        "nero-scaled": Contender("nero", best=0.001, model=partial(Translator, scaled=True)),
        "adam": Contender("adam", best=0.0001),
        "lamb": Contender("lamb", best=0.01),
        "sgd": Contender("sgd", best=0.0001),
    },
    grid=(0.0001, 0.001, 0.01, 0.1, 1.0),
    epochs=100,
    batch=128,
    schedule=rise_and_fall(50, 100),
    metric="valid_loss",
    smoothing=0.1,
    is_loss_summed=True,
    verdict=bleu,
    tools={"sacrebleu": "BLEU"},
    seconds=Seconds(539, 307, None),
)
