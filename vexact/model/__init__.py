"""What both paths share: the model's shape, its weights, its tables and its tokenizer, and one forward."""
