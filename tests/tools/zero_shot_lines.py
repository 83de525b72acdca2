"""Lines of the zero-shot tasks, of the form of the published data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tools.runs import make_model_run
from tests.tools.test_hf_tools import make_bpe
from tools import export_hf

_PROBLEMS = (
    "[{'question': 'Who sat?', 'answer': 'B', 'options': ['a dog', 'the cat', 'a log', 'no one']}, "
    "{'question': 'The mat is  _  .', 'answer': 'C', "
    "'options': ['a dog', 'a cat', 'on the log', 'a mat']}, "
    "{'question': 'The dog sat on  _  .', 'answer': '%s', "
    "'options': ['the cat', 'the log', 'the mat', 'the dog that sat']}]"
)
_ENTITIES = ["The Cat", "Dog", "Log", "Cat"]

LINES: dict[str, list[dict[str, Any]]] = {
    "lambada_openai": [
        {"text": "the cat sat on the mat and the dog sat on\nthe log"},
        {"text": "the dog sat on the mat"},
        {"text": "a cat and a\ndog"},
    ],
    "lambada_standard": [
        {"context": "the cat did n't sit on the", "continuation": "log"},
        {"context": "the dog sat on the", "continuation": "mat\n\nand"},
        {"context": "on the log the dog", "continuation": "sat"},
    ],
    "race": [
        {"article": "The cat sat.\n\nThe dog sat.", "problems": _PROBLEMS % letter}
        for letter in "ABCD"
    ],
    "mathqa": [
        {
            "Problem": "3 cats and 4 dogs sat on a log . how many ?",
            "options": "a ) 7 , b ) 12 , c ) 1 , 200 , d ) 43 , e ) none of these",
            "correct": letter,
        }
        for letter in "abcde"
    ],
    "piqa": [
        {"goal": "sit on a log", "sol1": "sit on the log", "sol2": "log the mat", "label": 0},
        {"goal": "sit on a mat", "sol1": "mat the log, at length", "sol2": "sit", "label": 1},
        {"goal": "find a cat", "sol1": "look on the mat", "sol2": "look at the cat", "label": 1},
    ],
    "winogrande": [
        {
            "sentence": "The cat sat on the mat, not the log, as the _ was soft.",
            "option1": "mat",
            "option2": "log",
            "answer": answer,
        }
        for answer in "12"
    ],
    "mnli": [
        {"premise": "The cat sat.", "hypothesis": " The dog sat ", "label": 0},
        {"premise": "The cat sat.", "hypothesis": "The cat sat.", "label": 1},
        {"premise": "The dog sat on a log.", "hypothesis": "No cat sat.", "label": 2},
    ],
    "mnli_mismatch": [
        {"premise": "A log.", "hypothesis": "A mat.", "label": label} for label in (0, 1, 2)
    ],
    "qqp": [
        {"question1": f"Where is {one}?", "question2": f"Where sat {other}?", "label": label}
        for label, (one, other) in enumerate((("the cat", "a dog"), ("a log", "the log")))
    ],
    "qnli": [
        {"question": "Who sat?", "sentence": "The cat sat.", "label": 0},
        {"question": "Who sat?", "sentence": "A mat and a log.", "label": 1},
    ],
    "sst2": [
        {"sentence": "the cat is on the mat ", "label": 0},
        {"sentence": "a dog on a log ", "label": 1},
    ],
    "mrpc": [
        {"sentence1": "The cat sat.", "sentence2": "The dog sat.", "label": 0},
        {"sentence1": "The cat sat.", "sentence2": "So sat the cat.", "label": 1},
        {"sentence1": "The log.", "sentence2": "A log on a mat.", "label": 1},
    ],
    "rte": [
        {"sentence1": "The cat sat.", "sentence2": "A cat sat.", "label": 0},
        {"sentence1": "The cat sat.", "sentence2": "A dog sat.", "label": 1},
    ],
    "boolq": [
        {"passage": "The mat (log) is a mat.", "question": "is the mat a log", "label": 0},
        {"passage": "The dog sat.", "question": "did the dog sit", "label": 1},
    ],
    "cb": [
        {"premise": f"The cat sat on {place}.", "hypothesis": "the cat sat", "label": label}
        for label, place in enumerate(("the log", "a mat", "the dog"))
    ],
    "copa": [
        {
            "premise": "The cat sat.",
            "choice1": "The dog sat.",
            "choice2": "A log was on the mat.",
            "question": question,
            "label": label,
        }
        for label, question in enumerate(("cause", "effect"))
    ],
    "multirc": [
        {"paragraph": "The cat sat.", "question": "Who sat?", "answer": "The cat", "label": 1},
        {"paragraph": "The cat sat.", "question": "Who sat?", "answer": "'The log'", "label": 0},
    ],
    "record": [
        {
            "passage": "The Cat sat on a Log.\n@highlight\nA Dog sat\n@highlight\nSo it was",
            "query": "On a log sat @placeholder.",
            "entities": _ENTITIES,
            "answers": answers,
        }
        for answers in (["Cat"], ["Dog", "Log"], ["The Cat", "Dog"])
    ],
    "sglue_rte": [
        {"premise": "The cat sat.", "hypothesis": "A cat sat.", "label": 0},
        {"premise": "The cat sat.", "hypothesis": "A dog sat.", "label": 1},
    ],
    "wic": [
        {
            "sentence1": "The cat sat on a log.",
            "sentence2": "The log of the dog.",
            "start1": 17,
            "end1": 20,
            "label": label,
        }
        for label in (0, 1)
    ],
    "wsc": [
        {
            "text": 'The cat , which did n\'t sit on " the log " , sat on the mat as it was soft .',
            "span1_text": "the mat",
            "span2_text": "it",
            "span2_index": 18,
            "label": label,
        }
        for label in (0, 1)
    ],
}
"""The lines of each task's file."""


def make_place(folder: Path) -> Path:
    """Make a run with a small BPE, its export, and a file of each task; return the folder."""
    vocab, merges = make_bpe(folder / "bpe")
    flags = f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges}"
    ids = json.loads(vocab.read_text())
    # Greedy decoding then yields some of LAMBADA's words.
    favoured = ids["\u0120log"]
    run = folder / "run"
    make_model_run(run, f"--seq-length 160 {flags}", vocab_size=len(ids), favoured=favoured)
    assert export_hf.main([str(folder / "run"), str(folder / "exported")]) == 0
    (folder / "tasks").mkdir()
    for name, lines in LINES.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "tasks" / f"{name}.jsonl").write_text(text)
    return folder
