"""`python -m megatron_forest_trainer` is `forest-train`, which is what torchrun needs."""

from megatron_forest_trainer.cli import app

if __name__ == "__main__":
    app(prog_name="forest-train")
