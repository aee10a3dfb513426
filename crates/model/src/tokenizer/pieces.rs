//! The bytes that each token adds to a text. Grammars over tokens are built from these.
//!
//! The concatenated bytes of several tokens equal their text from [`Tokenizer::decode`], except for the space that
//! SentencePiece drops at the start of a text and for invalid UTF-8. Decoders that do more than replace and concatenate
//! (WordPiece, word suffixes) are refused: their tokens have no fixed bytes.
use super::Tokenizer;
use crate::error::Error;
use serde_json::Value;

/// One token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The bytes it adds to a text; for a control token, its name in the vocabulary. Empty for ids without a token.
    pub bytes: Vec<u8>,
    /// A token without text: an end of turn, a header, padding.
    pub control: bool,
}

/// How a vocabulary encodes bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// GPT-2: every byte is a printable character.
    ByteLevel,
    /// SentencePiece: `▁` is a space, `<0x0A>` a byte that has no token of its own.
    SentencePiece,
}

impl Tokenizer {
    /// All tokens with ids below `vocab`, the model's number of logits, which may exceed the tokenizer's vocabulary.
    pub fn pieces(&self, vocab: usize) -> Result<Vec<Piece>, Error> {
        let spelling = self.spelling()?;
        let added = self.inner.get_added_tokens_decoder();
        let ids = 0..u32::try_from(vocab).unwrap_or(u32::MAX);
        let piece = |id: u32| {
            let token = self.inner.id_to_token(id).unwrap_or_default();
            match added.get(&id) {
                Some(token) if token.special => Piece { bytes: token.content.clone().into(), control: true },
                _ => Piece { bytes: spelling.bytes(&token), control: false },
            }
        };
        Ok(ids.map(piece).collect())
    }

    fn spelling(&self) -> Result<Spelling, Error> {
        let decoder = serde_json::to_value(self.inner.get_decoder()).unwrap_or_default();
        spelling(&decoder).ok_or_else(|| Error::Tokenizer {
            file: self.file.clone(),
            what: "has a decoder that does not map every token to bytes, which a grammar needs".into(),
        })
    }
}

/// The byte encoding of a decoder in `tokenizer.json`; `None` if it is of another kind.
fn spelling(decoder: &Value) -> Option<Spelling> {
    let kind = decoder.get("type")?.as_str()?;
    match kind {
        "ByteLevel" => Some(Spelling::ByteLevel),
        "ByteFallback" => Some(Spelling::SentencePiece),
        "Metaspace" => (decoder.get("replacement")?.as_str()? == "▁").then_some(Spelling::SentencePiece),
        "Sequence" => {
            let mut found = None;
            for step in decoder.get("decoders")?.as_array()? {
                match step.get("type")?.as_str()? {
                    "Fuse" | "Strip" => {}
                    "Replace" => {
                        let blank = step.get("content")?.as_str()? == " ";
                        if !blank || step.get("pattern")?.get("String")?.as_str()? != "▁" {
                            return None;
                        }
                        found = found.or(Some(Spelling::SentencePiece));
                    }
                    _ => {
                        let one = spelling(step)?;
                        if found.is_some_and(|found| found != one) {
                            return None;
                        }
                        found = Some(one);
                    }
                }
            }
            found
        }
        _ => None,
    }
}

impl Spelling {
    fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            // A token with any other character is taken literally, as the decoder does.
            Spelling::ByteLevel => {
                token.chars().map(gpt2_byte).collect::<Option<_>>().unwrap_or_else(|| token.into())
            }
            Spelling::SentencePiece => {
                let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                let byte = byte.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
                byte.map_or_else(|| token.replace('▁', " ").into(), |byte| vec![byte])
            }
        }
    }
}

/// The inverse of GPT-2's `bytes_to_unicode`: printable bytes map to themselves, the others in order from U+0100 on.
fn gpt2_byte(c: char) -> Option<u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code @ 0..=0xff => Some(code as u8).filter(|b| printable(*b)),
        code => (0..=u8::MAX).filter(|b| !printable(*b)).nth((code - 0x100) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::{gpt2_byte, spelling};
    use serde_json::json;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen = [0; 256];
        (0..0x200).filter_map(char::from_u32).filter_map(gpt2_byte).for_each(|b| seen[b as usize] += 1);
        assert_eq!(seen, [1; 256]);
        for (c, byte) in [('Ġ', b' '), ('Ċ', b'\n'), ('a', b'a'), ('Ã', 0xc3), ('ĉ', b'\t')] {
            assert_eq!(gpt2_byte(c), Some(byte), "{c}");
        }
    }

    #[test]
    fn decoders_without_bytes_are_refused() {
        for decoder in [
            json!(null),
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}]}),
            json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "▁"}, "content": " "}]}),
            json!({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "ByteFallback"}]}),
        ] {
            assert!(spelling(&decoder).is_none(), "{decoder}");
        }
    }
}
