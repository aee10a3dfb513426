//! Cuts a long text into pieces that can be tokenized separately, without changing its tokens.
//!
//! The `tokenizers` crate takes about a hundred bytes of memory per byte of text and cannot be interrupted. With
//! pieces, only one piece at a time takes that memory, and tokenization can be cancelled between pieces.
//!
//! Tokens never cross a place where the file's own pattern separates words. None of the patterns known here joins a
//! non-space character with a following space, or a letter or digit with a following line break or tab, and none uses
//! look-behind. So such places are safe cuts in any context. Other tokenizers, and those whose added tokens absorb
//! white space, get the whole text.
use serde_json::Value;

/// Where a tokenizer's texts may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cuts {
    Nowhere,
    BeforeBlanks,
}

/// Minimum size of a piece in bytes.
pub(super) const PIECE_BYTES: usize = 16 << 10;

/// Word patterns of `tokenizer.json` files for which the reasoning above holds.
const PATTERNS: [&str; 4] = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

impl Cuts {
    pub fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let json = |part: Result<Value, serde_json::Error>| part.unwrap_or(Value::Bool(true));
        let words = json(serde_json::to_value(tokenizer.get_pre_tokenizer()));
        let normalizer = json(serde_json::to_value(tokenizer.get_normalizer()));
        // Composed characters do not extend across spaces.
        let plain = normalizer.is_null() || normalizer["type"] == "NFC";
        let whole = tokenizer.get_truncation().is_none() && tokenizer.get_padding().is_none();
        let added = tokenizer.get_added_tokens_decoder();
        let added = added.values().all(|token| {
            let inner = token.content.trim_start().contains(char::is_whitespace);
            !token.lstrip && !token.rstrip && !token.single_word && !inner
        });
        match plain && whole && added && cuts_words(&words) && adds_in_front_alone(tokenizer) {
            true => Cuts::BeforeBlanks,
            false => Cuts::Nowhere,
        }
    }

    /// Cuts the text into pieces of at least `min` bytes, except the last.
    pub fn pieces(self, text: &str, min: usize) -> impl Iterator<Item = &str> {
        let mut rest = Some(text);
        std::iter::from_fn(move || {
            let text = rest.take()?;
            let at = if self == Cuts::Nowhere { None } else { first_cut(text, min) };
            let (piece, after) = text.split_at(at.unwrap_or(text.len()));
            rest = at.map(|_| after);
            Some(piece)
        })
    }
}

/// The first cut after `min` bytes.
fn first_cut(text: &str, min: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    (min.max(1)..bytes.len()).find(|&at| {
        let blank = bytes[at];
        if !matches!(blank, b' ' | b'\n' | b'\r' | b'\t') {
            return false;
        }
        let before = bytes[at - 1];
        match before.is_ascii() {
            true => before.is_ascii_alphanumeric() || (blank == b' ' && before.is_ascii_graphic()),
            false => text[..at].chars().next_back().is_some_and(is_letter),
        }
    })
}

/// True for letters of scripts that put no spaces between words.
fn is_letter(c: char) -> bool {
    matches!(c, '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}')
}

/// True for byte-level BPE with words separated by GPT-2's pattern or one of [`PATTERNS`].
fn cuts_words(words: &Value) -> bool {
    let steps = match words["type"].as_str() {
        Some("Sequence") => words["pretokenizers"].as_array().cloned().unwrap_or_default(),
        Some(_) => vec![words.clone()],
        None => return false,
    };
    let Some((last, before)) = steps.split_last() else { return false };
    let known = |step: &Value| match step["type"].as_str() {
        Some("Digits") => true,
        Some("Split") => {
            let pattern = step["pattern"]["Regex"].as_str().unwrap_or_default();
            PATTERNS.contains(&pattern) && step["behavior"] == "Isolated" && step["invert"] == false
        }
        _ => false,
    };
    let by_pattern = before.iter().any(|step| step["type"] == "Split");
    last["type"] == "ByteLevel"
        && last["add_prefix_space"] == false
        && (by_pattern || last["use_regex"] == true)
        && before.iter().all(known)
}

/// True if special tokens are only added in front of a text.
fn adds_in_front_alone(tokenizer: &tokenizers::Tokenizer) -> bool {
    let ids = |special| Some(tokenizer.encode_fast("a", special).ok()?.get_ids().to_vec());
    match (ids(false), ids(true)) {
        (Some(bare), Some(all)) => !bare.is_empty() && all.ends_with(&bare),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;
    use crate::weights::Gguf;
    use kvist_testing::reference::SplitMix64;

    /// A word-level tokenizer over bytes with some merges, for each pattern.
    fn tokenizer(words: &Value) -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        let letters: Vec<String> = "abcs019.,'<|>ĠĊĉčéäŃåĸŃ你".chars().map(String::from).collect();
        let pairs = ["a b", "Ġ a", "Ġ Ġ", "Ċ Ċ", "ĠĠ ĠĠ", ". Ċ", "' s", "0 1", "Ġ .", "ab c", "Ċ Ġ", "č Ċ"];
        for text in letters.into_iter().chain(pairs.iter().map(|pair| pair.replace(' ', ""))) {
            let n = vocab.len();
            vocab.entry(text).or_insert(n.into());
        }
        let bos = vocab.len();
        vocab.insert("<s>".into(), bos.into());
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "NFC"},
            "added_tokens": [{"id": bos, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "pre_tokenizer": words, "decoder": null,
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [bos], "tokens": ["<s>"]}}},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": pairs},
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_folder(folder.path()).unwrap().unwrap()
    }

    /// Texts of 4 MB used to take 474 MB and could not be cancelled. Cut at every allowed place, they have the same
    /// tokens and offsets as in one piece.
    #[test]
    fn pieces_have_the_tokens_of_the_whole() {
        let byte_level = |regex: bool| serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let split = |pattern: &str| serde_json::json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let sequence = |steps: &[Value]| serde_json::json!({"type": "Sequence", "pretokenizers": steps});
        let all = [
            byte_level(true),
            sequence(&[serde_json::json!({"type": "Digits", "individual_digits": true}), byte_level(true)]),
            sequence(&[split(PATTERNS[0]), byte_level(false)]),
            sequence(&[split(PATTERNS[1]), byte_level(false)]),
        ];
        let mut random = SplitMix64(11);
        let mut below = |n: usize| random.index(n);
        let mut n_cuts = 0;
        for words in &all {
            let tokenizer = tokenizer(words);
            assert_eq!(tokenizer.cuts, Cuts::BeforeBlanks, "{words}");
            let letters = [
                "a", "b", "c", "s", "0", "1", ".", ",", "'", " ", " ", "  ", "\n", "\n", "\r\n", "\t", "<s>",
                "é", "e\u{301}", "\u{301}", "你", "\u{a0}", "ⓐ",
            ];
            for _ in 0..2_000 {
                let text: String = (0..1 + below(40)).map(|_| letters[below(letters.len())]).collect();
                let whole = tokenizer.encode_pieces(&text, true, usize::MAX).unwrap();
                let pieces = tokenizer.encode_pieces(&text, true, 1).unwrap();
                assert_eq!(pieces, whole, "{text:?} by {words}");
                let places = tokenizer.ends_of_pieces(&text, true, 1).unwrap();
                assert_eq!(
                    places,
                    tokenizer.ends_of_pieces(&text, true, usize::MAX).unwrap(),
                    "{text:?} by {words}"
                );
                assert_eq!(places.tokens, whole);
                n_cuts += Cuts::BeforeBlanks.pieces(&text, 1).count() - 1;
            }
        }
        assert!(n_cuts > 10_000, "{n_cuts} cuts");
    }

    /// The embedded model's tokenizer allows cuts. One that absorbs white space, or has an unknown pattern, does not.
    #[test]
    fn known_tokenizers_are_cut() {
        let gguf = Gguf::from_bytes("embedded", crate::embedded::MODEL.to_vec()).unwrap();
        let embedded = Tokenizer::from_gguf(&gguf).unwrap().unwrap();
        assert_eq!(embedded.cuts, Cuts::BeforeBlanks);
        assert!(embedded.largest_piece(&"word after word\n".repeat(100_000)) < PIECE_BYTES + 16);
        assert_eq!(embedded.largest_piece(&" ".repeat(100_000)), 100_000);
        assert_eq!(crate::tokenizer::tests::tiny().cuts, Cuts::Nowhere);
        assert_eq!(crate::tokenizer::tests::tiny().largest_piece("a b a"), 5);
        let metaspace = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        assert_eq!(tokenizer(&metaspace).cuts, Cuts::Nowhere);
    }

    #[test]
    fn an_encoding_ends_between_pieces() {
        let halt = crate::halt::Halt::default();
        halt.cancel();
        let tiny = crate::tokenizer::tests::tiny();
        let encode = || (tiny.encode("ab", true).is_err(), tiny.encode_with_ends("ab", true).is_err());
        assert_eq!(halt.run(encode), (true, true));
        assert_eq!(encode(), (false, false));
    }
}
