//! Where in a text its tokens end: what cuts a text and its tokens at the same place without tokenizing every beginning
//! of it, which takes time by the square of its length.
use super::Tokenizer;
use super::cuts::PIECE_BYTES;
use crate::error::Error;
use crate::guard::quietly;
use crate::halt;

/// Tokens of a text, and where they end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// As [`Tokenizer::encode`] gives them.
    pub tokens: Vec<u32>,
    /// For each token the byte of the text behind it; never less than that of the token before. A token in front of the
    /// text ends at 0, and one of several that stand for the bytes of one character where the character does. Some
    /// tokenizers do not count blanks at a token's end.
    pub ends: Vec<usize>,
}

impl Ends {
    /// For each cut, a byte of the text, how many tokens from the first are before it whole. Cuts come in order.
    pub fn before(&self, cuts: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut n = 0;
        let count = |cut: usize| {
            // What stands in front of a text belongs to it.
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
    /// [`encode`](Self::encode), and where in the text each token ends.
    pub fn encode_with_ends(&self, text: &str, special: bool) -> Result<Ends, Error> {
        self.ends_of_pieces(text, special, PIECE_BYTES)
    }

    pub(super) fn ends_of_pieces(&self, text: &str, special: bool, least: usize) -> Result<Ends, Error> {
        self.check()?;
        let (mut tokens, mut ends) = (Vec::new(), Vec::new());
        let (mut begin, mut last) = (0, 0);
        for (i, piece) in self.cuts.pieces(text, least).enumerate() {
            halt::check()?;
            let special = special && i == 0;
            let encoding = quietly(|| self.inner.encode(piece, special));
            let encoding = encoding.ok_or_else(|| self.broke())?.map_err(|e| self.failed(e))?;
            let prepend = self.in_front(encoding.get_ids(), special);
            tokens.extend(prepend.into_iter().chain(encoding.get_ids().iter().copied()));
            let own = encoding.get_offsets().iter().map(|(_, end)| begin + *end);
            // Whatever a file asks of its tokenizer, a place is one.
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
