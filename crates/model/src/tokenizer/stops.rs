//! The tokens of a GGUF vocabulary that end a model's output, by their text.
//!
//! A file names one end token, or few, and often not the one that ends a turn: of Gemma's or Phi-3's files some name only the end of
//! a text, after which a chat would never stop. llama.cpp therefore recognises them by their text, and so does kvist.

/// The texts at which llama.cpp ends. Not in the list is `</s>`: in Gemma's vocabulary it is a tag of HTML, and a model that ends with
/// it names it.
const ENDS: [&str; 21] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Texts that end what a model of code fills in: padding, and the beginning of another file or repository.
const FILL_ENDS: [&str; 11] = [
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The ids of the end tokens among `tokens`, in order.
///
/// In the vocabularies of Harmony and of Solar, `<|end|>` ends one message of an answer and not the answer. They are recognised by
/// their other end tokens.
pub(crate) fn end_tokens(tokens: &[String]) -> Vec<u32> {
    let has = |text: &str| tokens.iter().any(|token| token == text);
    let in_messages = [("<|return|>", "<|call|>"), ("<|call|>", "<|flush|>"), ("<|calls|>", "<|flush|>")];
    let goes_on = in_messages.iter().any(|(one, other)| has(one) && has(other));
    let ends = |text: &str| {
        (ENDS.contains(&text) || FILL_ENDS.contains(&text)) && !(goes_on && text == crate::harmony::END)
    };
    (0..).zip(tokens).filter(|(_, text)| ends(text)).map(|(id, _)| id).collect()
}

#[cfg(test)]
mod tests {
    use super::end_tokens;

    fn ends(tokens: &[&str]) -> Vec<u32> {
        end_tokens(&tokens.iter().map(|token| token.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn tokens_end_by_their_text() {
        assert_eq!(ends(&["a", "<|end|>", "<|user|>", "<|endoftext|>", "</s>"]), [1, 3]);
        assert_eq!(ends(&["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]), [1, 3]);
        // An answer goes on after a message of it.
        assert_eq!(ends(&["<|end|>", "<|return|>", "<|call|>"]), [1, 2]);
        assert_eq!(ends(&["<|end|>", "<|flush|>", "<|calls|>"]), [1, 2]);
        assert_eq!(ends(&["<|end|>", "<|call|>"]), [0, 1]);
    }
}
