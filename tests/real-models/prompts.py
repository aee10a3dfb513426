"""What is asked. Each model answers questions of different kinds, ten or every second one (`KVIST_QUESTIONS=5`), and reads a text."""
import os
import pathlib

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):",
    "Translate to German: The weather is nice today.",
    "List five fruits, one on each line.",
    "What is 17 plus 25?",
    "Who wrote Hamlet, and when?",
    "Ein kurzer Satz auf Deutsch mit Umlauten: Übung macht den Meister. Weiter:",
    "Summarise: A cache keeps what was computed, so that it need not be computed again. It costs memory.",
]
if os.environ.get("KVIST_QUESTIONS") == "5":
    QUESTIONS = QUESTIONS[::2]
# English prose that does not change.
TEXT = (pathlib.Path(__file__).resolve().parents[2] / "LICENSE-APACHE").read_text()

# Conversations for chat templates: a system message or none, turns, odd characters, blanks at the ends.
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ],
    [
        {"role": "system", "content": "You speak German."},
        {"role": "user", "content": "Grüß dich! 你好 🙂"},
        {"role": "assistant", "content": "Hallo.\n\nWie geht's?"},
        {"role": "user", "content": "a\tb  c\n{{ x }} {% y %} <b>&amp;</b> \"quoted\" \\n"},
    ],
    [{"role": "user", "content": "  blanks at both ends \n"}],
    [{"role": "user", "content": ""}],
]
