"""Write the pages that are made from the code: ``python docs/generate.py``."""

from pathlib import Path

from lightning_zero3.combinations import markdown

if __name__ == "__main__":
    Path(__file__).with_name("combinations.md").write_text(markdown())
