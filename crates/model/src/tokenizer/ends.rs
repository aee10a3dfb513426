//! Tokenizes a text together with the byte offset where each token ends. This allows cutting text and tokens at the
//! same place without tokenizing every prefix, which takes quadratic time.
use super::Tokenizer;
use super::cuts::PIECE_BYTES;
use crate::error::Error;
use crate::guard::quietly;
use crate::halt;

/// Tokens of a text and their end offsets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// As returned by [`Tokenizer::encode`].
    pub tokens: Vec<u32>,
    /// For each token, the byte offset after it; never less than that of the previous token. A token in front of the
    /// text ends at 0. If several tokens form one character, each of them ends where the character does. Some
    /// tokenizers do not count spaces at a token's end.
    pub ends: Vec<usize>,
}

impl Ends {
    /// For each cut (a byte offset), the number of leading tokens that end at or before it. Cuts must be in order.
    pub fn before(&self, cuts: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut n = 0;
        let count = |cut: usize| {
            // Tokens in front of the text belong to it.
            if cut == 0 {
                return 0;
            }
            n += self.ends[n..].iter().take_while(|end| **end <= cut).count();
            n
        };
        cuts.into_iter().map(count).collect()
    }
}

impl Tokenizer {
    /// Like [`encode`](Self::encode), with the end offset of each token.
    pub fn encode_with_ends(&self, text: &str, special: bool) -> Result<Ends, Error> {
        self.ends_of_pieces(text, special, PIECE_BYTES)
    }

    pub(super) fn ends_of_pieces(&self, text: &str, special: bool, min: usize) -> Result<Ends, Error> {
        self.check()?;
        let (mut tokens, mut ends) = (Vec::new(), Vec::new());
        let (mut begin, mut last) = (0, 0);
        for (i, piece) in self.cuts.pieces(text, min).enumerate() {
            halt::check()?;
            let special = special && i == 0;
            let encoding = quietly(|| self.inner.encode(piece, special));
            let encoding = encoding.ok_or_else(|| self.broke())?.map_err(|e| self.failed(e))?;
            let prepend = self.in_front(encoding.get_ids(), special);
            tokens.extend(prepend.into_iter().chain(encoding.get_ids().iter().copied()));
            let own = encoding.get_offsets().iter().map(|(_, end)| begin + *end);
            // Offsets of a faulty tokenizer may be out of range or unordered: clamp them.
            let own = prepend.map(|_| 0).into_iter().chain(own).map(|end| {
                last = end.clamp(last, text.len());
                last
            });
            ends.extend(own);
            begin += piece.len();
        }
        Ok(Ends { tokens, ends })
    }
}
