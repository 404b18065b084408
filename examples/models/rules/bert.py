"""The weights of `BertForPreTraining`; its decoder has two ties, to the word embeddings and to `cls.predictions.bias`."""

from __future__ import annotations

from remat_jax.porting import Rules

from ..bert import BertConfig

TEXT = """
    bert.embeddings.word_embeddings.weight -> params/words/embedding
    bert.embeddings.position_embeddings.weight -> params/positions/embedding
    bert.embeddings.token_type_embeddings.weight -> params/segments/embedding
    bert.embeddings.LayerNorm.weight -> params/embed_norm/scale
    bert.embeddings.LayerNorm.bias -> params/embed_norm/bias
    # Before query, key and value, because the first rule that matches an array fills it.
    bert.encoder.layer.{i}.attention.output.dense.weight -> params/layers_{i}/attention/out/kernel | linear
    bert.encoder.layer.{i}.attention.output.dense.bias -> params/layers_{i}/attention/out/bias
    bert.encoder.layer.{i}.attention.self.{name}.weight -> params/layers_{i}/attention/{name}/kernel | linear
    bert.encoder.layer.{i}.attention.self.{name}.bias -> params/layers_{i}/attention/{name}/bias
    bert.encoder.layer.{i}.attention.output.LayerNorm.weight -> params/layers_{i}/attention_norm/scale
    bert.encoder.layer.{i}.attention.output.LayerNorm.bias -> params/layers_{i}/attention_norm/bias
    bert.encoder.layer.{i}.intermediate.dense.weight -> params/layers_{i}/up/kernel | linear
    bert.encoder.layer.{i}.intermediate.dense.bias -> params/layers_{i}/up/bias
    bert.encoder.layer.{i}.output.dense.weight -> params/layers_{i}/down/kernel | linear
    bert.encoder.layer.{i}.output.dense.bias -> params/layers_{i}/down/bias
    bert.encoder.layer.{i}.output.LayerNorm.weight -> params/layers_{i}/output_norm/scale
    bert.encoder.layer.{i}.output.LayerNorm.bias -> params/layers_{i}/output_norm/bias
    bert.pooler.dense.weight -> params/pooler/kernel | linear
    bert.pooler.dense.bias -> params/pooler/bias
    cls.predictions.transform.dense.weight -> params/transform/kernel | linear
    cls.predictions.transform.dense.bias -> params/transform/bias
    cls.predictions.transform.LayerNorm.weight -> params/transform_norm/scale
    cls.predictions.transform.LayerNorm.bias -> params/transform_norm/bias
    cls.predictions.bias -> params/bias
    cls.seq_relationship.weight -> params/next_sentence/kernel | linear
    cls.seq_relationship.bias -> params/next_sentence/bias
    tie: bert.embeddings.word_embeddings.weight = cls.predictions.decoder.weight
    tie: cls.predictions.bias = cls.predictions.decoder.bias
"""


def rules(config: BertConfig, scan: bool = False) -> Rules:
    """Return the weight map, its layers unrolled or stacked; it is the same for every configuration.

    >>> len(rules(BertConfig()).ties)
    2
    """
    found = Rules.parse(TEXT)
    return found.stacked("layers_{i}", "layers") if scan else found
