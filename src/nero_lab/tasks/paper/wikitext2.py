"""A small transformer as a language model of WikiText-2: 2 layers, 19 tensors, no layer norm.

It trains for 20 epochs in batches of 20 rows of 35 words, the learning rate divided by 10 after 10 epochs and
its start tuned over {0.0001, 0.001, 0.01, 0.1, 1}. No optimiser has momentum; SGD's gradient alone is clipped.
"""

from nero_lab.models.transformer import language_model
from nero_lab.protocol import Contender, Seconds, Task, drop

task = Task(
    name="wikitext2",
    shows="Table 1, Figure 6",
    title="Nero out of the box trains a language model better than the others at their best",
    dataset="wikitext2",
    model=language_model,
    contenders={
        "nero": Contender("nero", best=0.01),
        "sgd": Contender("sgd", best=1.0, options={"clip": 0.25}),
        "adam": Contender("adam", best=0.0001),
        "lamb": Contender("lamb", best=0.01),
    },
    grid=(0.0001, 0.001, 0.01, 0.1, 1.0),
    epochs=20,
    batch=20,
    schedule=drop(0.1, at=(10,)),
    metric="valid_loss",
    seconds=Seconds(123, 86, 47_500),
)
