"""Make the lab's model: a small Llama with fixed random weights and a tokenizer."""

import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "A cluster has nodes, a node has processors, and a job asks for both.",
    "One step over all the nodes, one task on each node.",
    "Hello, how are you today? I am a small model and I know very few words.",
    "0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100",
] * 20
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(target: Path) -> None:
    """Write config, weights and tokenizer to ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    bpe = ByteLevelBPETokenizer()
    special = ["<s>", "</s>", "<pad>"]
    bpe.train_from_iterator(
        TEXT, vocab_size=VOCAB, min_frequency=1, special_tokens=special
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(target)
    torch.manual_seed(561)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        # Wide weights: the best token then stands well clear of the second best
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).float().save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
