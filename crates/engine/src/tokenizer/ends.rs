//! Where in a text its tokens end: what cuts a text and its tokens at the same place without tokenizing every beginning
//! of it, which takes time by the square of its length.
use super::Tokenizer;
use crate::error::Error;
use crate::guard::quietly;

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
        self.check()?;
        let encoding = quietly(|| self.inner.encode(text, special));
        let encoding = encoding.ok_or_else(|| self.broke())?.map_err(|e| self.failed(e))?;
        let prepend = self.in_front(encoding.get_ids(), special);
        let tokens = prepend.into_iter().chain(encoding.get_ids().iter().copied()).collect();
        let mut last = 0;
        let ends = prepend.map(|_| 0).into_iter().chain(encoding.get_offsets().iter().map(|(_, end)| *end));
        // Whatever a file asks of its tokenizer, a place is one.
        let ends = ends.map(|end| {
            last = end.clamp(last, text.len());
            last
        });
        let ends = ends.collect();
        Ok(Ends { tokens, ends })
    }
}
